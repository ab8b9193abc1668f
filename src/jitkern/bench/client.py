"""The other end of ``worker.py``: starts the process, asks, and gives up after a while."""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jitkern
from jitkern.cache.bundle import copy_entries
from jitkern.cache.store import Cache
from jitkern.env import process_environment
from jitkern.errors import JitkernError, ToolchainError
from jitkern.host import module as host

WORKER = Path(__file__).with_name("worker.py")
START_TIMEOUT_S, JOB_TIMEOUT_S = 180.0, 180.0


class Worker:
    """A worker process and the folder that it works in; a context manager.

    Parameters
    ----------
    device, arch
        Where the op of a first call runs, and what kernels are compiled for.
    caches
        Folder of ``kernels`` and ``bytecode``, to share with another worker; by default its own.
    prefix, environment
        What goes in front of the command, and on top of the environment.
    """

    def __init__(
        self,
        device: str,
        arch: str,
        *,
        caches: Path | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder: Path = Path(tempfile.mkdtemp(prefix="jitkern-bench-"))
        self.caches: Path = caches or self.folder
        self.kernels: Path = self.caches / "kernels"
        self._job = {
            "device": device,
            "arch": arch,
            "path": [str(Path(jitkern.__file__).parents[1])],
        }
        self._log = (self.folder / "log").open("w+")
        try:
            self._process = subprocess.Popen(
                [*prefix, sys.executable, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**_environment(self.caches), **(environment or {})},
            )
        except BaseException:
            self._log.close()
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.ready: bool = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # what was not read is not missed
                    stream.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextmanager
    def empty_kernel_cache(self) -> Iterator[None]:
        """Put the kernels aside for a while."""
        aside = self.caches / "kernels-aside"
        self.kernels.rename(aside)
        try:
            yield
        finally:
            shutil.rmtree(self.kernels, ignore_errors=True)
            aside.rename(self.kernels)

    def ask(
        self,
        name: str,
        *,
        pycache: Path | None = None,
        timeout_s: float = JOB_TIMEOUT_S,
        **job: Any,
    ) -> dict[str, Any]:
        """Return the answer to a job; JitkernError where there is none.

        Without `pycache`, an empty folder for bytecode, it is kept and found where jobs share it.
        """
        if not self.ready:
            if self._answer(START_TIMEOUT_S).strip() != "ready":
                raise JitkernError(f"the worker process did not start: {self._last_words()}")
            self.ready = True
        question = {
            **self._job,
            "name": name,
            "pycache": str(pycache or self.caches / "bytecode"),
            "write_bytecode": pycache is None,
            **job,
        }
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise JitkernError(f"{name}: the worker process ended: {self._last_words()}") from None
        line = self._answer(timeout_s)
        if not line:
            raise JitkernError(f"{name}: the worker process ended: {self._last_words()}")
        answer = json.loads(line)
        if "result" not in answer:
            kind = ToolchainError if answer["kind"] == "ToolchainError" else JitkernError
            raise kind(f"{name}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def close(self) -> None:
        """Let the process end by itself, so that what it writes at its end is there."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(JOB_TIMEOUT_S)

    def _answer(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        if not ready:
            self._process.kill()
            raise JitkernError(f"the worker process gave no answer in {timeout_s:.0f} s")
        return self._process.stdout.readline()

    def _last_words(self) -> str:
        self._log.flush()
        lines = (self.folder / "log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def _environment(caches: Path) -> dict[str, str]:
    environment = process_environment()
    for variable in ("JITKERN_RECORD", "JITKERN_FREEZE", "JITKERN_LOG"):
        environment.pop(variable, None)
    # The host module alone: what else this user's caches have would be found instead of compiled.
    found = host.find()
    if found.path is not None and found.source != "shipped":
        copy_entries([found.path], Cache(caches / "host", shared=True))
    return {
        **environment,
        "JITKERN_CACHE_DIR": str(caches / "kernels"),
        "JITKERN_CACHE_PATH": str(caches / "host"),
        "CUDA_CACHE_DISABLE": "1",  # NVRTC 13 has a cache of its own, with which 40 ms are 15
    }

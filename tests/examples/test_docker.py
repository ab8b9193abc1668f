"""The example of a Docker image, without Docker: its jitkern commands, run in folders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from needs import needs_cxx, needs_nvrtc
from processes import EXAMPLES, run_example

from jitkern.cli import main
from jitkern.env import settings
from jitkern.host import library as host
from jitkern.ops import store

ARCHS = "8.0,9.0"
TEXT = re.sub(r"^#.*", "", (EXAMPLES / "docker" / "Dockerfile").read_text(), flags=re.MULTILINE)


def run_stage(name: str, root: Path) -> int:
    """Run the commands of a stage, with paths of the image below `root`; return how many."""
    stage = re.split(r"^FROM .* AS ", TEXT, flags=re.MULTILINE)
    (text,) = [one for one in stage if one.startswith(f"{name}\n")]
    found = re.findall(r"\bjitkern (warm .+?)(?= && |$)", text, re.MULTILINE)
    for command in found:
        words = command.replace("$ARCHS", ARCHS).split()
        store.kernel.cache_clear()
        assert main([f"{root}{word}" if word[0] == "/" else word for word in words]) == 0, command
    return len(found)


@needs_cxx
@needs_nvrtc
@pytest.mark.slow
def test_the_image_compiles_nothing(
    session_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, record = tmp_path / "app", tmp_path / "app" / "run.jsonl"
    host.module()
    shutil.copytree(EXAMPLES / "own_kernel", app)
    cpu = torch.device("cpu")
    kernel = str(app / "own_kernel.py")
    done = run_example(kernel, cpu, "--warm", "8.0", JITKERN_RECORD=str(record))
    assert done.returncode == 0, done.stderr

    with monkeypatch.context() as patch:
        patch.setenv("JITKERN_CACHE_DIR", str(tmp_path / "cache"))
        settings.cache_clear()
        assert run_stage("warm", tmp_path) == 2

    frozen = re.search(r"^ENV (JITKERN_CACHE_PATH)=(/kernels) (JITKERN_FREEZE)=1$", TEXT, re.M)
    assert frozen is not None
    serving = {"JITKERN_CACHE_PATH": f"{tmp_path}/kernels", "JITKERN_FREEZE": "1"}
    # The wheel of an image brings the host module, which is in the cache of this run here.
    serving |= {"JITKERN_CACHE_DIR": str(session_cache)}
    done = run_example(kernel, cpu, **serving)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("1000 rows of 576 on cpu: equal\n")
    with monkeypatch.context() as patch:
        for name, value in serving.items():
            patch.setenv(name, value)
        settings.cache_clear()
        assert run_stage("serve", tmp_path) == 2  # --check: nothing is missing

    # A kernel that was edited after the record was made is not in the image.
    source = app / "kernel.cc"
    source.write_text(source.read_text() + "// edited\n")
    done = run_example(kernel, cpu, **serving)
    assert done.returncode == 1
    assert "FrozenError: " in done.stderr and "dequantise" in done.stderr

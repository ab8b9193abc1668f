"""A process of the loader tests: loads one kernel and prints what happened as one JSON line.

Run as ``python loader_child.py '{"file": ..., ...}'``. Device code needs neither torch nor tvm-ffi,
so a child costs 0.1 s.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    config: dict[str, Any] = json.loads(sys.argv[1])
    caught: list[str] = []
    warnings.showwarning = lambda message, *_: caught.append(str(message))  # type: ignore[assignment]
    sys.modules["torch"] = None  # type: ignore[assignment] # tvm-ffi does without: 1 s less
    from jitkern.arch import Arch
    from jitkern.cache.stats import stats
    from jitkern.compilers import cxx, nvrtc
    from jitkern.errors import JitkernError
    from jitkern.jit.loader import load_aot, load_jit

    attempts: list[Any] = []

    def counted(function: Any) -> Any:
        return lambda *args, **how: attempts.append(function) or function(*args, **how)

    nvrtc.compile, cxx.build = counted(nvrtc.compile), counted(cxx.build)
    if "become" in config:
        become(config["become"])
    report: dict[str, Any] = {}
    Path(config["ready"], str(os.getpid())).touch()
    if "go" in config:
        while not Path(config["go"]).exists():
            time.sleep(0.005)
    start = time.perf_counter()
    try:
        file, flags, n = config["file"], config.get("flags"), config.get("n", 4)
        if file.endswith(".cu"):
            how = {"device_files": [file], "device_wrappers": [("tiny", f"Tiny<{n}>")]}
            module = load_jit("tiny", str(n), **how, extra_cuda_cflags=flags)
            image = module.image(Arch.parse(config.get("arch", "9.0")))
            report["sha256"] = hashlib.sha256(image).hexdigest()
            report["elf"] = image.startswith(b"\x7fELF")
        else:
            how = {"cpp_files": [file], "extra_include_paths": config.get("include_paths")}
            report["value"] = load_aot("tiny", **how, extra_cflags=flags)["value"]()
    except JitkernError as error:
        report["error"] = f"{type(error).__name__}: {error}"
    report["seconds"] = time.perf_counter() - start
    done = stats()
    report |= {
        "compiles": done.compiles,
        "attempts": len(attempts),
        "cached": done.cached,
        "waits": done.waits,
        "warnings": caught,
    }
    print(json.dumps(report))


def become(user: int) -> None:
    """Go on as another user, who may not be able to read this interpreter's own files."""
    import shutil  # noqa: F401
    import tempfile  # noqa: F401

    import jitkern.compilers.nvrtc  # noqa: F401
    from jitkern.compilers.find import find_nvrtc
    from jitkern.env import settings

    find_nvrtc()
    settings.cache_clear()
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


if __name__ == "__main__":
    main()

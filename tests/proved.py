"""Expensive tests: they run if a source of theirs has changed since they passed, or nightly.

    pytestmark = unproved("wheel", "hatch_build.py", "tests/test_wheel.py")

proved.json holds a digest of those files by name. ``TEST_ALL=1``, which the workflow sets once a
week, runs everything. ``python tests/proved.py [STEM...]`` runs what has changed, of these test
files or all, and writes the new digests.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__).with_name("proved.json")
TEST_ALL = bool(os.environ.get("TEST_ALL"))
PROVE = os.environ.get("PROVE")  # a name: its tests run, and no others that have one
HOST = ("src/jitkern/csrc/**/*.cc", "src/jitkern/csrc/**/*.h")

_digests: dict[str, str] = {}  # of the test files that are imported


def is_proved(name: str, *globs: str, also: object = None) -> bool:
    """Tell whether the tests of this name have passed with files of this content, and `also`."""
    digest = hashlib.sha256(b"" if also is None else repr(also).encode())
    for glob in globs:
        files = sorted(path for path in ROOT.glob(glob) if path.is_file())
        assert files, f"{glob}: no such file"
        for path in files:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    _digests[name] = digest.hexdigest()[:20]
    if PROVE is not None:
        return name != PROVE
    proved = json.loads(FILE.read_text()) if FILE.exists() else {}
    return not TEST_ALL and proved.get(name) == _digests[name]


def unproved(name: str, *globs: str, also: object = None) -> pytest.MarkDecorator:
    """Return a mark that skips a test if it is proved."""
    reason = f"{name}: passed with these sources, TEST_ALL=1 runs it"
    return pytest.mark.skipif(is_proved(name, *globs, also=also), reason=reason)


def _prove(file: Path) -> int:
    _digests.clear()
    sys.path[:0] = [str(file.parent)]
    import_module(file.stem)
    failed = 0
    for name, digest in _digests.items():
        proved = json.loads(FILE.read_text()) if FILE.exists() else {}
        if proved.get(name) == digest:
            continue
        print(f"{file.name}: {name}", flush=True)
        workers = ["-n", str(os.cpu_count()), "--dist", "worksteal"]
        command = [sys.executable, "-m", "pytest", "-q", "-x", *workers, str(file)]
        status = subprocess.run(command, env={**os.environ, "PROVE": name}).returncode
        failed += status != 0
        if status == 0:
            proved[name] = digest
            FILE.write_text(json.dumps(proved, indent=1, sort_keys=True) + "\n")
    return failed


def main(names: Sequence[str]) -> int:
    """Prove test files, by default all that have something to be proved."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [path for path in tests if "from proved import" in path.read_text()]
    return sum(_prove(path) for path in chosen if not names or path.stem in names)


if __name__ == "__main__":
    sys.modules["proved"] = sys.modules["__main__"]  # one dict of digests
    raise SystemExit(main(sys.argv[1:]) > 0)

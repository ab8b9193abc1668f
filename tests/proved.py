"""Expensive tests: they run if a source of theirs has changed since they passed, or nightly.

    pytestmark = unproved("wheel", "hatch_build.py", "tests/test_wheel.py")

proved.json holds a digest of those files by name. ``TEST_ALL=1``, which the workflow sets once a
week, runs everything. ``python tests/proved.py`` runs what has changed and writes the new digests.
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

_digests: dict[str, str] = {}  # of the test files that are imported


def is_proved(name: str, *globs: str) -> bool:
    """Tell whether the tests of this name have passed with files of this content."""
    digest = hashlib.sha256()
    for glob in globs:
        files = sorted(path for path in ROOT.glob(glob) if path.is_file())
        assert files, f"{glob}: no such file"
        for path in files:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    _digests[name] = digest.hexdigest()[:20]
    proved = json.loads(FILE.read_text()) if FILE.exists() else {}
    return not TEST_ALL and proved.get(name) == _digests[name]


def unproved(name: str, *globs: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test if it is proved."""
    reason = f"{name}: passed with these sources, TEST_ALL=1 runs it"
    return pytest.mark.skipif(is_proved(name, *globs), reason=reason)


def _prove(file: Path, proved: dict[str, str]) -> int:
    _digests.clear()
    sys.path.insert(0, str(file.parent))
    import_module(file.stem)
    if _digests.items() <= proved.items():
        return 0
    print(f"{file.name}: {', '.join(_digests)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(file)]
    status = subprocess.run(command, env={**os.environ, "TEST_ALL": "1"}).returncode
    if status == 0:
        proved |= _digests
        FILE.write_text(json.dumps(proved, indent=1, sort_keys=True) + "\n")
    return status


def main(names: Sequence[str]) -> int:
    """Prove test files, by default all that have something to be proved."""
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    chosen = [path for path in tests if "from proved import" in path.read_text()]
    proved = json.loads(FILE.read_text()) if FILE.exists() else {}
    return max(_prove(path, proved) for path in chosen if not names or path.stem in names)


if __name__ == "__main__":
    sys.modules["proved"] = sys.modules["__main__"]  # one dict of digests
    raise SystemExit(main(sys.argv[1:]))

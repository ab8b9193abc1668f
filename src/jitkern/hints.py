"""What a message tells its reader to type: the only place but the command line that names commands.

tests/test_cli.py proves that there are such commands.
"""

from __future__ import annotations

_BUILD_WITH = "build it beforehand with: jitkern warm"


def warm_host_module() -> str:
    """Say how the host module is built before it is needed."""
    return _BUILD_WITH


def warm_op(op: str, size: str, arch: object, *, sized_by: str = "element_size") -> str:
    """Say how the kernels of a built-in op are built before they are needed."""
    option = sized_by.replace("_", "-")
    return f"{_BUILD_WITH} --op {op} --{option} {size} --arch {arch}"


def warm_rows(arch: object) -> str:
    """Say how what the ops on rows share is built before it is needed: with rows of any size."""
    return f"{_BUILD_WITH} --element-size 16 --arch {arch}"


def replay(arch: object = "") -> str:
    """Say how what a run has used is built before the next one needs it."""
    choice = f" --arch {arch}" if arch else ""
    return f"record a run with JITKERN_RECORD=FILE and {_BUILD_WITH} --replay FILE{choice}"


def trust(file: object) -> str:
    """Say how a bundle is imported that somebody else could have written."""
    return f"if you trust them, import it with: jitkern cache import --trust {file}"


def trust_record(file: object) -> str:
    """Say how a record is replayed that somebody else could have written."""
    return f"if you trust them, replay it with: jitkern warm --trust --replay {file}"


def larger_bundle(file: object) -> str:
    """Say how a bundle is imported that is larger than most."""
    return f"if that is right, import it with: jitkern cache import --max-bytes 4G {file}"

"""docs/design.md says which files a call passes: the calls are watched, the includes are read."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from needs import needs_nvrtc

from jitkern.compilers.sources import CSRC

ROOT = Path(__file__).resolve().parent.parent
Fresh = Callable[..., "subprocess.CompletedProcess[str]"]

# Which files of the package run a function, by step. Importing one runs none of its functions, but
# what a module does at its end, such as a decorator of another module, does not count either.
WATCH = """
import sys, torch, tvm_ffi, jitkern
from pathlib import Path

PACKAGE = Path(jitkern.__file__).parent
steps, passed = {}, None

def watch(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(PACKAGE)):
        importing, f = False, frame.f_back
        while f is not None and not importing:
            importing = f.f_code.co_name == "<module>" and "jitkern" in f.f_code.co_filename
            f = f.f_back
        if not importing:
            passed.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())

def step(name, call):
    global passed
    passed = steps[name] = set()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)

def call():
    jitkern.store_cache(*caches, index, *rows)

def look_up():
    from jitkern.arch import Arch
    from jitkern.ops import store
    store.kernel(int(sys.argv[1]), 1, 4).image(Arch(9, 0))

caches, rows = torch.zeros(2, 4, 656), torch.zeros(2, 1, 656)
index = torch.zeros(1, dtype=torch.int32)
step("host module", call)
step("warm", call)
step("kernel", look_up)
for name, files in steps.items():
    print(name, *sorted(files), sep=":")
"""


def passed_by_a_call(forked_python: Fresh, row_bytes: int) -> dict[str, set[str]]:
    lines = forked_python(WATCH, str(row_bytes)).stdout.strip().splitlines()
    return {name: set(files) for name, *files in (line.split(":") for line in lines)}


def named(text: str) -> set[str]:
    """The Python files that a part of the page names."""
    return set(re.findall(r"`([\w/]+\.py)`", text))


@needs_nvrtc
def test_the_files_that_a_call_passes(forked_python: Fresh) -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    section = page.partition("## The files that a call passes")[2].partition("\n## ")[0]
    warm, _, cold = section.partition("- **Cold**")
    host, _, rest = cold.partition("The kernel, in a cache:")
    cached, _, compiled = rest.partition("The kernel, compiled:")

    first = passed_by_a_call(forked_python, 9973)  # a row size of no other test: compiled
    again = passed_by_a_call(forked_python, 9973)
    assert again["warm"] == named(warm)
    assert again["host module"] == named(host)
    in_cache = {file for file in named(host) if file.startswith("cache/")}
    assert again["kernel"] == named(cached) | in_cache
    # What it would have read was not there yet.
    assert first["kernel"] | {"cache/schema.py"} == again["kernel"] | named(compiled)

    includes = included(CSRC / "ops" / "store.cc") | included(CSRC / "ops" / "store.cu")
    names = set(re.findall(r"`(?:[\w/]+/)?([\w{},]+\.(?:cc|cu|cuh|h|\{cc,h\}))`", warm))
    files = {f"store.{end}" for end in ("cc", "h")} if "store.{cc,h}" in names else set()
    listed = files | {name for name in names if "{" not in name}
    headers = {path.name for path in includes} - {"cpu_copy.h"}  # that one is of the CPU
    assert headers <= listed
    assert {name for name in listed if not name.endswith(".cc")} <= headers
    for name in listed:
        assert list(CSRC.rglob(name)), f"{name}: named in docs/design.md, and is nowhere"


def test_headers_that_users_may_include() -> None:
    """Each says so, the page for users names them, and they stand alone."""
    page = (ROOT / "docs" / "writing-kernels.md").read_text()
    folder = CSRC / "include" / "jitkern"
    headers = [path for path in folder.rglob("*") if path.is_file()]
    for_users = {path for path in headers if "Users may include it." in path.read_text()}
    names = {path.relative_to(folder).as_posix() for path in for_users}
    assert names == set(re.findall(r"`jitkern/([\w./]+)`", page))
    for path in for_users:
        assert included(path) <= for_users


def included(file: Path) -> set[Path]:
    """The file and jitkern's own headers that it includes, and they include."""
    found: set[Path] = set()
    todo = [file]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'#include [<"]([\w./]+)[>"]', path.read_text()):
            for place in (path.parent, CSRC, CSRC / "include"):
                if (place / name).is_file():
                    todo.append((place / name).resolve())
                    break
    return found

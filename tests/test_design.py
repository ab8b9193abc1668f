"""The shape of the source: imports go down the wings, one module reads the environment, a call
passes few files, and which headers are for users."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from needs import needs_nvrtc

import jitkern
from jitkern.compilers.sources import CSRC
from jitkern.host import library as host

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(jitkern.__file__).parent

# A wing is a folder, or a module of the top level. It imports its own modules and the lines above.
# Wings of one line do not import each other. The page of the design has the same lines.
WINGS = """
errors version gate names
args env fs lazy
arch
cache compilers
host
jit
ops
comm
offload nn
warming perf
integrations typing
cli
__main__
"""
RANK = {wing: rank for rank, line in enumerate(WINGS.split("\n")) for wing in line.split()}
RANK["torch_ops"] = RANK["ops"]  # a public name of the wing
# By name, such as "ops.store". A folder's __init__ has the name of the folder, the package's is "".
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").strip("."): (
        path
    )
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import of jitkern: also in functions and for type checkers."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{MODULES[module]}:{node.lineno}: imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, target = name.partition(".")
            if package == "jitkern":
                is_module = target in MODULES
                yield node.lineno, target if is_module else target.rpartition(".")[0]


@pytest.mark.parametrize("module", [module for module in MODULES if module])
def test_imports_go_down(module: str) -> None:
    wing = module.split(".")[0]
    assert wing in RANK, f"{wing} has no place: give it one in tests/test_design.py"
    for line, target in imports(module):
        below = target.split(".")[0]
        if below not in ("", wing) and {below, wing} != {"ops", "torch_ops"}:
            assert RANK[below] < RANK[wing], f"{MODULES[module]}:{line}: imports jitkern.{target}"


def test_there_are_no_circles() -> None:
    targets = {module: {target for _, target in imports(module)} for module in MODULES}
    try:
        TopologicalSorter(targets).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(f"jitkern.{module}".strip(".") for module in error.args[1]))


def test_the_page_has_the_wings_and_names_files_that_exist() -> None:
    """The table, each `path` of the page, each picture, and each file that a picture names."""
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", page, re.MULTILINE)
    assert [int(level) for level, _ in rows] == list(range(1, len(rows) + 1))
    levels = [set(re.findall(r"`(\w+)`", wings)) for _, wings in rows]
    assert levels == [set(line.split()) for line in WINGS.strip().splitlines()]
    pictures = re.findall(r"\]\((img/\w+\.svg)\)", page)
    assert pictures
    paths = re.findall(r"`([\w.]+(?:/[\w.]*)+|\w+\.(?:py|md))`", page)
    for picture in pictures:
        drawn = (ROOT / "docs" / picture).read_text()
        paths += re.findall(r">([\w/]+\.(?:py|cc|h))\b", drawn)
    built = {"build/"}  # by the first import
    for path in set(paths) - built:
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), f"{path} does not exist"


def test_only_env_reads_the_environment() -> None:
    for module, path in MODULES.items():
        if module == "env":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            reads = {"environ", "environb", "getenv", "getenvb"}
            assert name not in reads, f"{path}:{node.lineno}: reads the environment"


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


# Files on the way from store_cache() to the GPU. The numbers may only fall.
WARM, COLD = 17, 36


def passed_by_a_call(forked_python: Fresh, row_bytes: int) -> dict[str, set[str]]:
    lines = forked_python(WATCH, str(row_bytes)).stdout.strip().splitlines()
    return {name: set(files) for name, *files in (line.split(":") for line in lines)}


@needs_nvrtc
@pytest.mark.usefixtures("host_module")  # its build would count as part of the cold call
def test_a_call_passes_few_files(forked_python: Fresh) -> None:
    """Those of Python are watched, the headers are read; a kernel is compiled, then in a cache."""
    host.module()  # built, which is once per machine
    first = passed_by_a_call(forked_python, 9973)  # a row size of no other test
    again = passed_by_a_call(forked_python, 9973)
    includes = included(CSRC / "ops" / "store.cc") | included(CSRC / "ops" / "store.cu")
    native = {path.name for path in includes if path.name != "cpu_copy.h"}
    native |= {path.name for path in (CSRC / "host").glob("*.cc") if f"{path.stem}.h" in native}
    warm = again["warm"] | native
    cold = warm.union(*first.values(), *again.values())
    print(f"warm {len(warm)}, cold {len(cold)}: {sorted(map(str, cold))}")
    wrapper = 0 if host._passes_big_ints() else 1  # of functions, before tvm-ffi 0.1.15
    assert len(warm) <= WARM + wrapper, sorted(warm)
    assert len(cold) <= COLD + wrapper, sorted(cold)
    # No other compiler runs, and a kernel in the cache needs no compiler and no lock.
    not_cold, not_cached = {"compilers/cxx.py"}, {"compilers/nvrtc.py", "cache/lock.py"}
    assert all((PACKAGE / file).is_file() for file in not_cold | not_cached)
    assert not not_cold & cold
    assert not not_cached & again["kernel"]


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

"""The package as a whole: what importing it costs, and what it offers: each name is on a page."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import has

import jitkern
import jitkern.integrations
from jitkern.args import choice_arg
from jitkern.compilers.find import find_nvrtc
from jitkern.names import ELSEWHERE, NAMES

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


IMPORT = """
import contextlib, io, sys, jitkern
print(*sorted(name for name in sys.modules if name.startswith("jitkern")))
dir(jitkern)
from jitkern.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
print(*sys.modules)
import jitkern.ops.store  # `jitkern warm` compiles kernels without PyTorch, a second of import
assert "torch" not in sys.modules
"""


def test_import_brings_neither_torch_nor_cuda_and_leaves_no_file(
    fresh_python: Fresh, tmp_path: Path
) -> None:
    env = {"HOME": str(tmp_path), "XDG_CACHE_HOME": None, "JITKERN_CACHE_DIR": None}
    env["JITKERN_CACHE_MAX_BYTES"] = "plenty"  # no setting is read yet
    ours, of_help = fresh_python(IMPORT, env=env).stdout.splitlines()
    assert ours == "jitkern jitkern.gate jitkern.ops jitkern.ops._ops jitkern.version"
    heavy = {"torch", "tvm_ffi", "cuda", "ninja", "rich", "filelock", "numpy", "subprocess"}
    assert not {name.partition(".")[0] for name in of_help.split()} & {*heavy, "ctypes"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("minor", [13, 14])
def test_python_without_the_gil_is_refused(monkeypatch: pytest.MonkeyPatch, minor: int) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setattr(sys, "version_info", (3, minor, 1))
    with pytest.raises(ImportError) as caught:
        runpy.run_path(jitkern.__file__)
    assert str(caught.value) == (
        f"jitkern: Python 3.{minor} without the GIL, expected the GIL: use the regular build of "
        "Python, or set PYTHON_GIL=1"
    )


FIRST_CALL = """
import sys, torch, tvm_ffi
before = set(sys.modules)
import jitkern
table = torch.arange(12, dtype=torch.int32).reshape(4, 3)
assert jitkern.indexing(table, torch.tensor([2])).tolist() == [[6, 7, 8]]
from jitkern.arch import Arch
from jitkern.ops.index import kernel
if len(sys.argv) > 1:
    assert kernel(12, 4, 8)._lookup(Arch(9, 0)).source == "cached"
print(*sorted(set(sys.modules) - before))
"""


def test_a_first_call_imports_what_it_needs(fresh_python: Fresh) -> None:
    """Neither ninja nor a compiler, nor what writes to a cache, where all is there."""
    from jitkern.arch import Arch
    from jitkern.host.library import module
    from jitkern.ops.index import kernel

    module()  # in the session's cache
    kernel.cache_clear()  # another test may have compiled it into a cache of its own
    argv = []
    if has(find_nvrtc):
        kernel(12, 4, 8).image(Arch(9, 0))
        argv = ["with a kernel"]
    loaded = set(fresh_python(FIRST_CALL, *argv).stdout.split())
    assert not {name.partition(".")[0] for name in loaded} & {"ninja", "filelock", "rich", "cuda"}
    building = {"jit.native", "compilers.nvrtc"}
    assert not loaded & {f"jitkern.{name}" for name in building}


@pytest.mark.parametrize("name", sorted(jitkern._HOME))
def test_public_name(name: str) -> None:
    value = getattr(jitkern, name)
    assert value is getattr(importlib.import_module(jitkern._HOME[name]), name)
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_the_table_says_what_the_type_checker_sees() -> None:
    tree = ast.parse(Path(jitkern.__file__).read_text())
    guards = (node for node in tree.body if isinstance(node, ast.If))
    guarded = next(node for node in guards if ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.asname: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {*imported, "__version__"} == {*dir(jitkern)}
    assert imported == {**jitkern._HOME, **dict.fromkeys(jitkern._PACKAGES, "jitkern")}


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("stor_cache", "; did you mean jitkern.store_cache?"),
        ("zzz", ""),
        ("nn.PinedPool", "; did you mean jitkern.offload.PinnedPool?"),
        ("comm.stor_cache", "; did you mean jitkern.store_cache?"),
        ("swap_blocks", "; did you mean jitkern.copy_blocks?"),
    ],
)
def test_an_unknown_name_is_an_attribute_error(
    capsys: pytest.CaptureFixture[str], name: str, suggestion: str
) -> None:
    package, _, name = f"jitkern.{name}".rpartition(".")
    with pytest.raises(AttributeError) as caught:
        getattr(importlib.import_module(package), name)
    text = f"module '{package}' has no attribute '{name}'{suggestion}"
    assert str(caught.value) == text
    # Python adds suggestions of its own when it prints an error.
    sys.__excepthook__(AttributeError, caught.value, None)
    assert capsys.readouterr().err.splitlines()[-1] == f"AttributeError: {text}"


def test_a_short_word_that_differs_in_a_letter_is_not_suggested() -> None:
    with pytest.raises(ValueError, match=r"^f: kind: 'mha', expected 'kv' or 'mla'$"):
        choice_arg("f", "kind", "mha", ("kv", "mla"))
    with pytest.raises(ValueError, match=r"; did you mean 'warn'\?$"):
        choice_arg("f", "mode", "wran", ("raise", "warn"))


def test_the_package_of_plug_ins_lists_them() -> None:
    assert dir(jitkern.integrations) == [
        "minisgl", "plug_into_sglang", "plug_into_vllm", "sglang", "vllm",
    ]  # fmt: skip


def test_a_plug_in_is_imported_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(jitkern.integrations, "vllm", raising=False)
    monkeypatch.delitem(sys.modules, "jitkern.integrations.vllm", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)  # the stand-in of other tests
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    with pytest.raises(ImportError, match="vllm"):
        _ = jitkern.integrations.vllm
    with pytest.raises(AttributeError, match=r"has no attribute 'vlm'$"):
        _ = jitkern.integrations.vlm


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_guide_for_migrating_has_a_name_from_elsewhere(name: str) -> None:
    guide = (ROOT / "docs" / "migrating.md").read_text()
    assert re.search(rf"^\|[^|]*`{name}\w*\([^|]*\| `{ELSEWHERE[name]}\(", guide, re.MULTILINE)


ROOT = Path(__file__).resolve().parent.parent
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
SHOWN = re.findall(r"^::: (\S+)$", PAGES, re.MULTILINE)
_, _, TYPES = PAGES.partition("\n## Types\n")  # a list of the reference


@pytest.mark.parametrize("package", NAMES)
def test_the_names_of_a_package_are_those_of_its_init(package: str) -> None:
    module = importlib.import_module(package)
    text = Path(module.__file__ or "").read_text()
    imported = re.findall(r"^from jitkern\..+ import \w+ as ([A-Za-z]\w+)$", text, re.MULTILINE)
    assert sorted(imported) == sorted(module.__all__) == dir(module)
    assert {*NAMES} | {"jitkern.integrations"} == {f"jitkern.{name}" for name in jitkern._PACKAGES}


@pytest.mark.parametrize("package", ["jitkern", *NAMES])
def test_every_public_name_is_on_a_page(package: str) -> None:
    types = TYPES.partition("\n## ")[0]
    names = {name for name in importlib.import_module(package).__all__ if f"`{name}`" not in types}
    errors = {name for name, value in vars(jitkern.errors).items() if isinstance(value, type)}
    shown = {place.rpartition(".")[2] for place in SHOWN}
    assert "jitkern.errors" in SHOWN
    assert names - shown - errors <= {"__version__"}


def test_no_page_shows_a_name_twice() -> None:
    """The links of the others would lead to either."""
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()

"""load_jit on the device route: where a kernel comes from, what a warm load costs, launches."""

from __future__ import annotations

import codecs
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import needs_nvrtc
from tiny import SM_90, Use, compiles, tiny

from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.entry import new_entry
from jitkern.cache.stats import stats
from jitkern.cache.store import Cache
from jitkern.compilers.find import Tool, find_nvrtc
from jitkern.compilers.sources import CSRC
from jitkern.errors import ToolchainError
from jitkern.jit import device
from jitkern.jit.loader import load_aot, load_jit

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@needs_nvrtc
def test_device_route_compiles_when_asked_and_once(folder: Path, empty_cache: Path) -> None:
    before = compiles()
    module = tiny()
    assert not empty_cache.exists()
    first = module._lookup(SM_90)
    assert (first.source, compiles() - before) == ("compiled", 1)
    assert first.path is not None and first.path.is_relative_to(empty_cache)
    assert module._lookup(SM_90).source == "memo"
    again = tiny()._lookup(SM_90)
    assert (again.source, again.loaded, again.path) == ("cached", first.loaded, first.path)
    assert module.image(SM_90).startswith(b"\x7fELF")
    assert module.image(Arch(8, 0)) != module.image(SM_90)
    assert compiles() - before == 2
    # One that another compiler made counts only without a compiler: see test_variants.py.
    foreign = new_entry(tiny(5)._key(SM_90), "nvrtc-99.9", {"tiny.cubin": b"foreign"})
    Cache(empty_cache).publish(foreign)
    assert tiny(5)._lookup(SM_90).source == "compiled"
    meta = module._lookup(SM_90).entry.meta
    assert (meta["toolchain"], meta["kind"]) == (find_nvrtc().id, "cubin")
    assert (meta["describe"]["args"], module.name) == (["4"], "tiny_4")


def test_what_makes_another_kernel(folder: Path) -> None:
    """No failing test told when flags, or the arch, were left out of the key."""
    keys = {str(tiny(**how)._key(SM_90)) for how in ({}, {"extra_cuda_cflags": ["-DX"]})}
    keys |= {str(tiny(5)._key(SM_90)), str(tiny()._key(Arch(8, 0)))}
    (folder / "half.cuh").write_text("__device__ inline int half(int n) { return n / 3; }\n")
    keys.add(str(tiny()._key(SM_90)))
    assert len(keys) == 5


def test_another_compiler_is_another_variant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No failing test told when its version was left out."""
    variants = set()
    for version in ("13.4", "13.5"):
        tool = Tool(("libnvrtc.so",), "nvrtc", version)
        monkeypatch.setattr(device.toolchain, "find_nvrtc", lambda tool=tool: tool)
        variants.add(device.DeviceImage(tiny(), SM_90).variant)
    assert variants == {"nvrtc-13.4", "nvrtc-13.5"}


@needs_nvrtc
def test_a_kernel_may_have_the_name_of_its_file(folder: Path) -> None:
    (folder / "tiny.cu").rename("scale.cu")
    wrappers = [("scale", "Tiny<8>")]
    module = load_jit("scale", device_files=["scale.cu"], device_wrappers=wrappers)
    assert module.image(SM_90).startswith(b"\x7fELF")


@needs_nvrtc
def test_places_in_order(
    folder: Path,
    empty_cache: Path,
    tmp_path: Path,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = tiny().image(SM_90)
    shared = tmp_path / "shared"
    empty_cache.rename(shared)
    use(CACHE_PATH=f"{tmp_path / 'nothing'}:{shared}")
    found = tiny()._lookup(SM_90)
    assert found.source == "cached" and found.path is not None
    assert found.path.is_relative_to(shared)
    assert not empty_cache.exists()

    use(CACHE_PATH="")
    monkeypatch.setattr(get, "SHIPPED", shared)
    get._caches.cache_clear()
    before = stats().shipped
    assert tiny()._lookup(SM_90).source == "shipped"
    assert tiny().image(SM_90) == image
    assert stats().shipped == before + 2
    get._caches.cache_clear()


WARM = """
import subprocess, sys
sys.modules["torch"] = None
import tvm_ffi  # imports cuda.bindings itself where it is installed
theirs = set(sys.modules)
import jitkern
import jitkern.jit.loader
from jitkern.arch import Arch

def forbidden(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.exec", "os.posix_spawn", "os.system"):
        raise RuntimeError(f"{event} {args}")
sys.addaudithook(forbidden)
for n in range(4, 12):
    module = jitkern.load_jit("tiny", str(n), device_files=[sys.argv[1]],
                              device_wrappers=[("tiny", f"Tiny<{n}>")])
    assert module._lookup(Arch(9, 0)).source == "cached"
ours = set(sys.modules) - theirs
names = [name for name in ours if name.partition(".")[0] in ("cuda", "ninja", "filelock", "torch")]
maps = open("/proc/self/maps").read()
print("libnvrtc" in maps, *names)
"""


@needs_nvrtc
def test_a_warm_load_starts_and_imports_nothing(folder: Path, fresh_python: Fresh) -> None:
    for n in range(4, 12):
        tiny(n).image(SM_90)
    assert fresh_python(WARM, str(folder / "tiny.cu")).stdout.split() == ["False"]


def test_a_missing_file_is_named_with_the_places(folder: Path) -> None:
    text = f"^load_jit: device_files: 'nope.cu' does not exist, tried {folder}/nope.cu$"
    with pytest.raises(FileNotFoundError, match=text):
        load_jit("x", device_files=["nope.cu"], device_wrappers=[("x", "X")])
    with pytest.raises(FileNotFoundError, match=r"'/nope\.cc' does not exist, tried /nope\.cc$"):
        load_aot("x", cpp_files=["/nope.cc"])


@needs_nvrtc
def test_a_byte_order_mark_is_skipped(folder: Path) -> None:
    """nvcc and g++ take it, NVRTC does not."""
    for name in ("tiny.cu", "half.cuh"):
        (folder / name).write_bytes(codecs.BOM_UTF8 + (folder / name).read_bytes())
    assert tiny().image(SM_90).startswith(b"\x7fELF")


def test_a_quote_in_a_path_is_refused(folder: Path) -> None:
    (folder / 'a"b.cc').touch()
    with pytest.raises(ValueError, match=r"cpp_files: 'a\"b\.cc', expected a path without quotes"):
        load_aot("x", cpp_files=['a"b.cc'])


def test_a_module_of_kernels_is_shown_with_their_names(folder: Path) -> None:
    assert repr(tiny()) == "DeviceModule(tiny<4> with tiny)"


def test_a_name_means_one_file(folder: Path) -> None:
    """The user's own file was not taken where the package has one of that name."""
    how = {"device_wrappers": [("tiny", "Tiny<4>")]}
    own = CSRC / "ops" / "index.cu"
    assert load_jit("x", device_files=["jitkern:ops/index.cu"], **how).files == (own,)
    (folder / "ops").mkdir()
    mine = folder / "ops" / "index.cu"
    mine.write_text("")
    for name in ("ops/index.cu", "./ops/index.cu", Path("ops/index.cu"), mine):
        assert load_jit("x", device_files=[name], **how).files == (mine,)
    with pytest.raises(FileNotFoundError, match=r"'jitkern:ops/mine\.cu' does not exist, tried /"):
        load_jit("x", device_files=["jitkern:ops/mine.cu"], **how)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: load_jit(), TypeError, "load_jit: args: empty, expected the module's name first"),
        (lambda: load_jit("x", 6), TypeError, r"load_jit: args\[1\]: int, expected str; make_cpp"),
        (lambda: load_jit("x"), ValueError, "load_jit: cpp_files, cuda_files, device_files, cpp_w"),
        (lambda: load_aot("x"), ValueError, "load_aot: cpp_files, cuda_files: all empty, expected"),
        (lambda: load_aot("x", cpp_files=["scale.cc"], extra_ldflags=["-g", '-DX="a']), ValueError,
         "load_aot: extra_ldflags: '-DX=\"a': No closing quotation, expected words quoted as in"),
        (lambda: tiny().launch("nope", grid=1), ValueError, "launch: export: 'nope', expected '"),
        (lambda: Arch.parse(90), TypeError, "arch: 90, expected a str"),
        (lambda: load_jit("x", cuda_files=["single.cu"]), ToolchainError, r".*JITKERN_ARCH=9\.0"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    folder: Path, use: Use, call: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=f"^{says}"):
        call()


PAIR = "expected (name, class) or (name, class, params)"
NO_FUNCTION = (
    "cpp_wrappers: empty, expected the functions for kernels on the CPU along with cpp_files or "
    "flags for them"
)


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [
        (TypeError, "device_files: 'tiny.cu', expected a list: ['tiny.cu']", "tiny.cu"),
        (TypeError, "device_files[0]: int, expected a path", [3]),
        (FileNotFoundError, "device_files: '.' is no file", ["."]),
        (TypeError, "extra_cuda_cflags[0]: int, expected a str", [3]),
        (TypeError, "extra_cuda_cflags: '-g', expected a list: ['-g']", "-g"),
        (TypeError, "build_directory: int, expected a path", 3),
        (TypeError, "device_wrappers: 'scale', expected a list: [('scale', 'Scale", "scale"),
        (ValueError, "device_wrappers: empty, expected (name, class) pairs", []),
        (TypeError, f"device_wrappers[0]: 'scale', {PAIR}", ("scale", "Scale<256>")),
        (TypeError, f"device_wrappers[0]: ('a', 'A', ['int x']), {PAIR}", [("a", "A", ["int x"])]),
        (TypeError, "cpp_wrappers[0]: ('tiny', 'f', 'i'), expected (name, e", [("tiny", "f", "i")]),
        (ValueError, "cpp_wrappers: 'tny', expected the name of a kernel: tiny", [("tny", "scl")]),
        (ValueError, NO_FUNCTION, []),
        (ValueError, "cuda_files: given along with device_files", ["single.cu"]),
    ],
)
def test_mistakes_in_the_arguments_are_named(
    folder: Path, error: type[Exception], message: str, wrong: Any
) -> None:
    given: dict[str, Any] = {"device_files": ["tiny.cu"], "device_wrappers": [("tiny", "Tiny<4>")]}
    name = re.split(r"[:\[]", message)[0]
    if name == "cpp_wrappers":
        given["cpp_files"] = ["scale.cc"]
    with pytest.raises(error) as caught:
        load_jit("tiny", **{**given, name: wrong})
    assert str(caught.value).startswith(f"load_jit: {message}")

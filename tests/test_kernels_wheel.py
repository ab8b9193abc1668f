"""The wheel of prebuilt kernels: its contents, and when its kernels are used.

A tiny one is built here: one op, one row size, one arch. tools/release_check.py installs the real
one where there is no compiler, and looks its kernels up.
"""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import pip
from filelock import FileLock
from needs import needs_nvrtc

import jitkern
from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cli import doctor
from jitkern.jit.device import DeviceImage
from jitkern.ops import device_ops
from jitkern.ops._ops import SIZES
from jitkern.ops.store import kernel
from jitkern.warming import sized_ops

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
ROW_BYTES = 4112  # of no other test: no cache of this run has it
LIST = f"""
archs = ["9.0"]
[[warm]]
ops = ["store_cache"]
row_bytes = [{ROW_BYTES}]
"""


@pytest.fixture(scope="session")
def tiny_wheel(session_cache: Path) -> Path:
    """Built by the very hook, of a list of its own."""
    out = session_cache.parent / "kernels-wheel"
    with FileLock(f"{out}.lock"):
        if not out.exists():
            tree = out.with_name("kernels-tree")
            shutil.copytree(ROOT / "kernels", tree / "kernels")
            shutil.copy(ROOT / "LICENSE", tree)
            (tree / "src").symlink_to(ROOT / "src")
            (tree / "kernels" / "kernels.toml").write_text(LIST)
            pip("wheel", tree / "kernels", "--no-build-isolation", "-w", out)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture
def beside(tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process finds the wheel, as if it were installed; it is the folder of the package."""
    site = tmp_path / "site"
    zipfile.ZipFile(tiny_wheel).extractall(site)
    monkeypatch.syspath_prepend(site)
    get._caches.cache_clear()
    yield site / "jitkern_kernels"
    get._caches.cache_clear()


@needs_nvrtc
def test_contents(tiny_wheel: Path) -> None:
    """Entries, a license and nothing else, for every Python of any platform."""
    name = f"jitkern_kernels-{jitkern.__version__}"
    assert tiny_wheel.name == f"{name}-py3-none-any.whl"
    entry = re.compile(r"jitkern_kernels/v1/store_4112_\w+-[0-9a-f]{20}/nvrtc-[\d.]+/")
    names = zipfile.ZipFile(tiny_wheel).namelist()
    inside = {name for name in names if entry.match(name)}
    assert len(inside) == 4  # for int32 and for int64: code, and what it was made of
    others = {name for name in names if not name.startswith(f"{name}.dist-info/")} - inside
    package = {"jitkern_kernels/__init__.py", "jitkern_kernels/LICENSE"}
    assert {name for name in others if ".dist-info/" not in name} == package
    metadata = zipfile.ZipFile(tiny_wheel).read(f"{name}.dist-info/METADATA").decode()
    assert "Requires-Dist" not in metadata  # pip would look for jitkern on an index


def test_the_list_is_one() -> None:
    """What it names there is, each op with kernels among it; each arch once."""
    wanted = tomllib.loads((ROOT / "kernels" / "kernels.toml").read_text())
    assert wanted.keys() == {"archs", "warm"}
    assert len(set(map(Arch.parse, wanted["archs"]))) == len(wanted["archs"])
    sized = []
    for given in wanted["warm"]:
        sizes = {size.name: given.get(size.name, ()) for size in SIZES}
        sized += sized_ops(given.get("ops"), sizes)
    assert len(set(sized)) == len(sized)
    assert {op for op, _ in sized} == set(device_ops())


@needs_nvrtc
def test_what_is_asked_for_last(beside: Path, empty_cache: Path) -> None:
    kernel.cache_clear()
    module, arch = kernel(ROW_BYTES, 16, 4), Arch(9, 0)
    assert [cache.origin for cache in get.caches()][-2:] == ["shipped", get.KERNELS]
    get.user_cache().publish(get.build(DeviceImage(module, arch)))
    assert module._lookup(arch).source == "cached"
    kernel.cache_clear()


@needs_nvrtc
def test_doctor_says_what_is_installed(beside: Path) -> None:
    assert doctor.kernels_wheel() == jitkern.__version__
    served = f"{jitkern.__version__}, kernels for 9.0 for GPUs of 9.0, no kernels for GPUs of 8.9"
    assert doctor.kernels_wheel([Arch(9, 0), Arch(9, 0), Arch(8, 9)]) == served
    (metadata,) = beside.parent.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace(jitkern.__version__, "0.0.9"))
    text = f"0.0.9, for another version of jitkern; install jitkern-kernels {jitkern.__version__}"
    with pytest.raises(jitkern.UnsupportedError, match=text):
        doctor.kernels_wheel()

"""The code of a device module for one arch: how it is found and built, and what it tells."""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from jitkern.arch import Arch
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Buildable, BuildOutput
from jitkern.cache.store import EXACT, LOADS, MAY_LOAD, NO_USE, SHIPPED_WILL_DO
from jitkern.compilers.find import find_nvrtc
from jitkern.compilers.sources import CSRC
from jitkern.env import settings
from jitkern.errors import JitkernError, ToolchainError
from jitkern.fs import slug

if TYPE_CHECKING:
    from jitkern.compilers.find import CudaHeaders
    from jitkern.compilers.nvrtc import Image


class DeviceImage(Buildable[bytes]):
    """The code of a :class:`jitkern.DeviceModule` for one arch.

    Its variant is the compiler's version and the state of CUDA's own headers, by file names.
    Without a compiler or those headers an entry of any variant is good, as in a frozen process.
    Headers in directories that the user has named must be the same for any entry.
    """

    def __init__(self, module: Any, arch: Arch) -> None:
        self._module = module
        self._arch = arch
        self.key: Key = module.key(arch)
        try:
            headers = module.cuda_headers()
            self.variant: str = _variant(headers) if headers is None or headers.complete else ""
        except ToolchainError:
            self.variant = ""
        self.has_compiler: bool = bool(self.variant)

    def rank(self, meta: Mapping[str, Any]) -> int:
        """What our compiler would make goes first, then what loads here for sure.

        A driver loads cubins of its CUDA's major version and of older ones, and PTX of no newer
        compiler. A shipped cubin of an NVRTC of the same CUDA, or of an older one, is as good.
        """
        made_with = str(meta["toolchain"])
        if made_with == self.variant:
            return EXACT
        if not made_with.endswith(self._given_id):
            return NO_USE
        is_cubin = meta.get("kind") == "cubin"  # PTX is for drivers that are as new as NVRTC
        if is_cubin and 0 < _nvrtc_major(made_with) <= _nvrtc_major(self.variant):
            return SHIPPED_WILL_DO
        made_by, ours = _cuda_version(made_with), self._cuda_version_here
        is_old_enough = made_by <= ours if meta.get("kind") == "ptx" else made_by[0] <= ours[0]
        loads = ours == _NO_VERSION or (is_old_enough and made_by != _NO_VERSION)
        return LOADS if loads else MAY_LOAD

    @cached_property
    def _cuda_version_here(self) -> tuple[int, int]:
        """Of our compiler, which is chosen to suit the driver; without one, of the driver."""
        return _cuda_version(self.variant) if self.variant else _driver_version()

    @cached_property
    def _given_id(self) -> str:
        return str(self._module.given_headers_id())

    def load(self, entry: Entry) -> bytes:
        return entry.data

    def hint(self) -> str:
        return str(self._module.hint(self._arch))

    def build(self) -> BuildOutput:
        start = time.perf_counter()
        module = self._module
        compile_ = _compiler(minimal=all(file.is_relative_to(CSRC) for file in module.files))
        headers = module.cuda_headers()
        variant = _variant(headers)
        image = compile_(
            module.closure.source,
            # Not NAME.cu: a header of that name, the user's own file, would include itself.
            name=f"{module.name}.instance.cu",
            headers=module.closure.headers,
            arch=self._arch,
            options=module.options,
            cuda_headers=headers,
        )
        notes = {
            "kind": image.kind,
            "log": image.log,
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        return BuildOutput(variant, {f"{slug(module.op)}.{image.kind}": image.data}, notes)


def _compiler(*, minimal: bool) -> Callable[..., Image]:
    # Imported here: a warm load needs neither, a cold one needs one of them.
    if settings().compiler == "nvrtc":
        from jitkern.compilers import nvrtc

        # The sources of the package have no need of what -minimal leaves out.
        return partial(nvrtc.compile, minimal=minimal)
    from jitkern.compilers import nvcc

    return nvcc.compile_with_nvcc


def _nvrtc_major(variant: str) -> int:
    """13 of nvrtc-13.5+...; 0 of what another compiler has made."""
    match = re.match(r"nvrtc-([1-9][0-9]{0,3})\.", variant)
    return int(match[1]) if match else 0


_NO_VERSION = (0, 0)


def _cuda_version(variant: str) -> tuple[int, int]:
    """(13, 5) of nvrtc-13.5+... and of nvcc-13.5.12; (0, 0) of anything else."""
    match = re.match(r"nv(?:rtc|cc)-([1-9][0-9]{0,3})\.([0-9]{1,4})(?![0-9])", variant)
    return (int(match[1]), int(match[2])) if match else _NO_VERSION


def _driver_version() -> tuple[int, int]:
    """Return the newest CUDA that the driver knows; (0, 0) where there is none to be asked."""
    # Imported here: where there is a compiler nobody asks.
    from jitkern.host import module as host

    try:
        found = host.find_built()
        version = 0 if found is None else int(found.loaded["driver_version"]())
    except (ImportError, RuntimeError, JitkernError):
        return _NO_VERSION  # who launches is told why
    return version // 1000, version % 1000 // 10


def compiler_id() -> str:
    """Name the compiler for device code; ToolchainError where it is not installed."""
    if settings().compiler == "nvrtc":
        return find_nvrtc().id
    from jitkern.compilers.find import find_nvcc

    return find_nvcc().id


def _variant(headers: CudaHeaders | None) -> str:
    found = "" if headers is None else headers.id
    return f"{compiler_id()}+{found}" if found else compiler_id()


# -- what an image says of its kernels -------------------------------------------------------------

# Drivers do not tell the bytes of parameters before CUDA 12.4, and mix the launch bounds with what
# registers allow: the cubin's .nv.info sections hold both.
_INFO = ".nv.info."  # and the kernel's name
_PARAMS_BYTES = (3, 0x19)  # EIFMT_HVAL, EIATTR_CBANK_PARAM_SIZE
_MAX_THREADS = (4, 0x05)  # EIFMT_SVAL, EIATTR_MAX_THREADS: x, y, z; launch bounds are x
_WITH_BYTES = 4  # EIFMT_SVAL: the value is the size of what follows


def kernel_facts(image: bytes, kernels: Sequence[str]) -> list[int]:
    """Return two numbers for each kernel: bytes of its parameter, -1 if unknown; its kNumThreads.

    The second is 0 where it may be launched with any block.

    Examples
    --------
    >>> kernel_facts(b".entry scale(.param .u64 x) .maxntid 256, 1, 1 {}", ["scale", "other"])
    [-1, 256, -1, 0]
    """
    if image.startswith(b"\x7fELF"):
        infos = dict(_sections(image))
        return [fact for kernel in kernels for fact in _facts(infos.get(_INFO + kernel, b""))]
    text = image.decode(errors="replace")
    bounds = [re.search(rf"\.entry {kernel}\([^{{]*\.maxntid (\d+)", text) for kernel in kernels]
    return [fact for bound in bounds for fact in (-1, int(bound[1]) if bound else 0)]


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, offset, size in headers:
        end = image.index(b"\0", texts + name)
        yield image[texts + name : end].decode(), image[offset : offset + size]


def _facts(info: bytes) -> tuple[int, int]:
    params_bytes, num_threads, at = -1, 0, 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == _PARAMS_BYTES:
            params_bytes = value
        elif (form, attribute) == _MAX_THREADS:
            (num_threads,) = struct.unpack_from("<I", info, at + 4)
        at += 4 + (value if form == _WITH_BYTES else 0)
    return params_bytes, num_threads

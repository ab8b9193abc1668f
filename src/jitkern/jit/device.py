"""Kernels of one translation unit: compiled for each arch when first needed, and launched.

C++ checks and launches: csrc/host/user_launch.cc.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from jitkern.arch import Arch
from jitkern.args import choice_arg
from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key, new_entry
from jitkern.cache.get import Buildable, Lookup, find, get_or_build
from jitkern.cache.store import EXACT, NO_USE, SHIPPED_WILL_DO, USABLE
from jitkern.compilers import find as toolchain
from jitkern.compilers.sources import CSRC, INCLUDE_DIRS, Closure, include_closure
from jitkern.env import settings
from jitkern.errors import ToolchainError, UnsupportedError, name_unreadable
from jitkern.fs import digest, slug
from jitkern.gate import gate
from jitkern.host import library as host
from jitkern.jit.params import Param, checks
from jitkern.jit.record import Specialisation, record
from jitkern.jit.template import KernelConfig

_MAX_LOG = 1 << 20  # characters of a compiler's warnings that an entry keeps
DEVICE_ABI = 1  # part of each key: raise it to have unchanged sources compiled again

Wrapper = tuple[str, str]  # name and template class of a kernel
ParamsOf = Mapping[str, tuple[Param, ...]]  # the members of each kernel's ``Params``, if known

_F = TypeVar("_F", bound=Lookup[bytes] | None)


class CpuForm(NamedTuple):
    """C++ functions that do on the CPU what the kernels in `names` do; `load` loads them."""

    names: frozenset[str] = frozenset()
    load: Callable[[], Any] = dict


def record_hint(arch: object = "") -> str:
    """Advise to record a run and to build its kernels before the next one.

    The same for jitkern's own kernels: an op and a size build the most common ones only.
    """
    advice = "record a run with JITKERN_RECORD=FILE and build it beforehand with"
    return f"{advice}: jitkern warm --replay FILE" + (f" --arch {arch}" if arch else "")


class DeviceModule:
    """Kernels of one translation unit, compiled for each arch when first needed.

    Returned by ``load_jit`` with ``device_files``. Several threads may use it at the same time.
    """

    def _init(
        self,
        used: Specialisation,
        params: ParamsOf = MappingProxyType({}),
        cpu: CpuForm = CpuForm(),  # noqa: B008 - a NamedTuple
    ) -> DeviceModule:
        options = used.options
        self._used = used
        self.op: str = used.args[0]
        self.args: tuple[str, ...] = tuple(used.args[1:])
        self.name: str = slug("_".join(used.args))
        self.wrappers: tuple[Wrapper, ...] = tuple(
            (name, kernel) for name, kernel, *_ in options["device_wrappers"]
        )
        self.exports: tuple[str, ...] = tuple(export for export, _ in self.wrappers)
        self.files: tuple[Path, ...] = tuple(map(Path, options["device_files"]))
        self.options: tuple[str, ...] = tuple(options.get("extra_cuda_cflags", ()))
        include_dirs = list(map(Path, options.get("extra_include_paths", ())))
        includes = [str(f.relative_to(CSRC) if f.is_relative_to(CSRC) else f) for f in self.files]
        unit = render(includes, self.wrappers, params)
        self._closure: Closure = include_closure(unit, include_dirs=[*include_dirs, *INCLUDE_DIRS])
        self._launch_config: tuple[int, ...] = ()
        self._images: dict[Arch, Lookup[bytes]] = {}
        self._params, self._cpu = params, cpu
        self._launchers: dict[str, Callable[..., Any]] = {}
        return self

    def __repr__(self) -> str:
        return f"DeviceModule({self._used} with {', '.join(self.exports)})"

    def image(self, arch: Arch) -> bytes:
        """Return the code for `arch`: a cubin, or PTX if the compiler is too old for `arch`.

        Raises CompileError if the code does not compile. If it is in no cache: FrozenError after
        ``freeze``, ToolchainError if there is no compiler.
        """
        return self._lookup(arch).loaded

    def launch(
        self,
        export: str,
        *args: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int] | None = None,
        shared_bytes: int = 0,
        use_pdl: bool = False,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch a kernel on torch's current stream; asynchronous.

        If all tensors are on the CPU, calls the kernel's C++ function (``cpp_wrappers`` of
        ``load_jit``) with the same arguments, and returns when it is done; `grid`, `block` and the
        other launch options are only checked. The first call on a device loads the code, which also
        works during a stream capture. The kernels of a module share ``__device__`` variables.

        Parameters
        ----------
        export
            The kernel's name in ``device_wrappers``.
        *args
            Members of the kernel's ``Params``, in order. If jitkern knows them (see ``load_jit``),
            a number is converted to the type of its member, and a tensor must be contiguous and
            have the member's dtype. Otherwise an int is passed as ``long long``, a float as
            ``double``, a bool as ``bool``, and only the total number of bytes is checked, by
            drivers for CUDA 12.4 or newer. A ctypes value keeps its type and is not checked, such
            as ``ctypes.c_void_p`` for any pointer. An object with ``__dlpack__`` is a tensor.
        grid, block
            Numbers of blocks and of threads per block, in one to three dimensions. If the class has
            ``kNumThreads``, that is the default for `block`, and any `block` must have as many
            threads. Otherwise `block` is required.
        shared_bytes
            Dynamic shared memory per block, in bytes, up to the GPU's limit (227 KiB on an H200).
        use_pdl
            Let the kernel start while the previous one drains (programmatic dependent launch;
            compute capability 9.0 or newer, no effect elsewhere). The kernel must call
            ``wait_for_earlier_kernels`` of ``jitkern/pdl.cuh`` before it accesses memory that
            earlier kernels write.
        cluster
            Size of a thread block cluster in one to three dimensions, which divides the grid.
        cooperative
            Cooperative launch: all blocks are resident, so they may wait for each other.

        Raises
        ------
        ValueError, TypeError
            The kernel is unknown, an argument does not fit its member, the GPU cannot access the
            memory of a tensor, or a launch size is over the limits of all GPUs.
        UnsupportedError
            There is no GPU.
        CompileError, ToolchainError
            The first call on a device, or on the CPU, must compile the code and cannot.
        """
        if export not in self.exports:
            choice_arg("launch", "export", export, self.exports)
        launch = self._launchers.get("") or self._make_launcher()
        kinds = set(map(type, args))
        members = args if _PLAIN.issuperset(kinds) else tuple(map(_readable, args))
        number = self.exports.index(export)
        how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
        # tvm-ffi passes the stream of a torch tensor to C++; asking torch for it takes 5 us.
        has_stream = not _TENSORS.isdisjoint(kinds)
        try:
            device = launch(*how, -1, has_stream, *members)
        except RuntimeError as error:
            names = [param.name for param in self._params.get(export, ())]
            names += [f"args[{i}]" for i in range(len(names), len(args))]
            name_unreadable(error, export, **dict(zip(names, args, strict=False)))
        if device is None:  # launched
            return
        if device == _ON_CPU:
            self._cpu.load()[export](*map(_for_cpu, args, members))
        else:
            launch(*how, *device_and_stream(device), *members)

    def _make_launcher(self) -> Callable[..., Any]:
        # Weak, because C++ keeps the function: the module would hold itself.
        this = weakref.proxy(self)

        @host.through_cpp()
        def resolve(_op: str, _names: Any, _values: Any, arch: int) -> tuple[Any, ...]:
            return this.image(Arch(*divmod(arch, 10))), this.exports, ()

        # The name of each kernel, whether C++ does the same on the CPU, and its members.
        signatures = []
        for export in self.exports:
            members = [param.for_cpp() for param in self._params.get(export, ())]
            signatures.append((export, export in self._cpu.names, members))
        launcher = host.takes_big_ints(host.module()["make_launch"](resolve, signatures))
        # If two threads race, both use the launcher of the first.
        return self._launchers.setdefault("", launcher)

    def _lookup(self, arch: Arch) -> Lookup[bytes]:
        """Find the code for `arch`, or build it, and tell where it came from."""
        return self._looked_up(arch, get_or_build)

    def _find(self, arch: Arch) -> Lookup[bytes] | None:
        """Like ``_lookup``, but return None instead of compiling."""
        return self._looked_up(arch, find)

    def _looked_up(self, arch: Arch, look: Callable[[DeviceImage], _F]) -> _F | Lookup[bytes]:
        if arch in self._images:
            stats.count("memo")
            return replace(self._images[arch], source="memo", ms=0.0)
        lookup = look(DeviceImage(self, arch))
        if lookup is not None:
            self._images[arch] = lookup
            if settings().record is not None:  # skips record.py on the fast path
                record(self._used._replace(arch=str(arch)))
        return lookup

    def _launched_with(self, *configs: KernelConfig, shape: tuple[int, int]) -> DeviceModule:
        """Tell C++ how to launch these kernels of jitkern's own; return the module.

        Each kernel has a config. `shape` are the last two arguments of the ``KernelTable``'s
        ``ShapeOf``.
        """
        flat = [int(value) for config in configs for value in (config.num_threads, config.use_pdl)]
        self._launch_config = (*flat, *shape)
        return self

    def _cuda_headers(self) -> toolchain.CudaHeaders:
        """Return CUDA's own headers that the sources may include."""
        return toolchain.find_headers(self._closure.missing, toolchain.find_nvrtc())

    def _key(self, arch: Arch) -> Key:
        """Return the cache key of the code for `arch`."""
        content = {
            "route": "device",
            "abi": DEVICE_ABI,
            "name": self.op,
            "args": self.args,
            "sources": self._closure.digest,
            "options": self.options,
            "arch": str(arch),
        }
        describe = {
            "op": self.op,
            "args": list(self.args),
            "arch": str(arch),
            "options": list(self.options),
            "kernels": [list(wrapper) for wrapper in self.wrappers],
            "files": [file.name for file in self.files],
        }
        return Key("device", self.name, digest(content), describe)


def load_own(
    name: str,
    *args: str,
    device_files: Sequence[str],
    device_wrappers: Sequence[Wrapper],
) -> DeviceModule:
    """Load a kernel of jitkern's own, as ``load_jit`` does."""
    files = [str(CSRC / file) for file in device_files]
    options = {"device_files": files, "device_wrappers": list(map(list, device_wrappers))}
    return DeviceModule()._init(Specialisation("load_jit", (name, *args), options, ""))


def render(includes: Sequence[str], wrappers: Sequence[Wrapper], params: ParamsOf) -> str:
    """Return the translation unit: an entry point for each kernel class, and checks of `params`.

    The size of an array tells C++ the kernel's ``kNumThreads``, plus 1: drivers mix launch bounds
    with what registers allow.
    """
    unit = "#include <jitkern/wrapper.cuh>\n"
    unit += "".join(f'#include "{name}"\n' for name in includes)
    for export, kernel in wrappers:
        threads = f"jitkern::num_threads<{kernel}>(0)"
        checked = checks(export, kernel, params[export]) if params.get(export) else ""
        unit += f"""\
extern "C" {{ __device__ char jitkern_threads_{export}[{threads} + 1]; }}
extern "C" __global__ void
__launch_bounds__({threads}, jitkern::min_blocks<{kernel}>(0))
{export}(const __grid_constant__ {kernel}::Params params) {{
{checked}  {kernel}::run(params);
}}
"""
    return unit


# Types that C++ reads unchanged. Classes of torch tensors are added to both sets on first use.
_PLAIN: set[type] = {int, float, bool}
_TENSORS: set[type] = set()
_ON_CPU = -2  # C++ returns this, after all checks, if all tensors are on the CPU


def _readable(arg: Any) -> Any:
    """Return an argument as C++ reads it: a tensor, a number or bytes."""
    if type(arg) in _PLAIN:
        return arg
    with gate:
        import torch
        import tvm_ffi

    if isinstance(arg, torch.Tensor):
        _PLAIN.add(type(arg))
        _TENSORS.add(type(arg))
        return arg
    if isinstance(arg, (ctypes._SimpleCData, ctypes.Structure)):
        return bytes([ctypes.alignment(arg)]) + bytes(arg)
    if hasattr(arg, "__dlpack__"):
        return tvm_ffi.from_dlpack(arg)
    return arg  # C++ names it in a TypeError


def _for_cpu(arg: Any, member: Any) -> Any:
    """Return an argument for a C++ function: numbers of ctypes become plain ones."""
    is_number = isinstance(arg, ctypes._SimpleCData) and not isinstance(arg, ctypes.c_void_p)
    return arg.value if is_number else member


def device_and_stream(device: int) -> tuple[int, int]:
    """Return a device, the current one for -1, and torch's current stream on it."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    number = torch.cuda.current_device() if device < 0 else device
    return number, torch.cuda.current_stream(number).cuda_stream


class DeviceImage(Buildable[bytes]):
    """The code of a module for one arch.

    Its variant is the compiler's version and the state of CUDA's own headers. Without a compiler or
    those headers an entry of any variant is good, as in a frozen process. A cubin for a lower minor
    version of the arch serves on the terms of another compiler's: from a wheel always, from other
    caches if nothing can be built here. (A user's kernel may have code for some archs only.)
    """

    def __init__(self, module: DeviceModule, arch: Arch) -> None:
        self._module = module
        self._arch = arch
        self.key: Key = module._key(arch)
        self.variant: str = ""
        with suppress(ToolchainError):
            headers = module._cuda_headers()
            self.variant = "" if headers.are_missing else _variant(headers)
        self.has_compiler: bool = bool(self.variant)

    def usable_keys(self) -> Iterator[Key]:
        yield self.key
        yield from map(self._module._key, self._arch._lower_minors)

    def rank(self, meta: Mapping[str, Any]) -> int:
        """Rank first the entry of our compiler, then cubins of its CUDA's major version or older.

        Our compiler suits the driver, which loads such cubins too. PTX may be too new for it.
        """
        is_own_arch = meta["family"] == self.key.digest
        if meta["toolchain"] == self.variant and is_own_arch:
            return EXACT
        if meta.get("kind") == "ptx":
            return USABLE if is_own_arch else NO_USE
        made_by, ours = _cuda_major(meta["toolchain"]), _cuda_major(self.variant)
        return SHIPPED_WILL_DO if 0 < made_by <= ours else USABLE

    def load(self, entry: Entry) -> bytes:
        return entry.data

    def hint(self) -> str:
        return record_hint(self._arch)

    def build(self) -> Entry:
        with gate:
            from jitkern.compilers import nvrtc  # a warm load does not need it

        module = self._module
        headers = module._cuda_headers()
        variant = _variant(headers)
        image = nvrtc.compile(
            module._closure.source,
            # Not NAME.cu: a header of that name, the user's own file, would include itself.
            name=f"{module.name}.instance.cu",
            headers=module._closure.headers,
            arch=self._arch,
            options=module.options,
            cuda_headers=headers,
        )
        files = {f"{slug(module.op)}.{image.kind}": image.data}
        return new_entry(
            self.key, variant, files, {"kind": image.kind, "log": image.log[:_MAX_LOG]}
        )


def _cuda_major(variant: str) -> int:
    """Return 13 for nvrtc-13.5+...; 0 for anything else."""
    match = re.match(r"nvrtc-([1-9][0-9]{0,3})\.", variant)
    return int(match[1]) if match else 0


def compiler_id() -> str:
    """Name the compiler for device code; ToolchainError if it is not installed."""
    return toolchain.find_nvrtc().id


def _variant(headers: toolchain.CudaHeaders) -> str:
    return "+".join(filter(None, (compiler_id(), headers.id)))

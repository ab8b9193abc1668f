"""Kernels of one translation unit: compiled per arch when first needed, and launched."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.arch import Arch
from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Lookup, find, get_or_build
from jitkern.compilers.find import find_nvrtc
from jitkern.compilers.sources import CSRC, INCLUDE_DIRS, Closure, include_closure
from jitkern.env import settings
from jitkern.errors import UnsupportedError
from jitkern.fs import digest, sha256, slug
from jitkern.jit import image as images
from jitkern.jit.params import Param, checks
from jitkern.jit.record import Specialisation, record
from jitkern.jit.template import KernelConfig

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.compilers.find import CudaHeaders

DEVICE_ABI = 1
"""Part of each key: raised when the same sources have to be compiled anew."""

Wrapper = tuple[str, str]
"""Name and template class of a kernel."""


class CpuForm(NamedTuple):
    """C++ functions that do on the CPU what the kernels in `names` do; `load` loads them."""

    names: frozenset[str] = frozenset()
    load: Callable[[], Any] = dict


NO_CPU_FORM = CpuForm()

# -- what messages advise --------------------------------------------------------------------------


def record_hint(arch: object = "") -> str:
    """Say how what a run has used is built before the next run needs it."""
    choice = f" --arch {arch}" if arch else ""
    return (
        "record a run with JITKERN_RECORD=FILE and build it beforehand with: "
        f"jitkern warm --replay FILE{choice}"
    )


def warm_hint(op: str, size: str, arch: object, *, sized_by: str = "element_size") -> str:
    """Say how the kernels of an op are built before they are needed."""
    option = sized_by.replace("_", "-")
    return f"build it beforehand with: jitkern warm --op {op} --{option} {size} --arch {arch}"


def rows_hint(arch: object) -> str:
    """Say how kernels that ops share are built beforehand: with rows of any size."""
    return f"build it beforehand with: jitkern warm --element-size 16 --arch {arch}"


# -- modules ---------------------------------------------------------------------------------------


class DeviceModule:
    """Kernels of one translation unit, compiled for each arch that is asked for.

    Made by :func:`jitkern.load_jit` with ``device_files``. Nothing is compiled before an image is
    needed. Threads may share it.

    Attributes
    ----------
    name
        The kernel's name and template arguments, e.g. ``store_656_128_8_true_16_4_2``.
    hint
        Says for an arch how to build the kernel beforehand; FrozenError ends with it.
    """

    def __init__(
        self,
        used: Specialisation,
        files: Sequence[Path],
        wrappers: Sequence[Wrapper],
        hint: Callable[[Arch], str] = record_hint,
        *,
        params: Mapping[str, tuple[Param, ...]] = MappingProxyType({}),
        cpu: CpuForm = NO_CPU_FORM,
    ) -> None:
        self._used = used
        self.op: str = used.args[0]
        self.args: tuple[str, ...] = tuple(used.args[1:])
        self.name: str = slug("_".join(used.args))
        self.wrappers: tuple[Wrapper, ...] = tuple(wrappers)
        self.exports: tuple[str, ...] = tuple(export for export, _ in self.wrappers)
        self.files: tuple[Path, ...] = tuple(files)
        self.hint = hint
        self.options: tuple[str, ...] = tuple(used.options.get("extra_cuda_cflags", ()))
        include_dirs = list(map(Path, used.options.get("extra_include_paths", ())))
        self._cuda_dirs = _cuda_dirs(include_dirs)
        self.closure: Closure = include_closure(
            render([_include_name(file) for file in files], wrappers, params),
            include_dirs=[d for d in include_dirs if d not in self._cuda_dirs] + [*INCLUDE_DIRS],
        )
        self._numbers = {export: number for number, export in enumerate(self.exports)}
        self._images: dict[Arch, Lookup[bytes]] = {}
        self._launchers: dict[str, Callable[..., Any]] = {}
        self._params = params
        self._cpu = cpu
        self.launch_config: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"DeviceModule({self.op!r}, {', '.join(self.args)})"

    def image(self, arch: Arch) -> bytes:
        """Return the code for `arch`, from memory, cache or compiler.

        It is a cubin; PTX if the compiler is older than the architecture. Raises CompileError if it
        does not compile, FrozenError if it is missing and jitkern is frozen, ToolchainError if it
        is missing and there is no compiler.
        """
        if not isinstance(arch, Arch):
            raise TypeError(f"image: arch: {arch!r}, expected an Arch, such as Arch.parse('9.0')")
        return self.lookup(arch).loaded

    def lookup(self, arch: Arch) -> Lookup[bytes]:
        """Find the code for `arch`, or build it, and tell where it came from."""
        return self._memo(arch) or self._kept(arch, get_or_build(images.DeviceImage(self, arch)))

    def find(self, arch: Arch) -> Lookup[bytes] | None:
        """As :meth:`lookup`, but None if it would have to be compiled."""
        found = self._memo(arch)
        if found is None:
            found = find(images.DeviceImage(self, arch))
            if found is not None:
                self._kept(arch, found)
        return found

    def build_into(self, cache: Cache, arch: Arch) -> Entry:
        """Compile for `arch` and publish that in `cache`, even if other caches have it."""
        image = images.DeviceImage(self, arch)
        built = image.build()
        return cache.publish(image.key, built.variant, built.files, built.notes)

    def _memo(self, arch: Arch) -> Lookup[bytes] | None:
        found = self._images.get(arch)
        if found is None:
            return None
        stats.count("memo", 0.0)
        return Lookup("memo", 0.0, found.entry, found.loaded)

    def _kept(self, arch: Arch, found: Lookup[bytes]) -> Lookup[bytes]:
        self._images[arch] = found
        file = settings().record
        if file is not None:
            files = self.closure.files
            texts = dict(zip(map(str, files), self.closure.texts, strict=True))
            record(self._used._replace(arch=str(arch)), files, file, texts)
        return found

    def launched_with(
        self, *configs: KernelConfig, in_flight: int, splits: int = 1
    ) -> DeviceModule:
        """Tell C++ how these kernels, which are jitkern's own, are launched; return the module.

        Each has a config. A lane has `in_flight` vectors in flight, and a row `splits` parts.
        """
        if len(configs) != len(self.wrappers):
            raise ValueError(f"launched_with: {len(configs)} configs, expected {self.exports}")
        flat = [int(value) for config in configs for value in (config.num_threads, config.use_pdl)]
        self.launch_config = (*flat, in_flight, splits)
        return self

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
        """Launch a kernel on the current torch stream; returns at once.

        If all tensors are on the CPU, the C++ function of the kernel's name is called with the same
        arguments; grid, block and the like are only checked. The first call on a device loads the
        code, once for all kernels of the module: they share its ``__device__`` variables. That
        works while a stream is being captured, too.

        Parameters
        ----------
        export
            The kernel's name in ``device_wrappers``.
        *args
            Members of the kernel's ``Params``, in order. If these are known (see
            :func:`jitkern.load_jit`), a number is converted to its member's type, and a tensor must
            be contiguous and of its dtype. Otherwise an int is ``long long``, a float ``double``, a
            bool ``bool``, and only the bytes of all are checked. A ctypes value keeps its type. An
            object with ``__dlpack__``, ``data_ptr()`` or ``__cuda_array_interface__`` is passed as
            its pointer, as a tensor is.
        grid, block
            Numbers of blocks and threads, in one to three dimensions. A kernel whose class has
            ``kNumThreads`` is launched with that many threads, also by default. Without it `block`
            is required.
        shared_bytes
            Dynamic shared memory of a block, bytes, up to the GPU's limit (227 KiB on an H200).
        use_pdl
            Let the kernel start while the one before it drains (programmatic dependent launch, from
            compute capability 9.0 on; elsewhere without effect). It must call
            ``wait_for_earlier_kernels`` of ``jitkern/pdl.cuh`` before it touches what earlier
            kernels write.
        cluster
            Blocks of a thread block cluster, one to three sizes that divide the grid's.
        cooperative
            Have all blocks resident at once, so that they may wait for each other.

        Raises
        ------
        ValueError, TypeError
            An unknown kernel, an argument that does not fit its member, arguments of other bytes
            than the kernel's ``Params``, memory that this GPU cannot reach, sizes that no GPU has.
        UnsupportedError
            There is no GPU.
        CompileError, ToolchainError
            The first call on a device, or on the CPU, has to compile, and cannot.

        Examples
        --------
        >>> module.launch("copy", dst, src, 1024, grid=4)  # doctest: +SKIP
        """
        number = self._numbers.get(export)
        if number is None:
            known = ", ".join(self.exports)
            raise ValueError(f"launch: export: {export!r}, expected one of {known}")
        launch = self._launchers.get("") or self._make_launcher()
        kinds = set(map(type, args))
        members = args
        if not _PLAIN.issuperset(kinds):
            members = tuple(_readable(export, self._params.get(export, ()), args))
        how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
        # A tensor of torch tells its stream on the way to C++; to ask torch for it takes 5 us.
        is_told = not _TENSORS.isdisjoint(kinds)
        try:
            wanted = launch(*how, -1, is_told, *members)
        except RuntimeError as error:
            from jitkern.errors import name_unreadable

            known_names = [param.name for param in self._params.get(export, ())]
            names = known_names + [f"args[{i}]" for i in range(len(known_names), len(args))]
            name_unreadable(error, export, **dict(zip(names, args, strict=False)))
        if wanted is None:
            return
        if wanted == _ON_CPU:
            self._cpu.load()[export](*_for_cpu(args, members))
        else:
            launch(*how, *device_and_stream(wanted), *members)

    def _make_launcher(self) -> Callable[..., Any]:
        from jitkern.host import module as host

        # Weak, because C++ keeps the function: the module would hold itself.
        this = weakref.proxy(self)
        signatures = [
            (
                export,
                export in self._cpu.names,
                [param.for_cpp() for param in self._params.get(export, ())],
            )
            for export in self.exports
        ]
        made = host.launcher(
            self.exports,
            lambda arch: this.image(arch),
            signatures,
            lambda code, exports: images.kernel_facts(code, exports),
        )
        # Of two threads one is first, and both launch from what it loads.
        return self._launchers.setdefault("", made)

    def cuda_headers(self) -> CudaHeaders | None:
        """Return CUDA's own headers that the sources may include; None if they name none."""
        if not self.closure.missing:
            return None
        # Imported here: most kernels have no need of it.
        from jitkern.compilers.find import find_headers

        library = find_nvrtc() if settings().compiler == "nvrtc" else None
        return find_headers(self.closure.missing, self._cuda_dirs, library)

    def given_headers_id(self) -> str:
        """Name the state of ``extra_include_paths`` with CUDA's own headers; empty without."""
        if not (self.closure.missing and self._cuda_dirs):
            return ""
        from jitkern.compilers.find import given_id

        return given_id(self.closure.missing, self._cuda_dirs)

    def key(self, arch: Arch) -> Key:
        """Return the cache key of the code for `arch`."""
        headers = self.closure.headers
        content = {
            "route": "device",
            "abi": DEVICE_ABI,
            "name": self.op,
            "args": self.args,
            "source": _content(self.closure.source),
            "headers": {name: _content(text) for name, text in headers.items()},
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
    sized_by: str = "element_size",
) -> DeviceModule:
    """As :func:`jitkern.load_jit`, for a kernel of jitkern's own, sized by the first of `args`.

    Its FrozenError names the ``jitkern warm`` that was missing.
    """
    files = [CSRC / file for file in device_files]
    options = {
        "device_files": list(map(str, files)),
        "device_wrappers": list(map(list, device_wrappers)),
    }
    return DeviceModule(
        Specialisation("load_jit", (name, *args), options, ""),
        files,
        device_wrappers,
        hint=lambda arch: warm_hint(name, args[0], arch, sized_by=sized_by),
    )


def render(
    includes: Sequence[str],
    wrappers: Sequence[Wrapper],
    params: Mapping[str, tuple[Param, ...]] = MappingProxyType({}),
) -> str:
    """Return the translation unit: an entry point for each kernel class, and checks of `params`.

    Examples
    --------
    >>> print(render(["ops/copy.cu"], [("copy", "Copy<4>")]))
    #include <jitkern/launch_bounds.cuh>
    #include "ops/copy.cu"
    extern "C" __global__ void
    __launch_bounds__(jitkern::num_threads<Copy<4>>(0), jitkern::min_blocks<Copy<4>>(0))
    copy(const __grid_constant__ Copy<4>::Params params) {
      Copy<4>::run(params);
    }
    <BLANKLINE>
    """
    lines = ["#include <jitkern/launch_bounds.cuh>"]
    lines += ["#include <jitkern/declared.cuh>"] if any(params.values()) else []
    lines += [f'#include "{name}"' for name in includes]
    for export, kernel in wrappers:
        bounds = f"jitkern::num_threads<{kernel}>(0), jitkern::min_blocks<{kernel}>(0)"
        lines += ['extern "C" __global__ void', f"__launch_bounds__({bounds})"]
        lines.append(f"{export}(const __grid_constant__ {kernel}::Params params) {{")
        if params.get(export):
            lines.append(f"  using Params = {kernel}::Params;")
            lines += [f"  {check}" for check in checks(export, params[export])]
        lines += [f"  {kernel}::run(params);", "}"]
    return "\n".join(lines) + "\n"


def _cuda_dirs(include_dirs: Sequence[Path]) -> list[Path]:
    """Return those that hold CUDA's own headers, which are not read here."""
    if not include_dirs:
        return []
    from jitkern.compilers.find import is_cuda_headers

    return list(filter(is_cuda_headers, include_dirs))


def _content(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape"))


def _include_name(file: Path) -> str:
    return file.relative_to(CSRC).as_posix() if file.is_relative_to(CSRC) else str(file)


# -- arguments of a launch -------------------------------------------------------------------------

# What C++ reads as it is. The classes of torch's tensors join both sets when they are first seen.
_PLAIN: set[type] = {int, float, bool}
_TENSORS: set[type] = set()
_ON_CPU = -2
"""What C++ answers, having checked all, if all tensors are on the CPU."""


def _readable(kernel: str, params: Sequence[Param], args: Sequence[Any]) -> list[Any]:
    """Return `args` as C++ reads them: tensors, numbers, bytes or pointers; else TypeError."""
    made = []
    for position, arg in enumerate(args):
        read = arg if type(arg) in _PLAIN else _read(arg)
        if read is None:
            what = f"launch: args[{position}]"
            expected = "a tensor, int, float, bool or a ctypes value"
            if position < len(params):
                what, expected = f"{kernel}: {params[position].name}", params[position].expected
            raise TypeError(f"{what}: {type(arg).__name__}, expected {expected}")
        made.append(read)
    return made


def _read(arg: Any) -> Any:
    """Return an argument as C++ reads it; None if it cannot."""
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
    if hasattr(arg, "data_ptr"):
        return ctypes.c_void_p(arg.data_ptr())
    if hasattr(arg, "__cuda_array_interface__"):
        return ctypes.c_void_p(arg.__cuda_array_interface__["data"][0])
    return None


def _for_cpu(args: Sequence[Any], members: Sequence[Any]) -> list[Any]:
    """Return the arguments for a C++ function: numbers of ctypes become plain ones."""
    return [
        arg.value
        if isinstance(arg, ctypes._SimpleCData) and not isinstance(arg, ctypes.c_void_p)
        else member
        for arg, member in zip(args, members, strict=True)
    ]


def device_and_stream(device: int) -> tuple[int, int]:
    """Return a device, the current one for -1, and torch's current stream on it."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    number = torch.cuda.current_device() if device < 0 else device
    return number, torch.cuda.current_stream(number).cuda_stream

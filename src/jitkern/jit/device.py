"""The device route: a rendered translation unit, compiled for an arch when its image is wanted."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern import hints
from jitkern.arch import Arch
from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Lookup, find, get_or_build
from jitkern.compilers.find_nvrtc import find_nvrtc
from jitkern.compilers.sources import CSRC, INCLUDE_DIRS, Closure, include_closure
from jitkern.env import settings
from jitkern.files import digest, sha256, slug
from jitkern.jit.image import DeviceImage
from jitkern.jit.launch import ON_CPU, PLAIN, TORCH, device_and_stream, for_cpu, readable
from jitkern.jit.render import Wrapper, render
from jitkern.jit.specialisation import Specialisation
from jitkern.jit.template import KernelConfig

if TYPE_CHECKING:
    from jitkern.cache.store import Cache
    from jitkern.compilers.find_headers import CudaHeaders
    from jitkern.jit.params import Param

# Raised when the same text has to be compiled anew: how entry points and parameters are rendered.
DEVICE_ABI = 1


class CpuForm(NamedTuple):
    """C++ that does on the CPU what kernels of a module do.

    Attributes
    ----------
    names
        The kernels that it has a function for.
    load
        Returns the loaded C++ module, at the first call on CPU tensors.
    """

    names: frozenset[str] = frozenset()
    load: Callable[[], Any] = dict


NO_CPU_FORM = CpuForm()


class DeviceModule:
    """Kernels of one translation unit, compiled for each arch that is asked for.

    Made by :func:`jitkern.load_jit` with ``device_files``. Nothing is compiled before an image is
    asked for. Safe to share between threads.

    Parameters
    ----------
    used
        What load_jit was given.
    files
        Its device sources, absolute.
    wrappers
        (name, class) of each kernel.
    hint
        Says for an arch what would have built the kernel beforehand; FrozenError ends with it.
    params
        The members of ``Params``, by the kernel's name; none where they are not known.
    cpu
        What runs on tensors on the CPU.

    Attributes
    ----------
    name
        The kernel's name and template arguments, e.g. ``store_656_128_8_true_16_4_2``.
    """

    def __init__(
        self,
        used: Specialisation,
        files: Sequence[Path],
        wrappers: Sequence[Wrapper],
        hint: Callable[[Arch], str] = hints.replay,
        *,
        params: Mapping[str, tuple[Param, ...]] = MappingProxyType({}),
        cpu: CpuForm = NO_CPU_FORM,
    ) -> None:
        self._used = used
        self.op: str = used.args[0]
        self.args: tuple[str, ...] = tuple(used.args[1:])
        self.name: str = slug("_".join(used.args))
        self.wrappers: tuple[Wrapper, ...] = tuple(wrappers)
        self.files: tuple[Path, ...] = tuple(files)
        self.hint = hint
        self.options: tuple[str, ...] = tuple(used.options.get("extra_cuda_cflags", ()))
        include_dirs = list(map(Path, used.options.get("extra_include_paths", ())))
        self._cuda_dirs = _cuda_dirs(include_dirs)
        self.closure: Closure = include_closure(
            render([_include_name(file) for file in files], wrappers, params),
            include_dirs=[d for d in include_dirs if d not in self._cuda_dirs] + [*INCLUDE_DIRS],
        )
        self._images: dict[Arch, Lookup[bytes]] = {}
        self._numbers = {export: number for number, export in enumerate(self.exports)}
        self._made: dict[str, Callable[..., Any]] = {}
        self._params = params
        self._cpu = cpu
        self.launch_config: tuple[int, ...] = ()  # what launched_with was told

    def __repr__(self) -> str:
        return f"DeviceModule({self.op!r}, {', '.join(self.args)})"

    def image(self, arch: Arch) -> bytes:
        """Return the code for `arch`, from memory, cache or compiler.

        Parameters
        ----------
        arch
            The GPU's architecture.

        Returns
        -------
        bytes
            A cubin, or PTX where the compiler is older than the architecture.

        Raises
        ------
        CompileError
            It does not compile.
        FrozenError
            It is missing and jitkern is frozen.
        ToolchainError
            It is missing and there is no compiler.
        TypeError
            `arch` is no Arch.
        """
        if not isinstance(arch, Arch):
            raise TypeError(f"image: arch: {arch!r}, expected an Arch, such as Arch.parse('9.0')")
        return self.lookup(arch).loaded

    def lookup(self, arch: Arch) -> Lookup[bytes]:
        """Find the code for `arch` and tell where it came from. Raises as :meth:`image`."""
        return self._memo(arch) or self._kept(arch, get_or_build(DeviceImage(self, arch)))

    def find(self, arch: Arch) -> Lookup[bytes] | None:
        """As :meth:`lookup`, but None where it would have to be compiled."""
        found = self._memo(arch)
        if found is None:
            found = find(DeviceImage(self, arch))
            if found is not None:
                self._kept(arch, found)
        return found

    def build_into(self, cache: Cache, arch: Arch) -> Entry:
        """Compile for `arch` and publish that in `cache`, whatever others have.

        Raises as :meth:`image`.
        """
        image = DeviceImage(self, arch)
        built = image.build()
        return cache.publish(image.key, built.variant, built.files, built.notes)

    def _memo(self, arch: Arch) -> Lookup[bytes] | None:
        start = time.perf_counter()
        found = self._images.get(arch)
        if found is None:
            return None
        ms = (time.perf_counter() - start) * 1e3
        stats.count("memo", ms)
        return Lookup("memo", ms, found.entry, found.loaded)

    def _kept(self, arch: Arch, found: Lookup[bytes]) -> Lookup[bytes]:
        self._images[arch] = found
        file = settings().record
        if file is not None:
            from jitkern.jit.record import record

            files = self.closure.files
            texts = dict(zip(map(str, files), self.closure.texts, strict=True))
            record(self._used._replace(arch=str(arch)), files, file, texts)
        return found

    @property
    def exports(self) -> tuple[str, ...]:
        """The kernels' names."""
        return tuple(export for export, _ in self.wrappers)

    def launched_with(
        self, *configs: KernelConfig, in_flight: int, splits: int = 1
    ) -> DeviceModule:
        """Say how C++ launches these kernels; return the module itself.

        This is for kernels of jitkern's own, in their ``kernel(...)``: what they are compiled for
        goes to C++ with their code, so that it is said once.

        Parameters
        ----------
        configs
            Of each kernel, in the order of ``device_wrappers``.
        in_flight, splits
            Vectors that a lane has in flight, and how many parts a row is cut into at least.
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

        Where all tensors are on the CPU, the C++ of the kernel's name that ``load_jit`` was given
        is called with the same arguments; grid, block and the like are only checked.

        Loads the code at the first call on a device, once for all kernels of the module: they share
        its ``__device__`` variables. This works while a stream is being captured, too.

        Parameters
        ----------
        export
            The kernel's name in ``device_wrappers``.
        *args
            Members of the kernel's ``Params``, in order. Where these are known (see
            :func:`jitkern.load_jit`), a number becomes what its member is, and a tensor is
            contiguous and of its dtype. Otherwise an int is ``long long``, a float ``double``, a
            bool ``bool``, and only the bytes of all are checked. A ctypes value is what it says. An
            object with ``__dlpack__``, ``data_ptr()`` or ``__cuda_array_interface__`` is its
            pointer, as a tensor is.
        grid, block
            Numbers of blocks and threads, one to three of them. A kernel whose class has
            ``kNumThreads`` is launched with so many threads: by default, and in one to three
            dimensions. Without it `block` may be anything, and has to be given.
        shared_bytes
            Dynamic shared memory of a block, bytes, up to what the GPU can give one (227 KiB on an
            H200).
        use_pdl
            Let the kernel start while the one before it drains (programmatic dependent launch, from
            compute capability 9.0 on; elsewhere without effect). It must wait by itself before it
            touches what earlier kernels write: ``wait_for_earlier_kernels`` of ``jitkern/pdl.cuh``.
        cluster
            Blocks of a thread block cluster, one to three sizes that divide the grid's.
        cooperative
            Have all blocks resident at once, so that they may wait for each other.

        Raises
        ------
        ValueError, TypeError
            An unknown kernel, an argument that is not its member's, arguments of other bytes
            than the kernel's ``Params``, memory that is not on one GPU and not mapped for it, sizes
            that no GPU has.
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
        launch = self._made.get("launch") or self._make_launch()
        kinds = set(map(type, args))
        members = args
        if not PLAIN.issuperset(kinds):
            members = tuple(readable(export, self._params.get(export, ()), args))
        how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
        # A tensor of torch tells its stream on the way to C++; to ask torch for it takes 5 us.
        is_told = not TORCH.isdisjoint(kinds)
        try:
            wanted = launch(*how, -1, is_told, *members)
        except RuntimeError as error:
            from jitkern.unreadable import name_unreadable

            params = self._params.get(export, ())
            names = [
                *(param.name for param in params),
                *(f"args[{i}]" for i in range(len(params), len(args))),
            ]
            named = dict(zip(names[: len(args)], args, strict=True))
            name_unreadable(error, export, **named)
        if wanted is None:
            return
        if wanted == ON_CPU:
            self._cpu.load()[export](*for_cpu(args, members))
        else:
            launch(*how, *device_and_stream(wanted), *members)

    def _make_launch(self) -> Callable[..., Any]:
        from jitkern.host import module as host
        from jitkern.jit.cubin import kernel_facts

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
        made = host.launcher(self.exports, lambda arch: this.image(arch), signatures, kernel_facts)
        # Of two threads one is first, and both launch from what it loads.
        return self._made.setdefault("launch", made)

    def cuda_headers(self) -> CudaHeaders | None:
        """Return CUDA's own headers that the sources may include; None where they name none."""
        if not self.closure.missing:
            return None
        # Imported here: most kernels have no need of it.
        from jitkern.compilers.find_headers import find_headers

        library = find_nvrtc() if settings().compiler == "nvrtc" else None
        return find_headers(self.closure.missing, self._cuda_dirs, library)

    def given_headers_id(self) -> str:
        """Name the state of ``extra_include_paths`` with CUDA's own headers, empty without."""
        if not (self.closure.missing and self._cuda_dirs):
            return ""
        from jitkern.compilers.find_headers import given_id

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
    """As :func:`jitkern.load_jit`; its FrozenError names the ``jitkern warm`` that was missing.

    The first of `args` is the size of a row, or what else it is sized by, as the command line takes
    it.
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
        hint=lambda arch: hints.warm_op(name, args[0], arch, sized_by=sized_by),
    )


def _cuda_dirs(include_dirs: Sequence[Path]) -> list[Path]:
    """Those that hold CUDA's own headers, which are not read here."""
    if not include_dirs:
        return []
    from jitkern.compilers.find_headers import is_cuda_headers

    return list(filter(is_cuda_headers, include_dirs))


def _content(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape"))


def _include_name(file: Path) -> str:
    return file.relative_to(CSRC).as_posix() if file.is_relative_to(CSRC) else str(file)

"""The device route: a rendered translation unit, compiled for an arch when its image is wanted."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern import hints
from jitkern.arch import Arch
from jitkern.cache import stats
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Buildable, BuildOutput, Lookup, get_or_build
from jitkern.compilers.find_nvrtc import find_nvrtc
from jitkern.compilers.sources import CSRC, INCLUDE_DIRS, include_closure
from jitkern.env import settings
from jitkern.errors import CompileError, ToolchainError
from jitkern.files import digest, sha256, slug
from jitkern.jit.launch import PLAIN, TORCH, device_and_stream, readable
from jitkern.jit.record import Specialisation, record
from jitkern.jit.template import KernelConfig

if TYPE_CHECKING:
    from jitkern.compilers.nvrtc import Image

# Raised when the same text has to be compiled anew: how entry points and parameters are rendered.
DEVICE_ABI = 1

# Name and template class of a kernel.
Wrapper = tuple[str, str]


def render(includes: Sequence[str], wrappers: Sequence[Wrapper]) -> str:
    """Return the translation unit that gives each kernel class a plain C entry point.

    Examples
    --------
    >>> print(render(["ops/copy.cu"], [("copy", "Copy<4>")]))
    #include "ops/copy.cu"
    extern "C" __global__ void __launch_bounds__(Copy<4>::kNumThreads, Copy<4>::kMinBlocks)
    copy(const __grid_constant__ Copy<4>::Params params) {
      Copy<4>::run(params);
    }
    <BLANKLINE>
    """
    lines = [f'#include "{name}"' for name in includes]
    for export, kernel in wrappers:
        bounds = f"{kernel}::kNumThreads, {kernel}::kMinBlocks"
        lines.append(f'extern "C" __global__ void __launch_bounds__({bounds})')
        lines.append(f"{export}(const __grid_constant__ {kernel}::Params params) {{")
        lines += [f"  {kernel}::run(params);", "}"]
    return "\n".join(lines) + "\n"


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
    ) -> None:
        self._used = used
        self.op, *args = used.args
        self.args = tuple(args)
        self.name = slug("_".join(used.args))
        self.wrappers = tuple(wrappers)
        self.files = tuple(files)
        self.hint = hint
        self.options = tuple(used.options.get("extra_cuda_cflags", ()))
        include_dirs = map(Path, used.options.get("extra_include_paths", ()))
        self.closure = include_closure(
            render([_include_name(file) for file in files], wrappers),
            include_dirs=[*include_dirs, *INCLUDE_DIRS],
        )
        self._images: dict[Arch, Lookup[bytes]] = {}
        self._numbers = {export: number for number, export in enumerate(self.exports)}
        self._made: dict[str, Callable[..., Any]] = {}
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
        """
        return self.lookup(arch).loaded

    def lookup(self, arch: Arch) -> Lookup[bytes]:
        """Find the code for `arch` and tell where it came from. Raises as :meth:`image`."""
        start = time.perf_counter()
        found = self._images.get(arch)
        if found is not None:
            ms = (time.perf_counter() - start) * 1e3
            stats.count("memo", ms)
            return Lookup("memo", ms, found.entry, found.loaded)
        found = self._images[arch] = get_or_build(_Image(self, arch))
        file = settings().record
        if file is not None:
            record(replace(self._used, arch=str(arch)), file)
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
        block: int | Sequence[int],
        shared_bytes: int = 0,
        use_pdl: bool = False,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch a kernel on the current torch stream; returns at once.

        Loads the code at the first call on a device, once for all kernels of the module: they share
        its ``__device__`` variables. This works while a stream is being captured, too.

        Parameters
        ----------
        export
            The kernel's name in ``device_wrappers``.
        *args
            Members of the kernel's ``Params``, in order: tensors (their data pointers), int
            (``long long``), float (``double``), bool, or ctypes values of other widths. An object
            with ``__dlpack__``, ``data_ptr()`` or ``__cuda_array_interface__`` is its pointer, too.
        grid, block
            Numbers of blocks and threads, one to three of them.
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
            An unknown kernel, an argument of another type, arguments of other bytes than the
            kernel's ``Params``, memory that is not on one GPU, sizes that no GPU has.
        UnsupportedError
            There is no GPU.

        Examples
        --------
        >>> module.launch("copy", dst, src, 1024, grid=4, block=256)  # doctest: +SKIP
        """
        number = self._numbers.get(export)
        if number is None:
            known = ", ".join(self.exports)
            raise ValueError(f"launch: export: {export!r}, expected one of {known}")
        launch = self._made.get("launch") or self._make_launch()
        kinds = set(map(type, args))
        members = args if PLAIN.issuperset(kinds) else readable(args)
        how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
        # A tensor of torch tells its stream on the way to C++; to ask torch for it takes 5 us.
        is_told = not TORCH.isdisjoint(kinds)
        wanted = launch(*how, -1, is_told, *members)
        if wanted is not None:
            launch(*how, *device_and_stream(wanted), *members)

    def _make_launch(self) -> Callable[..., Any]:
        from jitkern.host import module as host

        # Weak, because C++ keeps the function: the module would hold itself.
        this = weakref.proxy(self)
        made = host.launcher(self.exports, lambda arch: this.image(arch))
        # Of two threads one is first, and both launch from what it loads.
        return self._made.setdefault("launch", made)

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
    name: str, *args: str, device_files: Sequence[str], device_wrappers: Sequence[Wrapper]
) -> DeviceModule:
    """As :func:`jitkern.load_jit`; its FrozenError names the ``jitkern warm`` that was missing.

    The first of `args` is the size of a row, as the command line takes it.
    """
    options = {"device_files": list(device_files), "device_wrappers": [*map(list, device_wrappers)]}
    return DeviceModule(
        Specialisation("load_jit", (name, *args), options, ""),
        [CSRC / file for file in device_files],
        device_wrappers,
        hint=lambda arch: hints.warm_op(name, args[0], arch),
    )


class _Image(Buildable[bytes]):
    """The code of a module for one arch.

    Its variant, the compiler's version, comes from file names: nothing is loaded and no process
    started. Without a compiler an entry of any is good, and a miss raises the compiler's error.
    """

    def __init__(self, module: DeviceModule, arch: Arch) -> None:
        self._module = module
        self._arch = arch
        self.key = module.key(arch)
        try:
            self.variant = _toolchain_id()
        except ToolchainError:
            self.variant = ""

    def load(self, entry: Entry) -> bytes:
        return entry.data

    def hint(self) -> str:
        return self._module.hint(self._arch)

    def build(self) -> BuildOutput:
        start = time.perf_counter()
        module = self._module
        image = _compiler(minimal=all(file.is_relative_to(CSRC) for file in module.files))(
            module.closure.source,
            # Not NAME.cu: a header of that name, the user's own file, would include itself.
            name=f"{module.name}.instance.cu",
            headers=module.closure.headers,
            arch=self._arch,
            options=module.options,
        )
        if image.kind == "cubin" and not image.data.startswith(b"\x7fELF"):
            raise CompileError(
                f"{module.name}: the compiler's output is not a cubin",
                command=" ".join(module.options),
                log=image.log,
                source=module.closure.source,
            )
        notes = {
            "kind": image.kind,
            "log": image.log,
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        return BuildOutput(_toolchain_id(), {f"{slug(module.op)}.{image.kind}": image.data}, notes)


def _compiler(*, minimal: bool) -> Callable[..., Image]:
    # Imported here: a warm load needs neither, a cold one needs one of them.
    if settings().compiler == "nvrtc":
        from jitkern.compilers import nvrtc

        # The sources of the package have no need of what -minimal leaves out.
        return partial(nvrtc.compile, minimal=minimal)
    from jitkern.compilers import nvcc

    return nvcc.compile_with_nvcc


def _toolchain_id() -> str:
    if settings().compiler == "nvrtc":
        return find_nvrtc().id
    from jitkern.compilers.find_cuda import find_nvcc

    return find_nvcc().id


def _content(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape"))


def _include_name(file: Path) -> str:
    return file.relative_to(CSRC).as_posix() if file.is_relative_to(CSRC) else str(file)

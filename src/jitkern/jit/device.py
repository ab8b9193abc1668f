"""The device route: a rendered translation unit, compiled for an arch when its image is wanted."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jitkern.env import settings
from jitkern.errors import CompileError, ToolchainError
from jitkern.jit import stats
from jitkern.jit.entry import Entry, Key, digest, slug
from jitkern.jit.launch import PLAIN, device_and_stream, readable
from jitkern.jit.locking import no_fork
from jitkern.jit.record import Specialisation, record
from jitkern.jit.resolve import Built, Found, obtain
from jitkern.jit.sources import CSRC, INCLUDE_DIRS, include_closure
from jitkern.jit.stats import Source
from jitkern.jit.template import KernelConfig
from jitkern.jit.toolchain import Arch, find_nvcc, find_nvrtc

# Raised when the same text has to be compiled anew: how entry points and parameters are rendered.
DEVICE_ABI = 1

# Name and template class of a kernel.
Wrapper = tuple[str, str]


@dataclass(frozen=True)
class Lookup:
    """How an image was found.

    Attributes
    ----------
    source
        ``"memo"``, ``"cached"``, ``"shipped"`` or ``"compiled"``.
    ms
        Milliseconds it took.
    bytes
        Size of the image.
    path
        Directory of the entry, or None where it could be kept in memory only.
    """

    source: Source
    ms: float
    bytes: int
    path: Path | None


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
    name, args
        The kernel's name and its template arguments, for keys and messages.
    files
        The device sources, absolute.
    wrappers
        (name, class) of each kernel.
    options
        Extra options of the compiler.
    include_dirs
        Directories searched before the package's own.
    recorded
        What load_jit was given, for JITKERN_RECORD.

    Attributes
    ----------
    name
        The kernel's name and template arguments, e.g. ``store_656_16_4``.
    launch_config
        What :meth:`launched_with` was told.
    """

    def __init__(
        self,
        name: str,
        args: Sequence[str],
        *,
        files: Sequence[Path],
        wrappers: Sequence[Wrapper],
        options: Sequence[str] = (),
        include_dirs: Sequence[Path] = (),
        recorded: Mapping[str, Any] | None = None,
    ) -> None:
        self.op = name
        self.args = tuple(args)
        self.name = slug("_".join([name, *self.args]))
        self.wrappers = tuple(wrappers)
        self._files = tuple(files)
        self._shipped = all(file.is_relative_to(CSRC / "ops") for file in files)
        self._recorded = dict(recorded or {})
        self._options = tuple(options)
        self._source = render([_include_name(file) for file in files], wrappers)
        self._closure = include_closure(
            self._source, include_dirs=[*(Path(d) for d in include_dirs), *INCLUDE_DIRS]
        )
        self._found: dict[Arch, Found] = {}
        self._numbers = {export: number for number, export in enumerate(self.exports)}
        self._made: dict[str, Callable[..., Any]] = {}
        self.launch_config: tuple[int, ...] = ()

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
        return self._find(arch)[0].entry.data

    def entry(self, arch: Arch) -> Entry:
        """Return the cache entry of the code for `arch`; its ``meta`` says how it was built."""
        return self._find(arch)[0].entry

    def lookup(self, arch: Arch) -> Lookup:
        """Find the code for `arch` and tell where it came from. Raises as :meth:`image`."""
        found, source, ms = self._find(arch)
        return Lookup(source, ms, len(found.entry.data), found.entry.path)

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
        members = args if PLAIN.issuperset(map(type, args)) else readable(args)
        wanted = launch(
            number, grid, block, shared_bytes, use_pdl, cooperative, cluster, -1, 0, *members
        )
        if wanted is not None:  # no tensor of torch among them, which would have told its stream
            how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
            launch(*how, *device_and_stream(wanted), *members)

    def _make_launch(self) -> Callable[..., Any]:
        from jitkern.jit import host

        # Weak, because C++ keeps the function: the module would hold itself.
        this = weakref.proxy(self)
        made = host.launcher(self.exports, lambda arch: this.image(arch))
        # Of two threads one is first, and both launch from what it loads.
        return self._made.setdefault("launch", made)

    def key(self, arch: Arch) -> Key:
        """Return the cache key of the code for `arch`.

        The toolchain's version comes from file names: nothing is loaded and no process started.
        """
        headers = {
            name: hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
            for name, text in self._closure.headers.items()
        }
        compiler = settings().compiler
        family = digest(
            {
                "route": "device",
                "abi": DEVICE_ABI,
                "name": self.op,
                "args": self.args,
                "source": hashlib.sha256(self._closure.source.encode()).hexdigest(),
                "headers": headers,
                "options": self._options,
                "arch": str(arch),
            }
        )
        describe = {
            "op": self.op,
            "args": list(self.args),
            "arch": str(arch),
            "options": list(self._options),
            "kernels": [list(wrapper) for wrapper in self.wrappers],
            "files": [file.name for file in self._files],
        }
        return Key("device", self.name, family, _toolchain_id(compiler), describe)

    def _find(self, arch: Arch) -> tuple[Found, Source, float]:
        start = time.perf_counter()
        found = self._found.get(arch)
        if found is not None:
            ms = (time.perf_counter() - start) * 1e3
            stats.count("memo", ms)
            return found, "memo", ms
        key = self.key(arch)
        found = obtain(key, lambda: self._build(key, arch), cure=self._cure(arch))
        record(Specialisation("load_jit", (self.op, *self.args), self._recorded, str(arch)))
        self._found[arch] = found
        return found, found.source, (time.perf_counter() - start) * 1e3

    def _build(self, key: Key, arch: Arch) -> Built:
        # Imported here: a warm load needs neither.
        from jitkern.jit import nvcc, nvrtc

        start = time.perf_counter()
        chosen = settings().compiler
        compile_image = (
            partial(nvrtc.compile, minimal=self._shipped)
            if chosen == "nvrtc"
            else nvcc.compile_with_nvcc
        )
        with no_fork():
            image = compile_image(
                self._closure.source,
                # Not NAME.cu: a header of that name, the user's own file, would include itself.
                name=f"{self.name}.instance.cu",
                headers=self._closure.headers,
                arch=arch,
                options=self._options,
            )
        if image.kind == "cubin" and not image.data.startswith(b"\x7fELF"):
            raise CompileError(
                f"{self.name}: the compiler's output is not a cubin",
                command=" ".join(self._options),
                log=image.log,
                source=self._closure.source,
            )
        meta = {
            "kind": image.kind,
            "log": image.log,
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        return Built(key, {f"{slug(self.op)}.{image.kind}": image.data}, meta)

    def _cure(self, arch: Arch) -> str:
        if self._shipped and self.args and self.args[0].isdecimal():
            command = f"jitkern warm --op {self.op} --element-size {self.args[0]} --arch {arch}"
            return f"build it beforehand with: {command}"
        return (
            "record a run with JITKERN_RECORD=FILE and build it beforehand with: "
            f"jitkern warm --replay FILE --arch {arch}"
        )


def _toolchain_id(compiler: str) -> str:
    try:
        return find_nvrtc().id if compiler == "nvrtc" else find_nvcc().id
    except ToolchainError:
        return ""  # any recorded toolchain is good; a miss raises this error again


def _include_name(file: Path) -> str:
    return file.relative_to(CSRC).as_posix() if file.is_relative_to(CSRC) else str(file)

"""``nvcc -cubin``: the same source as NVRTC gets, by a toolkit's compiler. Knows no cache.

Chosen by ``JITKERN_COMPILER=nvcc``: where a toolkit is newer than the NVRTC at hand, to profile by
source line, or to read the resource report in the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.arch import Arch
from jitkern.compilers.find_cuda import find_nvcc
from jitkern.compilers.for_nvrtc import words
from jitkern.compilers.ninja import Step, run_ninja
from jitkern.compilers.nvrtc import Image
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults
from jitkern.errors import CompileError
from jitkern.fs import scratch_folder

if TYPE_CHECKING:
    from jitkern.compilers.find_headers import CudaHeaders

# By these nvcc and its preprocessor take options and headers that would be in no key.
_UNSET = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "INCLUDES", "SYSTEM_INCLUDES"),
    *("CUDAFE_FLAGS", "NVVM_FLAGS", "PTXAS_FLAGS"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CCC_OVERRIDE_OPTIONS"),
)

BASE_OPTIONS = (DEVICE_STD, "-lineinfo", "-Xptxas=-v")
"""Given to every compile: line numbers for the profiler, the resource report in the log."""


def compile_with_nvcc(
    source: str,
    *,
    name: str,
    headers: Mapping[str, str],
    arch: Arch,
    options: Sequence[str] = (),
    cuda_headers: CudaHeaders | None = None,
) -> Image:
    """Compile device code to a cubin with nvcc; blocks until done.

    Parameters and result as `nvrtc.compile`. The headers are written to a temporary directory;
    those of the toolkit itself, which nvcc includes on its own, are not part of the closure and
    are covered by nvcc's version in the key; other ones of CUDA's are `cuda_headers`. Flags and
    include directories of the environment (NVCC_APPEND_FLAGS, CPATH and the like) do not count.

    Raises
    ------
    CompileError
        The source does not compile, or nvcc does not know `arch`; carries command, log and source.
    ToolchainError
        There is no nvcc or no ninja.
    ValueError
        An option that names an include directory or file, or has an open quote.
    """
    options = words(options)
    check_options(options)
    nvcc = find_nvcc()
    with scratch_folder("nvcc") as root:
        unit = root / f"{Path(name).stem}.cu"
        written = {
            unit: source,
            **{root / "include" / path: text for path, text in headers.items()},
        }
        for path, text in written.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        flags = with_defaults(BASE_OPTIONS, options)
        command = (*nvcc.command, "-cubin", f"-arch={arch.sm}", *flags)
        directories = [] if cuda_headers is None else cuda_headers.directories
        includes = ("-I", "include", *(f"-I{directory}" for directory in directories))
        tail = (*includes, unit.name, "-o", "out.cubin")
        try:
            step = Step("out.cubin", (unit.name,), (*command, *tail))
            log = run_ninja(name, root, [step], unset=_UNSET)
        except CompileError as error:
            raise CompileError(
                f"{name}: {nvcc.id} for {arch} failed",
                command=error.command,
                log=error.log,
                source=source,
            ) from None
        return Image((root / "out.cubin").read_bytes(), "cubin", log)

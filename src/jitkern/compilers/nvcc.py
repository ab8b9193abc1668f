"""``nvcc -cubin``: the same source as NVRTC gets, by a toolkit's compiler. Knows no cache.

Chosen by ``JITKERN_COMPILER=nvcc``: if a toolkit is newer than the NVRTC at hand, to profile by
source line, or to read the resource report in the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jitkern.arch import Arch
from jitkern.compilers.cxx import ninja_build, ninja_rule, run_ninja
from jitkern.compilers.find import CudaHeaders, find_nvcc
from jitkern.compilers.nvrtc import Image
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults, words
from jitkern.errors import CompileError
from jitkern.fs import scratch_folder

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
    """Compile device code to a cubin with nvcc. Parameters and result as `nvrtc.compile`.

    The toolkit's own headers, which nvcc includes by itself, are covered by nvcc's version in the
    key. Flags and include directories of the environment (NVCC_APPEND_FLAGS, CPATH) do not count.

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
    directories = [] if cuda_headers is None else cuda_headers.directories
    flags = [f"-arch={arch.sm}", *with_defaults(BASE_OPTIONS, options), "-I", "include"]
    flags += [f"-I{directory}" for directory in directories]
    command = [*nvcc.command, "-cubin", *flags, "$in", "-o", "$out"]
    unit, output = f"{Path(name).stem}.cu", "out.cubin"
    build = ninja_rule("nvcc", command, depfile=False) + ninja_build(output, "nvcc", [unit])
    texts = {unit: source, "build.ninja": build}
    texts |= {f"include/{path}": text for path, text in headers.items()}
    with scratch_folder("nvcc") as root:
        for path, text in texts.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        try:
            log = run_ninja(name, root, _UNSET)
        except CompileError as error:
            message = f"{name}: {nvcc.id} for {arch} failed"
            raise CompileError(
                message, command=error.command, log=error.log, source=source
            ) from None
        return Image((root / output).read_bytes(), "cubin", log)

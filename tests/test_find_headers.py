"""Where CUDA's own headers are searched, on machines that are laid out in different ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from headers import load, put, toolkit

from jitkern.compilers import find_headers
from jitkern.compilers.find_headers import CudaHeaders, header_hint
from jitkern.compilers.find_nvrtc import Nvrtc

OLD = Nvrtc(Path("libnvrtc.so.12"), "12.8")  # brings no headers
NEW = Nvrtc(Path("libnvrtc.so.13"), "13.3")


def test_a_plain_kernel_searches_nothing(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_headers, "_places", lambda: pytest.fail("searched"))
    assert load(tmp_path, '"jitkern/copy.cuh"').cuda_headers() is None
    assert load(tmp_path, "<cstdint>", "<vector>", "<math.h>").cuda_headers() == CudaHeaders()


@pytest.mark.parametrize(
    "where",
    [
        "site/nvidia/cu13/include",
        "site/nvidia/cuda_runtime/include",
        "home/include",
        "home/targets/x86_64-linux/include",
        "usr-local-cuda/include",
        "conda/targets/x86_64-linux/include",
    ],
)
def test_places(bare_machine: Callable[..., Path], where: str) -> None:
    root = bare_machine(CUDA_HOME=bare_machine() / "home")
    include = toolkit(root / where, 12080, "cuda_fp16.h")
    found = find_headers.find_headers(["cuda_fp16.h"], library=OLD)
    assert found == CudaHeaders((include,))
    assert found.id.startswith("cuda-12.8-")


def test_the_toolkit_of_the_nvcc_on_path(bare_machine: Callable[..., Path]) -> None:
    root = bare_machine(PATH=bare_machine() / "kit/bin")
    put(root / "kit/bin/nvcc").chmod(0o755)
    include = toolkit(root / "kit/include", 12080, "cuda_fp16.h")
    assert find_headers.find_headers(["cuda_fp16.h"], library=OLD).directories == (include,)


def test_packages_of_cuda_12_and_cccl(bare_machine: Callable[..., Path]) -> None:
    nvidia = bare_machine() / "site/nvidia"
    runtime = toolkit(nvidia / "cuda_runtime/include")
    cccl = put(nvidia / "cuda_cccl/include/cuda/std/version").parents[2]
    nvcc = put(nvidia / "cuda_nvcc/include/crt/mma.h").parents[1]
    found = find_headers.find_headers(["cuda/std/version"], library=OLD)
    assert found.directories == (runtime, cccl, nvcc)
    inside = put(nvidia / "cuda_runtime/include/cccl/cub/version.cuh").parents[1]
    found = find_headers.find_headers(["cub/version.cuh"], library=OLD)
    assert found.directories == (runtime, inside, cccl, nvcc)


def test_the_same_cuda_before_another_and_the_whole_before_a_part(
    bare_machine: Callable[..., Path],
) -> None:
    root = bare_machine(CUDA_HOME=bare_machine() / "home")
    other = toolkit(root / "site/nvidia/cu13/include", 13000, "cuda_fp16.h")
    same = toolkit(root / "home/include", 12060, "cuda_fp16.h")
    whole = toolkit(root / "usr-local-cuda/include", 13000, "cuda_fp16.h", "mma.h")

    def found(*names: str, library: Nvrtc = OLD) -> tuple[Path, ...]:
        return find_headers.find_headers(names, library=library).directories

    assert found("cuda_fp16.h") == (same,)
    assert found("cuda_fp16.h", library=Nvrtc(Path("x"), "13.0")) == (other,)
    assert found("cuda_fp16.h", "mma.h") == (whole,)
    assert found("nowhere.h") == ()


def test_those_that_nvrtc_brings_come_first(bare_machine: Callable[..., Path]) -> None:
    include = toolkit(bare_machine() / "usr-local-cuda/include", 13000, "cuda_fp16.h", "curand.h")
    find = find_headers.find_headers
    assert find(["cuda_fp16.h"], library=NEW) == CudaHeaders((), bundled=True)
    assert find(["curand.h"], library=NEW) == CudaHeaders((include,), bundled=True)
    assert find(["vector"], library=NEW) == CudaHeaders()
    assert find([], library=NEW) == CudaHeaders()
    assert find(["cuda_fp16.h"], [include], NEW) == CudaHeaders(
        (include,), bundled=True, num_given=1
    )
    assert find(["cuda_bf16.h"], [include], NEW) == CudaHeaders((), bundled=True)
    assert find(["cuda_bf16.h"], [include], None) == CudaHeaders((include,), num_given=1)


def test_what_is_nowhere_is_told(bare_machine: Callable[..., Path]) -> None:
    find = find_headers.find_headers
    assert not find(["cuda_fp16.h"], library=OLD).complete
    assert find(["vector", "mine.h"], library=OLD).complete


@pytest.mark.parametrize("mark", find_headers._MARKS)
def test_directories_of_ones_own_with_cudas_headers(
    mark: str, tmp_path: Path, empty_cache: Path
) -> None:
    """They are not read for the key: CUB has computed includes."""
    put(tmp_path / "given" / mark, "#include COMPUTED\n")
    include = put(tmp_path / "given/cub/all.cuh", "#include COMPUTED\n").parents[1]
    module = load(tmp_path, "<cub/all.cuh>", extra_include_paths=[str(include)])
    found = module.cuda_headers()
    assert found is not None
    assert found.directories == (include,)
    assert module.closure.missing == ("cub/all.cuh",)


@pytest.mark.parametrize(
    ("name", "version", "hint"),
    [
        (
            "cuda_fp16.h",
            "12.8",
            "cuda_fp16.h is CUDA's own, which NVRTC brings from 13.3 on and this one does not; "
            "pip install nvidia-cuda-runtime-cu12 nvidia-cuda-cccl-cu12 nvidia-cuda-nvcc-cu12, "
            "or set CUDA_HOME to a CUDA toolkit",
        ),
        (
            "cub/block/block_scan.cuh",
            "13.2",
            "cub/block/block_scan.cuh is CUDA's own, which NVRTC brings from 13.3 on and this one "
            'does not; pip install "nvidia-cuda-nvrtc>=13.3", or set CUDA_HOME to a CUDA toolkit',
        ),
        (
            "curand_kernel.h",
            "13.5",
            "curand_kernel.h was found neither in pip packages nor in a CUDA toolkit; "
            "set CUDA_HOME to one, or name its directory in extra_include_paths",
        ),
        (
            "vector",
            "13.5",
            "NVRTC has no C++ standard library; what CUDA has of it is in <cuda/std/...>",
        ),
        ("mine.h", "13.5", ""),
    ],
)
def test_hints(name: str, version: str, hint: str) -> None:
    assert header_hint(name, Nvrtc(Path("libnvrtc.so"), version)) == hint

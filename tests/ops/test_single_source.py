"""A `.cu` file with device code and a host `run()` in it, as mini-sglang's kernels are written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tvm_ffi import Module

from jitkern import load_jit, make_cpp_args
from jitkern.compilers.find import find_cxx, find_nvcc
from jitkern.env import settings
from jitkern.errors import CompileError, ToolchainError

SOURCE = Path(__file__).parent / "single_source" / "rotate_rows.cu"
ROW_BYTES = 656


@pytest.fixture(scope="module", autouse=True)
def toolchain() -> None:
    try:
        find_nvcc()
        find_cxx()
    except ToolchainError as error:
        pytest.skip(str(error))


@pytest.fixture
def for_some_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile for sm_90 where there is no GPU to ask."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("JITKERN_ARCH", "9.0")
        settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def rotate_rows(*, cuda_file: Path = SOURCE, row_bytes: int = ROW_BYTES) -> Module:
    args = make_cpp_args(row_bytes, 256, True)
    return load_jit(
        "rotate_rows",
        *args,
        cuda_files=[str(cuda_file)],
        cuda_wrappers=[("launch", f"RotateRows<{args}>::run")],
        extra_cuda_cflags=["-lineinfo"],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("for_some_gpu")
def test_it_compiles_and_loads_without_a_gpu() -> None:
    module = rotate_rows()
    assert callable(module.launch)
    with pytest.raises(ValueError, match="rotate_rows: expected rows of 656 bytes"):
        module.launch(torch.zeros(3, 4), torch.zeros(3, 4), 1)
    nothing = torch.empty(0, ROW_BYTES, dtype=torch.uint8)
    module.launch(nothing, nothing, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("for_some_gpu")
def test_the_log_of_a_mistake_is_in_the_exception(tmp_path: Path) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text(SOURCE.read_text().replace("% params.num_rows", "% params.num_rowz"))
    with pytest.raises(CompileError) as caught:
        rotate_rows(cuda_file=broken)
    assert "num_rowz" in caught.value.log
    assert "num_rowz" in str(caught.value)
    assert "nvcc" in caught.value.command


@pytest.mark.slow
@pytest.mark.usefixtures("for_some_gpu")
def test_template_arguments_that_its_static_assert_refuses() -> None:
    with pytest.raises(CompileError, match="a row is a whole number of 4-byte words"):
        rotate_rows(row_bytes=657)


@pytest.mark.cuda
def test_it_runs() -> None:
    module = rotate_rows()
    src = torch.randint(0, 256, (1000, ROW_BYTES), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    for shift in (0, 1, 999, 12345, -7):
        module.launch(dst, src, shift)
        assert torch.equal(dst, src.roll(-shift, dims=0))
    halves = src.view(torch.float16)
    module.launch(dst.view(torch.float16), halves, 3)
    assert torch.equal(dst, src.roll(-3, dims=0))


@pytest.mark.cuda
def test_it_runs_on_the_current_stream() -> None:
    module = rotate_rows()
    src = torch.zeros(1000, ROW_BYTES, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    module.launch(dst, src, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        src.fill_(7)
        module.launch(dst, src, 1)
        assert dst.eq(7).all()

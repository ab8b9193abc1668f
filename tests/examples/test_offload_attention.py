"""The example of attention over an offloaded cache, and its tuning, at a small size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import offload_attention as example
import offload_tuning as tuning
import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads wait for each other where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(device: torch.device, chunk: int) -> example.Case:
    device = torch.empty(0, device=device).device  # with its index
    return example.Case(device, 3, 208, 4, 2, 16, block_size=8, chunk=chunk, unit_blocks=2)


@pytest.mark.parametrize("chunk", [8, 24, 32])
@pytest.mark.parametrize("way", [example.Prefill, tuning.OneStream])
def test_it_is_full_attention(device: torch.device, way: type[example.Prefill], chunk: int) -> None:
    """Chunks that divide the tokens and others, units that are full and not."""
    case = small(device, chunk)
    prefill = way(case)
    for _ in range(2):  # the second run writes over the blocks of the first
        assert 0 < example.rms_error(case, prefill.run()) < example.MAX_ERROR


def test_a_wrong_result_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small(device, 24)
    monkeypatch.setattr(example, "merge_state", lambda *_, **__: None)
    assert example.rms_error(case, example.Prefill(case).run()) > example.MAX_ERROR


def test_tuning_finds_a_chunk(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tuning, "default_case", lambda: small(device, 24))
    file = tmp_path / "result.json"
    assert tuning.main(["--repeats", "1", "--json", str(file)]) == 0
    output, result = capsys.readouterr().out, json.loads(file.read_text())
    assert f"chunks of {result['chunk']} tokens: " in output
    assert ("these times mean nothing" in output) == (device.type == "cpu")
    assert output.count("chunks of") == 4  # 32 tokens is the most that the budget allows
    assert result["tokens_per_s"] > 0 and result["tokens_per_s_without_overlap"] > 0
    assert 0 < result["rms_error"] < example.MAX_ERROR

"""The example of attention over an offloaded cache, at a small size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import offload_attention as example
import pytest
import torch

SMALL = ["--layers", "3", "--tokens", "208", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
SMALL += ["--block-size", "8", "--unit-blocks", "2", "--depth", "3", "--repeats", "1"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads wait for each other where others use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(device: torch.device, tmp_path: Path, *more: str) -> tuple[int, Any]:
    file = tmp_path / "result.json"
    status = example.main([*SMALL, "--device", str(device), "--json", str(file), *more])
    return status, json.loads(file.read_text())


@pytest.mark.parametrize("chunk", [8, 24, 32])
def test_it_is_full_attention(device: torch.device, tmp_path: Path, chunk: int) -> None:
    """Of chunks that divide the tokens and of others, with units that are full and not."""
    status, result = run(device, tmp_path, "--chunk", str(chunk))
    assert status == 0
    assert result["chunk"] == chunk
    assert 0 < result["rms_error"] < result["max_rms_error"]
    assert result["gpu_bytes"] <= result["cache_bytes"] / 4
    assert result["tokens_per_s"] > 0 and result["tokens_per_s_without_overlap"] > 0


def test_it_finds_a_chunk(
    device: torch.device, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result = run(device, tmp_path)
    said = capsys.readouterr().out
    assert status == 0 and f"\nchunks of {result['chunk']} tokens: " in said
    assert said.count("chunks of") == 4  # 32 tokens is the most that the budget allows


def test_a_wrong_result_is_found(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "merge_state", lambda *_, **how: None)
    status, result = run(device, tmp_path, "--chunk", "24")
    assert status == 1
    assert result["rms_error"] > result["max_rms_error"]

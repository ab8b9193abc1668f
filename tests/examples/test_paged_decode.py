"""The example of a decode loop over a paged cache, and that its check sees what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from processes import run_example, with_mistake

NAME = "paged_decode.py"


def test_it_is_attention_without_pages(device: torch.device) -> None:
    done = run_example(NAME, device, "--steps", "40", "--page-size", "4", "--most-tokens", "18")
    assert done.returncode == 0, done.stdout + done.stderr
    how = "one graph, replayed" if device.type == "cuda" else "eagerly"
    assert f"40 steps of 8 rows on {device.type}, {how}\n" in done.stdout
    found = re.search(r"(\d+) requests, (\d+) tokens, (\d+) rows of padding", done.stdout)
    assert found is not None
    requests, tokens, padded = map(int, found.groups())
    assert requests > 8  # rows have served several
    assert tokens + padded == 40 * 8 and tokens > 100 and padded > 30


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("if left[row] else -1 for row", "if left[row] else 0 for row"),  # padding in slot 0
        ("self.lengths.unsqueeze(1)", "self.lengths.unsqueeze(1) - 1"),  # the newest is not seen
    ],
    ids=["padding", "length"],
)
def test_a_mistake_is_found(device: torch.device, tmp_path: Path, right: str, wrong: str) -> None:
    done = run_example(with_mistake(NAME, tmp_path, right, wrong), device)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "largest difference" in done.stdout

"""The example of top-k rows out of host memory: its bytes, and what it says of hits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from processes import run_example, with_mistake

NAME = "sparse_topk.py"


@pytest.mark.parametrize("parts", [2, 5])
def test_it_fetches_what_is_missing(device: torch.device, parts: int) -> None:
    argv = ["--tokens", "3000", "--top", "100", "--steps", "9", "--parts", str(parts)]
    done = run_example(NAME, device, *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = re.findall(r"step \d+: (\d+)% on the GPU, (\d+) bytes fetched", done.stdout)
    assert len(steps) == 9
    assert steps[0] == ("0", "65600")
    for share, num_bytes in steps:
        assert int(num_bytes) == (100 - int(share)) * 656
    assert f"{100 * parts} slots of 3000 tokens on {device.type}: " in done.stdout
    assert all(int(share) > 40 for share, _ in steps[1:])  # the query drifts slowly


def test_more_parts_find_more(device: torch.device) -> None:
    found = []
    for parts in ("2", "6"):
        argv = ["--tokens", "3000", "--top", "100", "--drift", "1.5", "--parts", parts]
        match = re.search(
            r": (\d+)% found, wrong steps: 0", run_example(NAME, device, *argv).stdout
        )
        assert match is not None
        found.append(int(match[1]))
    assert found[0] < found[1]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("self.forget(begin, end)\n", "pass\n"),
        ("slots < end), -1, slots)", "slots < end), slots, slots)"),
    ],
    ids=["forget", "map"],
)
def test_a_stale_map_is_found(device: torch.device, tmp_path: Path, right: str, wrong: str) -> None:
    """Slots that are read and written by one call hold something else."""
    done = run_example(with_mistake(NAME, tmp_path, right, wrong), device)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "is WRONG" in done.stdout or "wrong steps: 0" not in done.stdout

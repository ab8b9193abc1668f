"""The example of a split embedding, under torchrun, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

PATH = Path(__file__).resolve().parents[2] / "examples" / "tp_embedding.py"
SMALL = ["--vocab-size", "101", "--hidden-size", "65536", "--tokens", "40"]  # 16 rows in a page
HELD = {"peer": (64, 42), "all_reduce": (54, 52)}

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.slow,
]


def test_without_torchrun() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, str(PATH)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "start it with: torchrun --nproc-per-node 2" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("algorithm", ["auto", "all_reduce"])
def test_two_ranks(session_cache: Path, algorithm: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(PATH), *SMALL, "--algorithm", algorithm],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = "peer" if algorithm == "auto" else algorithm
    for rank, held in enumerate(HELD[found]):
        said = f"rank {rank} of 2, cpu: {held} of 106 rows, by {found}, 40 tokens in "
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(said)]
        assert line.endswith(" ms, equal")

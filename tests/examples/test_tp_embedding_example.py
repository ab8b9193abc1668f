"""The example of a split embedding, under torchrun, on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import jitkern.comm

PATH = Path(__file__).resolve().parents[2] / "examples" / "tp_embedding.py"
SMALL = ["--vocab-size", "101", "--hidden-size", "6", "--tokens", "40"]

pytestmark = [
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"
    ),
    pytest.mark.skipif(
        not hasattr(jitkern.comm, "TorchCommunicator"), reason="jitkern.comm is not built yet"
    ),
]


def test_two_ranks(session_cache: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(PATH), *SMALL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        said = f"rank {rank} of 2, cpu: 54 of 106 rows, 40 tokens in "
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(said)]
        assert line.endswith(" ms, equal")

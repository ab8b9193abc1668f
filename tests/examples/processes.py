"""Examples as processes, as their users start them, and with a mistake in them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forks
import torch
from paths import python_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run_example(
    name: str, device: torch.device, *argv: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a file of examples/, or one that `with_mistake` has made; on the CPU without GPUs."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(), **environment}
    if device.type == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    return forks.run(EXAMPLES / name, *argv, env=env, timeout=300)


def with_mistake(name: str, folder: Path, right: str, wrong: str) -> str:
    """Write a file of examples/ to `folder` with one text replaced; return its path."""
    text = (EXAMPLES / name).read_text()
    assert text.count(right) == 1, f"{name} has {text.count(right)} times {right!r}"
    file = folder / Path(name).name
    file.write_text(text.replace(right, wrong))
    return str(file)

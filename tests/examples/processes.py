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


def environment_for(device: torch.device) -> dict[str, str]:
    """Return this process's, with the GPUs hidden from an example that is to run on the CPU."""
    found = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    if device.type == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def run_example(
    name: str, device: torch.device, *argv: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a file of examples/, or one that `with_mistake` has made."""
    env = {**environment_for(device), **environment}
    return forks.run(EXAMPLES / name, *argv, env=env, timeout=300)


def with_mistake(name: str, folder: Path, right: str, wrong: str) -> str:
    """Write a file of examples/ to `folder` with one text replaced; return its path."""
    text = (EXAMPLES / name).read_text()
    assert text.count(right) == 1, f"{name} has {text.count(right)} times {right!r}"
    file = folder / Path(name).name
    file.write_text(text.replace(right, wrong))
    return str(file)

"""Examples as processes, as their users start them, as modules, and with a mistake in them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import forks
import pytest
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


@contextmanager
def example_module(name: str) -> Iterator[ModuleType]:
    """Import a file of examples/."""
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, path.stem, module)  # where dataclasses look
        spec.loader.exec_module(module)
        yield module

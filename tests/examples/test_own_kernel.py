"""The example of a kernel of one's own: run, compiled without a GPU, recorded and replayed."""

from __future__ import annotations

from pathlib import Path

import torch
from needs import needs_cxx, needs_nvrtc
from processes import run_example

import jitkern

NAME = "own_kernel/own_kernel.py"

pytestmark = needs_cxx


@needs_nvrtc
def test_it_runs_warms_and_is_replayed(device: torch.device, tmp_path: Path) -> None:
    record = tmp_path / "run.jsonl"
    done = run_example(NAME, device, "--warm", "8.0,9.0", JITKERN_RECORD=str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()[1:]
    assert lines[0] == f"1000 rows of 576 on {device.type}: equal"
    assert lines[1] == "errors of wrong calls:"
    assert lines[2] == "TypeError: dequantise: x: dtype float32, expected int8"
    assert lines[3].startswith("ValueError: dequantise: x: not contiguous (stride 2 in dimension 1")
    assert lines[4] == "ValueError: dequantise: scale: shape [999], expected [1000]"
    assert lines[5].startswith("for 8.0: ") and lines[6].startswith("for 9.0: ")
    assert lines[7].startswith("rows of 6 values: ") and "whole vectors of 4 values" in lines[7]

    found = jitkern.warm(replays=[record], check=True)
    ours = [(outcome.arch, outcome.source) for outcome in found if outcome.name == "dequantise"]
    archs = {"8.0", "9.0", ""} if device.type == "cpu" else {"8.0", "9.0"}
    assert archs <= {arch for arch, _ in ours}
    assert {source for _, source in ours} == {"cached"}

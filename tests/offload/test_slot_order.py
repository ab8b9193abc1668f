"""What orders the streams of a SlotPipeline is enough, and no kind of wait can be left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fake_gpu import build_driver, environment, needs_fake_gpu

from jitkern.host.module import module

pytestmark = needs_fake_gpu


def test_random_runs_are_in_order(tmp_path: Path) -> None:
    module()  # built here, and not against the child's limit of time
    build_driver(tmp_path)
    command = [sys.executable, str(Path(__file__).with_name("slot_order.py")), "1000"]
    env = environment(tmp_path)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.stdout == "in order\n", done.stdout + done.stderr

"""Two nodes of a rank each: two agents of torchrun that meet at one rendezvous."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from paths import python_path

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = Path(__file__).resolve().parent / "node_child.py"


def test_two_nodes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes=2"]
    command += ["--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=jitkern"]
    command += [f"--rdzv-endpoint=localhost:{port}", str(CHILD)]
    env = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"node{number}" for number in range(2)]
    agents = []
    try:
        for log in logs:
            with log.open("w") as file:
                agents.append(subprocess.Popen(command, env=env, stdout=file, stderr=file))
        codes = [agent.wait(120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    texts = [log.read_text() for log in logs]
    assert codes == [0, 0], "\n".join(texts)
    done = sorted(line for text in texts for line in text.splitlines() if "is done" in line)
    assert done == [f"rank {rank} of 2 is done" for rank in range(2)]
    assert all(text.count("is done") == 1 for text in texts)

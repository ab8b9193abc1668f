"""One rank of test_comm_nodes.py, started by torchrun: all bodies, and one line that says so."""

from __future__ import annotations

import sys

import bodies
import torch
import torch.distributed as dist

from jitkern.comm import TorchCommunicator


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with TorchCommunicator(timeout_s=60) as comm:
        for body in bodies.BODIES.values():
            body(comm, torch.device("cpu"))
        # One write: the ranks of a node share the file.
        sys.stdout.write(f"rank {comm.rank} of {comm.size} is done\n")
        sys.stdout.flush()
        comm.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

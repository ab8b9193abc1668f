"""One rank of test_shared_pool.py: makes the pool, does as it is told, and says how that went.

Its argument is JSON: name, rank, num_ranks, num_bytes, and what becomes of it at which step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from jitkern.offload import PinnedPool, PoolHandle, Share
from jitkern.offload.memory import PinnedMemory


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def at(step: str, then: Callable[[], None]) -> None:
    """Do something else at a step, and what is done there after it."""
    real = getattr(PinnedMemory, step)

    def instead(*args: Any, **how: Any) -> Any:
        then()
        return real(*args, **how)

    setattr(PinnedMemory, step, instead)


def fail() -> None:
    raise RuntimeError("no more of this")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    told = json.loads(sys.argv[1])
    if told.get("step"):
        at(told["step"], kill if told["becomes"] == "killed" else fail)
    try:
        if "handle" in told:
            pool = PinnedPool.attach(PoolHandle(*told["handle"]))
        else:
            share = Share(told["name"], told["rank"], told["num_ranks"], told.get("timeout_s", 60))
            pool = PinnedPool(told["num_bytes"], share=share)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}")
        return
    table = pool.tensor([pool.stats.num_bytes // 8], torch.int64)
    say(
        handle=[pool.handle.name, pool.handle.num_bytes, pool.handle.pid, pool.handle.fd]
        if "handle" not in told
        else None
    )
    for line in sys.stdin:
        order = json.loads(line)
        if "write" in order:
            table[order["write"]] = order["value"]
        if "close" in order:
            pool.close()
        say(value=table[order["read"]].item() if "read" in order else None)


if __name__ == "__main__":
    main()

"""Ends while a server runs, and says whether that was told to stop; run by test_ring_driver.py."""

from __future__ import annotations

import ring_child

from jitkern.offload import DescriptorRing, PinnedPool

close = PinnedPool.close


def told_close(pool: PinnedPool) -> None:
    print(f"pools are closed: stop is {server._stop.item()}", flush=True)
    close(pool)


ring_child.pretend()
PinnedPool.close = told_close  # type: ignore[method-assign]
server = ring_child.served(DescriptorRing(3, 5))
server.__enter__()
assert server.is_running and server._stop.item() == 0

"""What an ``OverlapMonitor`` knows, for Prometheus: needs ``pip install jitkern[metrics]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    from jitkern.offload.snapshot import OverlapSnapshot

# name: (what it is, the value in a snapshot)
_Figures = dict[str, tuple[str, Callable[["OverlapSnapshot"], float]]]
_COUNTERS: _Figures = {
    "iterations": ("Iterations that were queued", lambda s: s.iterations),
    "timed_iterations": ("Iterations whose times are known", lambda s: s.timed),
    "captured_iterations": ("Iterations in captured graphs", lambda s: s.captured),
    "dropped_iterations": ("Iterations whose times were not read in time", lambda s: s.dropped),
    "moved_bytes": ("Bytes of the slots that were copied", lambda s: s.bytes_moved),
    "alarms": ("How often the ratio fell below its limit", lambda s: s.alarms),
}
_GAUGES: _Figures = {
    "compute_seconds": ("Mean of a body, in the window", lambda s: s.compute_ms / 1e3),
    "transfer_seconds": ("Mean of a copy, in the window", lambda s: s.transfer_ms / 1e3),
    "stall_seconds": ("Mean that a body waited for a copy", lambda s: s.stall_ms / 1e3),
    "fill_seconds": ("Before the first body of a session", lambda s: s.fill_ms / 1e3),
    "compute_transfer_ratio": ("Compute by transfer, in the window", lambda s: s.ratio),
    "stalled_ratio": ("Part of the window's iterations that stalled", lambda s: s.stall_share),
    "transfer_bytes_per_second": ("Of copies, in the window", lambda s: s.gb_s * 1e9),
    "slots": ("Slots of the pipeline", lambda s: s.depth),
}


class Collector:
    """For ``registry.register(...)``: families ``jitkern_pipeline_*``, a sample by monitor."""

    def __init__(self, snapshots: Sequence[Callable[[], OverlapSnapshot]]) -> None:
        try:
            core = import_module("prometheus_client.core")
        except ImportError as error:
            raise UnsupportedError(
                "OverlapMonitor.collector: prometheus_client is not installed; pip install "
                "'jitkern[metrics]'"
            ) from error
        self._core: Any = core
        self._snapshots = snapshots

    def describe(self) -> Iterator[Any]:
        """Yield the families without values: registering asks no pipeline."""
        yield from self._families()

    def collect(self) -> Iterator[Any]:
        """Yield the families with what is known now."""
        found = [snapshot() for snapshot in self._snapshots]
        for family, value in zip(
            self._families(), (*_COUNTERS.values(), *_GAUGES.values()), strict=True
        ):
            for now in found:
                family.add_metric([now.name], value[1](now))
            yield family

    def _families(self) -> Iterator[Any]:
        for figures, kind in (
            (_COUNTERS, self._core.CounterMetricFamily),
            (_GAUGES, self._core.GaugeMetricFamily),
        ):
            for name, (text, _) in figures.items():
                yield kind(f"jitkern_pipeline_{name}", text, labels=["pipeline"])

"""The host module with a fake driver: which figures it decides by."""

from __future__ import annotations

from fake_gpu import report_checks
from launch_fake import raises

from jitkern import calibration
from jitkern.host.module import module

GPU = "Fake GPU"


def figures(ordinal: int) -> dict[str, int]:
    return {str(name): int(value) for name, value in module()["figures"](ordinal).items()}


def check_1_a_machine_without_a_file_has_the_figures_of_an_h200() -> None:
    found = figures(0)
    assert found["reach_bytes"] == 768 << 20, found
    assert found["small_call_bytes"] == 2 << 20, found
    assert all(value > 0 for value in found.values())
    assert figures(-1) == found  # of no device


def check_2_what_was_measured_is_asked_for_once_a_device() -> None:
    machine = calibration.machine_with(GPU, 13000)
    calibration.save(machine, {"reach_bytes": 5 << 30, "a figure of a later version": 7})
    assert figures(0)["reach_bytes"] == 768 << 20  # was asked for before
    assert figures(1)["reach_bytes"] == 5 << 30
    assert figures(1)["small_call_bytes"] == 2 << 20


def check_3_a_figure_can_be_set() -> None:
    module()["set_figure"](0, "both_threads", 3)
    assert figures(0)["both_threads"] == 3
    assert figures(1)["both_threads"] != 3
    for ordinal, name, value, text in (
        (0, "no such", 3, "no figure no such"),
        (-1, "both_threads", 3, "figure both_threads: 3 on device -1"),
        (64, "both_threads", 3, "figure both_threads: 3 on device 64"),
        (0, "both_threads", 0, "figure both_threads: 0 on device 0, expected at least 1"),
    ):
        raises(ValueError, f".*{text}.*", module()["set_figure"], ordinal, name, value)


if __name__ == "__main__":
    report_checks(dict(globals()), lambda: None)

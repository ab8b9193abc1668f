"""The host module with a fake driver: which figures it decides by."""

from __future__ import annotations

from fake_gpu import report_checks

from jitkern.host import tuning
from jitkern.host.module import module

GPU = "Fake GPU"


def figures(ordinal: int) -> dict[str, int]:
    return {str(name): int(value) for name, value in module()["figures"](ordinal).items()}


def check_1_a_machine_without_a_file_has_the_figures_of_an_h200() -> None:
    found = figures(0)
    assert found["reach_bytes"] == 768 << 20, found
    assert found["small_call_bytes"] == 2 << 20, found
    assert all(value > 0 for value in found.values())


def check_2_what_was_measured_is_asked_for_once_a_device() -> None:
    machine = tuning.machine_with(GPU, 13000)
    tuning.save(machine, {"reach_bytes": 5 << 30, "a figure of a later version": 7})
    assert figures(0)["reach_bytes"] == 768 << 20  # was asked for before
    assert figures(1)["reach_bytes"] == 5 << 30
    assert figures(1)["small_call_bytes"] == 2 << 20


def check_3_a_figure_can_be_set() -> None:
    module()["set_figure"](0, "both_threads", 3)
    assert figures(0)["both_threads"] == 3
    assert figures(1)["both_threads"] != 3
    try:
        module()["set_figure"](0, "no such", 3)
    except ValueError as error:
        assert "no figure no such" in str(error)
    else:
        raise AssertionError("accepted")


def check_4_no_device_has_the_defaults() -> None:
    assert figures(-1)["reach_bytes"] == 768 << 20


if __name__ == "__main__":
    report_checks(dict(globals()), lambda: None)

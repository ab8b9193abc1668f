"""The PCIe link of a GPU, read from files as Linux has them below /sys/bus/pci/devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitkern.host.library import module

SPEED, WIDTH = "link_speed", "link_width"
GEN_5 = {f"max_{SPEED}": "32.0 GT/s PCIe", f"max_{WIDTH}": "16"}


@pytest.mark.parametrize(
    ("files", "gt_s"),
    [
        ({f"current_{SPEED}": "32.0 GT/s PCIe", f"current_{WIDTH}": "16", **GEN_5}, 512),
        ({f"current_{SPEED}": "16.0 GT/s PCIe", f"current_{WIDTH}": "16", **GEN_5}, 256),
        ({f"current_{SPEED}": "16.0 GT/s PCIe", f"current_{WIDTH}": "8", **GEN_5}, 128),
        ({f"current_{SPEED}": "2.5 GT/s PCIe", f"current_{WIDTH}": "16", **GEN_5}, 512),
        ({f"current_{SPEED}": "Unknown", f"current_{WIDTH}": "0", **GEN_5}, 512),
        ({f"max_{SPEED}": "2.5 GT/s PCIe", f"max_{WIDTH}": "1"}, 0),
        ({}, 0),
    ],
    ids=["5.0 x16", "4.0 x16", "4.0 x8", "idle", "virtual machine", "other link", "no files"],
)
def test_speed(tmp_path: Path, files: dict[str, str], gt_s: float) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert module()["link_gt_s"](f"{tmp_path}/") == gt_s

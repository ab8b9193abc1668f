"""The JSON of a run: the machine and the rows, in one format for all benchmarks."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import jitkern
from bench.case import Row
from jitkern.fs import text_of

Payload = dict[str, Any]

SCHEMA = 1

PACKAGES = ("torch", "apache-tvm-ffi", "triton", "nvidia-cuda-nvrtc", "vllm", "flashinfer-python")


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and what is installed, for the record."""
    described: dict[str, Any] = {
        "device": device,
        "name": processor() if device == "cpu" else torch.cuda.get_device_name(),
        "cpu": processor(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "cpu_threads_of_torch": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"jitkern": jitkern.__version__, **_versions()},
    }
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        described |= {
            "sms": gpu.multi_processor_count,
            "l2_bytes": gpu.L2_cache_size,
            "memory_bytes": gpu.total_memory,
            "cuda_of_torch": torch.version.cuda,
            "driver": kernel_driver() or "unknown",
        }
        if torch.cuda.device_count() > 1:
            described["gpus"] = torch.cuda.device_count()
    return described


def kind_of(described: dict[str, Any]) -> str:
    """Return the name for results of this kind of machine, such as ``nvidia-h200-x2``."""
    name = described["name"]
    if described["device"] == "cpu":
        name += f" {described['cpu_cores']} cores"
    elif "gpus" in described:
        name += f" x{described['gpus']}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def payload(described: dict[str, Any], rows: Sequence[Row], *, quick: bool) -> Payload:
    """Return the JSON of a run: the machine, then the rows of each benchmark."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    load = round(os.getloadavg()[0], 2)  # CPU figures mean little if it exceeds the number of cores
    ops: dict[str, Any] = {}
    for row in rows:
        entry = ops.setdefault(row.op, {"date": now, "quick": quick, "load": load, "rows": []})
        entry["rows"].append(rounded(asdict(row)))
    return {"schema": SCHEMA, "machine": described, "date": now, "benchmarks": ops}


def save(path: Path, data: Any) -> None:
    """Write JSON, in directories that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> Payload:
    """Return a result."""
    data: Payload = json.loads(path.read_text())
    return data


def rounded(value: Any) -> Any:
    """Keep five significant digits: a diff of two results then shows what changed."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def kernel_driver() -> str:
    """Return the version of NVIDIA's kernel module, such as 580.95.05; empty if unknown."""
    text = text_of(Path("/proc/driver/nvidia/version"))
    match = re.search(r"^NVRM version:.*?\s(\d+\.[\d.]+)\s", text, re.MULTILINE)
    return match[1] if match else ""


def processor() -> str:
    """Return the processor's model; its architecture if Linux does not say."""
    match = re.search(r"^model name\s*: *(.+)$", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else os.uname().machine

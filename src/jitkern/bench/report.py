"""Tables for the eye and JSON for the record: one format for every benchmark."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import jitkern
from jitkern.bench.case import CaseError, Row
from jitkern.host import tuning

Payload = dict[str, Any]
Goals = Callable[[Sequence[Row]], Sequence[dict[str, Any]]]

SCHEMA = 1

PACKAGES = ("torch", "apache-tvm-ffi", "triton", "nvidia-cuda-nvrtc", "vllm", "flashinfer-python")


def machine(device: str) -> dict[str, Any]:
    """Describe the machine and what is installed, for the record."""
    described: dict[str, Any] = {
        "device": device,
        "name": tuning.processor() if device == "cpu" else torch.cuda.get_device_name(),
        "cpu": tuning.processor(),
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
            "driver": tuning.kernel_driver() or "unknown",
        }
        if torch.cuda.device_count() > 1:
            described["gpus"] = torch.cuda.device_count()
    return described


def machine_line(described: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in described["versions"].items())
    return f"{described['name']}; Python {described['python']}, {versions}"


def kind_of(described: dict[str, Any]) -> str:
    """Return what results of like machines are called, such as ``nvidia-h200-x2``."""
    name = described["name"]
    if described["device"] == "cpu":
        name += f" {described['cpu_cores']} cores"
    elif "gpus" in described:
        name += f" x{described['gpus']}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def payload(described: dict[str, Any], rows: Sequence[Row], *, quick: bool) -> Payload:
    """Return what goes into the JSON: the machine, then the rows of each benchmark."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    load = round(os.getloadavg()[0], 2)  # above the number of cores, CPU figures mean little
    ops: dict[str, Any] = {}
    for row in rows:
        entry = ops.setdefault(row.op, {"date": now, "quick": quick, "load": load, "rows": []})
        entry["rows"].append(rounded(asdict(row)))
    return {"schema": SCHEMA, "machine": described, "date": now, "benchmarks": ops}


def write(path: Path, data: Payload, *, goals: Goals | None = None) -> None:
    """Write the JSON; benchmarks of an earlier run of this machine that did not run now stay.

    `goals` turns the rows that are then in it into what is written beside them.
    """
    if path.exists():
        before = read(path)
        if before["machine"] == data["machine"]:
            data = {**data, "benchmarks": {**before["benchmarks"], **data["benchmarks"]}}
    if goals is not None:
        data = {**data, "goals": goals(rows_of(data))}
    save(path, data)


def save(path: Path, data: Any) -> None:
    """Write JSON, in directories that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def read(path: Path) -> Payload:
    """Return a result; JitkernError in one line where the file holds none."""
    try:
        data: Payload = json.loads(path.read_text())
    except OSError as error:
        raise CaseError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), dict):
        raise CaseError(f"{path}: not a result of jitkern bench: it has no 'benchmarks'")
    if data.get("schema", SCHEMA) != SCHEMA:
        raise CaseError(f"{path}: schema {data['schema']}, this jitkern reads {SCHEMA}")
    try:
        kind_of(data["machine"])
        dict(data["machine"].get("versions", {}))
        rows_of(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CaseError(f"{path}: damaged: {type(error).__name__}: {error}") from error
    return data


def rows_of(data: Payload) -> list[Row]:
    """Return the rows of a result as they were measured."""
    known = {field.name for field in fields(Row)}
    rows = [row for entry in data["benchmarks"].values() for row in entry["rows"]]
    return [Row(**{name: value for name, value in row.items() if name in known}) for row in rows]


STYLES = {"ours": "bold green", "ceiling": "cyan", "sm ceiling": "cyan", "floor": "cyan"}


def table(op: str, rows: Sequence[Row]) -> Table:
    """Return the table of one benchmark; a blank cell is something that was not measured."""
    made = Table(title=op, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    made.add_column("case / implementation", no_wrap=True)
    for column in ("median", "IQR %", "GB/s", "x peer", "% ceiling", "host us"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("note")
    last = None
    cases = list(dict.fromkeys(row.case for row in rows))
    for row in sorted(rows, key=lambda row: cases.index(row.case)):
        if row.case != last:
            made.add_row(row.case, style="bold")
            last = row.case
        spread = 100 * row.iqr_us / row.median_us if row.iqr_us and row.median_us else None
        made.add_row(
            f"  {row.impl}",
            time_text(row.median_us),
            _number(spread, 1),
            _number(row.gb_s, 1 if (row.gb_s or 0) < 1000 else 0),
            _number(row.ratio_to_best_peer, 2),
            _number(row.percent_of_ceiling, 1),
            _number(row.host_us, 1),
            row.error or row.note,
            style="red" if row.error else STYLES.get(row.role, ""),
        )
    return made


def summary(rows: Sequence[Row]) -> str:
    """Say in one line how many rows there are and what failed."""
    failed = [row for row in rows if row.error]
    ours = [row for row in failed if row.role == "ours"]
    return f"{len(rows)} rows, {len(failed)} without a figure, {len(ours)} of them jitkern's"


def time_text(us: float | None) -> str:
    """Return microseconds in the unit that suits; nothing for None."""
    if us is None:
        return ""
    return (
        f"{us:.2f} us" if us < 1000 else f"{us / 1e3:.2f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
    )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def rounded(value: Any) -> Any:
    """Keep five significant digits: a diff of two results then shows what moved."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # not installed, so not among the versions
    return found

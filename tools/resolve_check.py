"""Check that pip can install the wheel beside each engine: `make resolve-check`.

Nothing is installed: `pip install --dry-run` reads the requirements of every package that a fresh
environment with this Python would get. The exit status is 1 if one engine does not resolve.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

# One at a time: vLLM and sglang pin different versions of PyTorch.
ENGINES = ("vllm==0.33.0", "sglang==0.5.23", "flashinfer-python==0.7.4", "quack-kernels==0.6.5")
SHOWN = ("torch", "apache-tvm-ffi")  # what the pins of engines are about


def resolve(wheel: Path, engine: str) -> tuple[bool, str]:
    """Return whether pip resolves both together, and one line of what it chose or why not."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--disable-pip-version-check", "--report", "-", str(wheel), engine]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        return False, " ".join(
            errors
        ) or f"pip: exit status {done.returncode}: {done.stderr[-2000:]}"
    installs = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    versions = {item["name"]: item["version"] for item in installs}
    shown = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
    return True, f"{', '.join(shown)}; {len(versions)} packages"


def main() -> None:
    parser = argparse.ArgumentParser(description="Does pip install the wheel beside each engine?")
    parser.add_argument("wheel", type=Path, help="jitkern's wheel, such as that of `make wheel`")
    parser.add_argument("engines", nargs="*", default=ENGINES, help=f"default: {' '.join(ENGINES)}")
    args = parser.parse_args()
    is_good = True
    for engine in args.engines:
        resolves, line = resolve(args.wheel, engine)
        is_good &= resolves
        print(f"{args.wheel.name} and {engine}: {'' if resolves else 'does not resolve: '}{line}")
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

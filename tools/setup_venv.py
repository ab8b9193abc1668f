"""Make the virtual environment that make runs in: `python3 tools/setup_venv.py .venv EXTRA`.

Only the standard library: this runs before anything is installed. What is installed is pinned by
constraints.txt. A torch >= 2.8 that the base interpreter already has (a CUDA machine, a container)
is used as it is; otherwise, on a machine with no NVIDIA driver, the CPU build of torch is
preferred, which spares a download of several GB.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# What each `make` target needs on top of the core dependencies. Extras are only ever added.
EXTRAS = {
    "cuda": "cuda",
    "test": "cuda,test",
    "dev": "dev",
    "bench": "cuda,bench",
    "docs": "docs",
    "release": "cuda,release",
}


def base_has_torch() -> bool:
    """Whether the base interpreter (not a venv: those do not nest) has torch >= 2.8."""
    if sys.prefix != sys.base_prefix:
        return False
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    major, minor = (int(part) for part in version.split(".")[:2])
    return (major, minor) >= (2, 8)


def constraint_lines(*, keep_base: bool) -> list[str]:
    """Return the pins without those of packages kept from the base interpreter."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if not keep_base:
        return lines
    present = {canonical(dist.name) for dist in importlib.metadata.distributions()}
    return [line for line in lines if canonical(line.partition("==")[0]) not in present]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def cpu_index_options() -> list[str]:
    """Return the index of CPU builds if there is no NVIDIA driver and the index answers."""
    if Path("/proc/driver/nvidia").exists():
        return []
    try:
        urllib.request.urlopen(f"{CPU_TORCH_INDEX}/torch/", timeout=3).close()
    except OSError:
        return []  # a mirror or a local collection of wheels: pip's own settings decide
    return ["--extra-index-url", CPU_TORCH_INDEX]


def main() -> None:
    target, what = Path(sys.argv[1]), sys.argv[2]
    if sys.version_info < (3, 10):  # noqa: UP036 - this is where an old Python is told so
        found = ".".join(map(str, sys.version_info[:2]))
        sys.exit(f"Python {found}: jitkern needs 3.10 or newer; try `make PYTHON=python3.12 ...`")

    keep_base = base_has_torch()
    python = target / "bin" / "python"
    if not python.exists():
        try:
            venv.create(target, with_pip=True, system_site_packages=keep_base)
        except subprocess.CalledProcessError:  # Debian and Ubuntu ship Python without ensurepip
            sys.exit(f"{sys.executable}: cannot make a virtual environment; install python3-venv")

    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("\n".join(constraint_lines(keep_base=keep_base)) + "\n")
        # --no-compile: the demo compiles what it imports; pip would compile all of torch, 19 s.
        pip = [str(python), "-m", "pip", "install", "-qq", "--no-compile", "-c", str(constraints)]
        pip += ["--disable-pip-version-check"]
        # What the build of the host module needs, and that of an editable wheel.
        early = subprocess.run([*pip, "apache-tvm-ffi", "ninja", "hatchling", "editables"])
        if early.returncode != 0:
            sys.exit(early.returncode)
        # The host module is built while pip installs torch. The first use reports a failure.
        build = [str(python), "-m", "jitkern", "warm"]
        path = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        subprocess.Popen(build, env=path, stdout=subprocess.DEVNULL)
        options = [] if keep_base else cpu_index_options()
        command = [*pip, *options, "--no-build-isolation", "-e", f"{ROOT}[{EXTRAS[what]}]"]
        print(" ".join(command), flush=True)
        status = subprocess.run(command, check=False).returncode
    if status == 0 and what == "test":  # tests start hundreds of processes
        compile_all = [str(python), "-m", "compileall", "-qq", "-j", "0", str(target / "lib")]
        subprocess.run(compile_all, check=False)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Check whether this tree can be released: `make release-check` builds and installs it.

Wheel and sdist are built in isolation, against the apache-tvm-ffi that pyproject.toml pins for the
host module, and end in dist/. The wheel of kernels is checked too, if it is there already.
The first step that fails ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # hatchling needs it there, too

ROOT = Path(__file__).resolve().parent.parent
# What every manylinux has, and the libraries of tvm-ffi and of C++, which torch needs too. No
# libcuda, libtorch, libpython: the module works without a driver, and with any torch and Python.
MAY_LINK = {
    *("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1"),
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6", "libtvm_ffi.so"),
}
# In a process with an empty PATH: `jitkern doctor`, then a kernel.
SMOKE = """
import sys
sys.path.insert(0, sys.argv[1])
import jitkern
from jitkern.cli import main
assert jitkern.__file__.startswith(sys.argv[1]), jitkern.__file__
status = main(["doctor"])
assert jitkern.stats().shipped == 1, "the host module is not the one of the wheel"
sys.exit(status or main(["warm", "--row-bytes", "656", "--arch", "9.0"]))
"""

# What the wheel of kernels is to have, by the sources of the wheel beside it: sys.argv[2:] are
# archs, and then arguments of jitkern.warm.
KERNELS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import jitkern
archs, *wanted = map(json.loads, sys.argv[2:])
found = [one for given in wanted for one in jitkern.warm(archs=archs, check=True, **given)]
lacking = [one.job for one in found if one.source not in ("shipped", "memo")]
if lacking:
    sys.exit(f"lacks {len(lacking)} of {len(found)}, such as {lacking[0]}: build it anew")
"""


class UnfitError(Exception):
    """Why this cannot be released."""


# -- what is written down --------------------------------------------------------------------------


def version_of(root: Path) -> str:
    """Return the version, from the one place that defines it."""
    text = (root / "src" / "jitkern" / "version.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def check_versions(root: Path, tag: str | None = None) -> str:
    """Changelog and pages name the version; on a tag they equal it and the section has a date."""
    version = version_of(root)
    found = re.search(r"^## (\S+) \((.+)\)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    if found is None or found[1] != version:
        top = "none" if found is None else found[0]
        raise UnfitError(f"CHANGELOG.md: the top section is {top}, the version {version}")
    if tag is not None:
        if tag != f"v{version}":
            raise UnfitError(f"the tag is {tag}, the version {version}")
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", found[2]):
            raise UnfitError(f"CHANGELOG.md: {found[0]}: expected the date of the release")
    for page in (root / "README.md", *sorted(root.glob("docs/**/*.md"))):
        for named in re.findall(r"jitkern-(\d[\w.]*)-", page.read_text()):
            if named != version:
                raise UnfitError(
                    f"{page.relative_to(root)}: jitkern-{named}, the version {version}"
                )
    for project in ("pyproject.toml", "kernels/pyproject.toml"):
        if 'dynamic = ["version"]' not in (root / project).read_text():
            raise UnfitError(f"{project}: says a version of its own")
    return f"{version}, {found[2]}"


def check_sdist(sdist: Path, root: Path) -> str:
    """The sdist has the files of git except those that pyproject.toml excludes."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    left_out = (".ci/", "bench/results/")
    wanted = {
        name
        for name in done.stdout.split("\0")
        if (root / name).is_file() and not name.startswith(left_out)
    }
    different = names ^ (wanted | {"PKG-INFO"})
    if different:
        raise UnfitError(f"{sdist.name}: differs from git in {', '.join(sorted(different)[:9])}")
    return f"{len(names)} files, {_size(sdist)}"


# -- what is built ---------------------------------------------------------------------------------


def build(source: Path, out: Path, *what: str) -> None:
    """Run `python -m build`."""
    _run("-m", "build", *what, "--outdir", str(out), str(source))


def check_from_sdist(sdist: Path, wheel: Path, scratch: Path) -> str:
    """The wheel built from the sdist is the same, byte for byte, except for compiled files."""
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    (source,) = scratch.iterdir()
    build(source, scratch / "out", "--wheel")
    (again,) = (scratch / "out").glob("*.whl")
    if again.name != wheel.name:
        raise UnfitError(f"the wheel of the sdist is {again.name}, that of the tree {wheel.name}")
    for ours, theirs in zip(_plain_files(wheel), _plain_files(again), strict=True):
        if ours != theirs:
            raise UnfitError(f"{again.name}: that of the sdist has another {theirs[0]}")
    return "the same"


def _plain_files(wheel: Path) -> list[tuple[str, int]]:
    """Names and checksums; compiled files and RECORD only have to exist."""
    infos = sorted(zipfile.ZipFile(wheel).infolist(), key=lambda info: info.filename)
    made = ("jitkern/_prebuilt/", "RECORD")
    return [
        (i.filename, 0 if i.filename.startswith(made[0]) or i.filename.endswith(made[1]) else i.CRC)
        for i in infos
    ]


def check_links(wheel: Path, scratch: Path) -> str:
    """The shared libraries need only libraries that every machine has."""
    zipfile.ZipFile(wheel).extractall(scratch)
    libraries = sorted(scratch.rglob("*.so"))
    if len(libraries) != 1:
        raise UnfitError(
            f"{wheel.name}: {len(libraries)} shared libraries, expected the host module"
        )
    command = ["objdump", "-p", str(libraries[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wanted = set(re.findall(r"^ +NEEDED +(\S+)$", done.stdout, re.MULTILINE))
    if wanted - MAY_LINK:
        raise UnfitError(f"{libraries[0].name}: links {', '.join(sorted(wanted - MAY_LINK))}")
    return ", ".join(sorted(wanted))


def check_smoke(wheel: Path, scratch: Path) -> str:
    """It works without a compiler; torch is that of this environment."""
    site, empty = scratch / "site", scratch / "empty"
    empty.mkdir()
    options = ("--no-deps", "--no-index", "--target", str(site), "--disable-pip-version-check")
    _run("-m", "pip", "install", "-q", *options, str(wheel))
    env = {"PATH": str(empty), "HOME": str(empty), "JITKERN_CACHE_DIR": str(scratch / "cache")}
    # -I: without the checkout, this user's packages and Python's environment variables.
    _run("-I", "-c", SMOKE, str(site), env=env)
    return "doctor finds nothing broken, and a kernel compiles"


def check_kernels(wheel: Path | None, scratch: Path) -> str:
    """The wheel of kernels is of these very sources; it goes beside what check_smoke has installed.

    One of others would do no harm, and no good.
    """
    if wheel is None:
        return "none in the output directory: make kernels-wheel"
    site = str(scratch / "site")
    options = ("--no-deps", "--no-index", "--target", site, "--disable-pip-version-check")
    _run("-m", "pip", "install", "-q", *options, str(wheel))
    listed = tomllib.loads((ROOT / "kernels" / "kernels.toml").read_text())
    env = {"JITKERN_CACHE_DIR": str(scratch / "no-cache"), "HOME": str(scratch)}
    given = map(json.dumps, (listed["archs"], *listed["warm"]))
    _run("-I", "-c", KERNELS, site, *given, env=env)
    count = sum(name.endswith(".cubin") for name in zipfile.ZipFile(wheel).namelist())
    return f"{wheel.name}, {count} kernels, {_size(wheel)}"


def check_types(scratch: Path) -> str:
    """Type checkers know all types of the wheel that check_smoke has installed."""
    # pyright asks the first python on PATH for the packages, and knows no torch of another.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(scratch / "site")}
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    command += ["--verifytypes", "jitkern", "--ignoreexternal"]
    done = subprocess.run(command, env=env, cwd=scratch, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout[done.stdout.index("{") :])["typeCompleteness"]
    except (ValueError, KeyError):
        raise UnfitError(f"pyright: {done.stdout}{done.stderr}") from None
    unknown = [one["name"] for one in found["symbols"] if not one["isTypeKnown"]]
    if found["completenessScore"] < 1:
        raise UnfitError(f"{len(unknown)} types are not known: {', '.join(unknown[:9])}")
    return f"{found['completenessScore']:.0%} of {len(found['symbols'])} symbols"


def _run(*argv: str, env: dict[str, str] | None = None) -> None:
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    if done.returncode:
        raise UnfitError(f"{' '.join(argv)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.2f} MB"


# -- one after the other ---------------------------------------------------------------------------


def steps(out: Path, scratch: Path, tag: str | None) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each step with its name; the caller runs it before it takes the next."""

    def folder(name: str) -> Path:
        (scratch / name).mkdir()
        return scratch / name

    def built(what: str, pattern: str) -> str:
        build(ROOT, scratch / "built", what)
        (path,) = (scratch / "built").glob(pattern)
        return f"{path.name}, {_size(path)}"

    def twine() -> str:
        paths = [sdist, wheel, *([] if kernels is None else [kernels])]
        _run("-m", "twine", "check", "--strict", *map(str, paths))
        return ", ".join(path.name for path in paths)

    yield "version", lambda: check_versions(ROOT, tag)
    yield "sdist", lambda: built("--sdist", "*.tar.gz")
    (sdist,) = (scratch / "built").glob("*.tar.gz")
    yield "its files", lambda: check_sdist(sdist, ROOT)
    yield "wheel", lambda: built("--wheel", "*.whl")
    (wheel,) = (scratch / "built").glob("*.whl")
    yield "wheel of the sdist", lambda: check_from_sdist(sdist, wheel, folder("from-sdist"))
    kernels = next(out.glob(f"jitkern_kernels-{version_of(ROOT)}-*.whl"), None)
    yield "twine", twine
    yield "links", lambda: check_links(wheel, folder("links"))
    yield "no compiler", lambda: check_smoke(wheel, folder("smoke"))
    yield "kernels", lambda: check_kernels(kernels, scratch / "smoke")
    yield "types", lambda: check_types(scratch / "smoke")
    out.mkdir(exist_ok=True)
    for path in (sdist, wheel):
        shutil.copy(path, out / path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Is this tree fit for a release?")
    parser.add_argument("--tag", help="the tag of the release, such as v0.1.0: it is to be one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist")
    args = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="jitkern-release-") as scratch:
        for name, step in steps(args.out, Path(scratch), args.tag):
            start = time.perf_counter()
            try:
                found = step()
            except UnfitError as error:
                sys.exit(f"{name}: {error}")
            print(f"{name:20}{time.perf_counter() - start:6.1f} s  {found}", flush=True)
    print(f"fit for a release, {time.perf_counter() - begin:.0f} s in all, files in {args.out}")


if __name__ == "__main__":
    main()

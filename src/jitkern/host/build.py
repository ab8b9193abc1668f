"""Building the host module: for the wheel, or if the wheel has none that fits."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from jitkern.cache import get
from jitkern.cache.entry import Entry, Key, new_entry
from jitkern.cache.lock import build_folder
from jitkern.cache.store import Cache
from jitkern.compilers import cxx
from jitkern.compilers.load import platform_abi
from jitkern.compilers.sources import CSRC, include_dirs
from jitkern.env import CXX_HEADERS
from jitkern.errors import ToolchainError
from jitkern.fs import digest
from jitkern.host.module import HostModule

_log = logging.getLogger("jitkern")


def build(key: Key, csrc: Path, *, ldflags: Sequence[str] = ()) -> Entry:
    """Compile and link every ``.cc`` below `csrc`. Raises as `cxx.build`."""
    import tvm_ffi

    with build_folder(_checkout_folder(key, csrc)) as folder:
        library = cxx.build(
            key.name,
            sources=sorted(csrc.rglob("*.cc")),
            directory=folder,
            cflags=key.describe["cflags"],
            ldflags=("-pthread", *ldflags),  # before glibc 2.34 threads are a library of their own
            include_paths=include_dirs(csrc),
            precompiled=csrc / "host" / "precompiled.h",
            unset=CXX_HEADERS,  # they would bring headers that are in no key
        ).read_bytes()
    notes = {"tvm_ffi": tvm_ffi.__version__, "libc": platform_abi()[1]}
    variant = f"{cxx.toolchain_id()}+tvm-ffi-{tvm_ffi.__version__}"
    return new_entry(key, variant, {f"{key.name}.so": library}, notes)


def _checkout_folder(key: Key, csrc: Path) -> Path | None:
    """Return the folder in a checkout's ``build/`` for ninja; None outside a checkout.

    Its name holds what ninja does not check: the versions of the compiler and of tvm-ffi.
    """
    import tvm_ffi

    root = csrc.parents[2]
    headers = [str(path) for path in cxx.tvm_ffi_include_dirs()]
    # pip builds wheels against packages in a temporary directory, with a new name each time.
    is_temporary = headers[0].startswith(tempfile.gettempdir())
    is_checkout = (root / "hatch_build.py").is_file() and os.access(root, os.W_OK)
    by = digest([cxx.toolchain_id(), tvm_ffi.__version__, headers, key.describe])
    return root / "build" / f"host-{by[:12]}" if is_checkout and not is_temporary else None


def build_host_module(out_dir: Path, csrc: Path = CSRC) -> Entry:
    """Build the host module as an entry below `out_dir`, for the wheel.

    Needs a C++ compiler, ninja and the tvm-ffi package; neither torch nor CUDA.
    """
    key = HostModule(csrc).key
    # Stripped. Links the user's libstdc++, which torch needs too; a static one needs glibc 2.36.
    return Cache(Path(out_dir), shared=True).publish(build(key, csrc, ldflags=("-s",)))


def announce_and_build(key: Key, csrc: Path) -> Entry:
    """Log why the host module is built, and build it; ToolchainError without a compiler."""
    import tvm_ffi

    entry = Cache(get.SHIPPED, read_only=True, shared=True).lookup(key)
    if entry is not None:
        shipped = entry.meta.get("tvm_ffi")
        why = f"was built against apache-tvm-ffi {shipped}, installed is {tvm_ffi.__version__}"
        cure = f"pip install apache-tvm-ffi=={shipped}"
    else:
        why = "is not shipped for these sources"
        cure = "install g++ (apt install g++) or a jitkern wheel"
    if not cxx.toolchain_id():
        raise ToolchainError(
            f"the host module {why} and there is no C++ compiler to build it; {cure}"
        )
    # A warning, which Python shows without any logging setup: the build takes long.
    _log.warning("jitkern: building the host module with c++: it %s", why)
    return build(key, csrc)

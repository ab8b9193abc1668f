"""Files: atomic writes, reads of files that others may have planted, scratch folders.

Also what Linux tells about the machine in files: processor, driver, free memory.

Every warm load imports this file: modules that few calls need are imported inside functions.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from jitkern.errors import CacheError, UnsupportedError

T = TypeVar("T")

# -- names and content -----------------------------------------------------------------------------

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*\Z")
_UNSAFE_CHAR = re.compile(r"[^A-Za-z0-9_.+-]")


def canonical_json(value: object) -> bytes:
    """Render `value` as JSON; equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def sha256(data: bytes) -> str:
    """Return the SHA-256 of `data`, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def digest(value: object) -> str:
    """Return 20 hex digits of the SHA-256 of `value`'s canonical JSON."""
    return sha256(canonical_json(value))[:20]


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is a plain file name that cannot leave its directory."""
    return len(name) <= 200 and _SAFE_NAME.match(name) is not None


def slug(name: str) -> str:
    """Return `name` with everything but letters, digits, ``_ . + -`` replaced, 80 at most."""
    return _UNSAFE_CHAR.sub("_", name)[:80].lstrip(".-") or "module"


def parse_json(raw: bytes) -> Any:
    """Parse JSON from an untrusted file; ValueError if it is none, or nested too deep."""
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise ValueError("nested too deep") from None


# -- reading ---------------------------------------------------------------------------------------


def open_regular(file: Path | str, *, follow: bool = False, append: bool = False) -> int:
    """Open a regular file for reading; return its descriptor.

    Anything else is an OSError: a FIFO would block, a device has no end. `follow` allows a link.
    `append` makes the file if need be, and opens it for writing too.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if append else os.O_RDONLY
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(file, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            reason = "a symbolic link, which is not followed here"
            raise OSError(errno.ELOOP, reason, str(file)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return descriptor


# -- writing ---------------------------------------------------------------------------------------


def write_whole(file: Path, data: bytes) -> None:
    """Replace the content of `file` by one rename; its directory is made if need be.

    A link in its place is replaced.
    """
    if not file.name:  # `.` and `/`
        raise OSError(errno.EISDIR, "a directory, expected a file", str(file))
    partial = file.with_name(f".{file.name}.{private_name()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_new(partial, data)
        os.replace(partial, file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_new(file: Path, data: bytes, *, flush: bool = False, mode: int | None = None) -> None:
    """Write a file that does not exist yet, with `mode`; by default 0644 less the umask.

    `flush` waits for the disk.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with open(os.open(file, flags, 0o644 if mode is None else 0o600), "wb") as out:
        if mode is not None:
            os.fchmod(out.fileno(), mode)
        out.write(data)
        if flush:
            out.flush()
            os.fsync(out.fileno())


def flush_directory(path: Path) -> None:
    """Make the names in directory `path` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- directories -----------------------------------------------------------------------------------


def make_folders(path: Path, mode: int = 0o700) -> None:
    """Make directory `path` and its missing parents, with this mode under any umask."""
    if not path.parent.exists():
        make_folders(path.parent, mode)
    try:
        path.mkdir(0o700)
    except FileExistsError:
        if not path.is_dir():
            path.lstat()  # FileNotFoundError if another process has just removed it
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path)) from None
        return
    is_setgid = path.stat().st_mode & stat.S_ISGID  # inherited from its parent
    if stat.S_IMODE(path.stat().st_mode) != mode | is_setgid:
        path.chmod(mode | is_setgid)


def require_writable(directory: Path, hint: str, mode: int = 0o700) -> None:
    """Raise CacheError unless files can be made in `directory`, created with `mode` if needed.

    A file is made: mode bits say nothing for root, on a read-only mount or on a full disk.
    """
    import tempfile

    try:
        make_folders(directory, mode)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".jitkern-") as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        raise CacheError(f"{directory}: cannot be written: {error.strerror}; {hint}") from error


# -- scratch ---------------------------------------------------------------------------------------

_PRIVATE_NAME = re.compile(r".+\.[0-9]{1,10}\.[0-9a-f]{16}\Z")
_DEAD_S = 3600.0  # no publication takes so long; a compiler may outlive its killed parent


def private_name() -> str:
    """Return a unique name that cannot be guessed: ``<machine>.<pid>.<16 hex digits>``."""
    # secrets.token_hex gives the same; its import costs 2 ms.
    return f"{os.uname().nodename}.{os.getpid()}.{os.urandom(8).hex()}"


def is_abandoned(name: str, age_s: float) -> bool:
    """Tell by the private name and the age of a file whether a killed process left it."""
    # A negative age is as good: clocks are set back.
    return _PRIVATE_NAME.match(name) is not None and abs(age_s) > _DEAD_S


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Make a directory ``jitkern-<purpose>-...`` in TMPDIR, and delete it after the body."""
    import tempfile

    folder = tempfile.mkdtemp(prefix=f"jitkern-{purpose}-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- processes and memory --------------------------------------------------------------------------


class ForkLocal(Generic[T]):
    """A value that a forked child makes anew: no thread would release a held lock there."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.value: T = make()
        os.register_at_fork(after_in_child=lambda: vars(self).update(value=make()))


def make_memory(user: str, shown: str, num_bytes: int) -> int:
    """Return the descriptor of a memfd of `num_bytes`, sealed in size; /proc maps name it `shown`.

    Raises UnsupportedError, beginning with `user`, if there is no ``memfd_create``.
    """
    import ctypes

    # Through libc: Pythons built for a glibc before 2.27, as many of uv's, lack os.memfd_create.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise UnsupportedError(f"{user}: no memfd_create here, expected glibc 2.27")
    fd: int = libc.memfd_create(shown.encode(), 1 | 2)  # MFD_CLOEXEC, MFD_ALLOW_SEALING
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "memfd_create")
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, 1033, 1 | 2 | 4)  # F_ADD_SEALS: no shrinking, growing or unsealing
    return fd


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# Control groups, version 2 and 1: directory (also the controller's name), limit, usage, and the
# usage by files that Linux drops on demand.
_CGROUP_FILES = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_bytes() -> int | None:
    """Return the bytes that the machine and our control groups leave free; None if unknown."""
    available = re.search(r"^MemAvailable:\s+(\d+) kB", text_of(_MEMINFO), re.M)
    known = [int(available[1]) << 10] if available else []
    for folder, limit, used, cached in _CGROUP_FILES:
        for group in _control_groups(folder):
            most, now = text_of(group / limit).strip(), text_of(group / used).strip()
            if most.isdigit() and now.isdigit():  # "max" means no limit
                files = re.search(rf"^{cached} (\d+)", text_of(group / "memory.stat"), re.M)
                known.append(max(0, int(most) - int(now) + (int(files[1]) if files else 0)))
    return min(known, default=None)


def _control_groups(controller: str) -> list[Path]:
    """Return the directories of the process's control group and of all above it."""
    root = _CGROUP / controller
    for line in text_of(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        # A container does not see a path with "..": its own root is then the group's.
        if controller in controllers.split(",") and ".." not in path:
            parts = Path(path.lstrip("/")).parts
            return [root.joinpath(*parts[:count]) for count in range(len(parts) + 1)]
    return [root]


def size_text(num_bytes: float) -> str:
    """Return ``812 bytes``, ``7.9 KiB`` or ``1.25 TiB``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"


def text_of(file: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""

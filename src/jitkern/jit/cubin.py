"""What a cubin says of its kernels, for drivers that cannot tell (before CUDA 12.4)."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

_INFO = ".nv.info."  # and the kernel's name: a section of attributes
_PARAMS_BYTES = (3, 0x19)  # EIFMT_HVAL, EIATTR_CBANK_PARAM_SIZE
_WITH_BYTES = 4  # EIFMT_SVAL: the value is the size of what follows


def params_bytes(image: bytes, kernels: Sequence[str]) -> list[int]:
    """Return the bytes of each kernel's parameter; -1 where the image, being PTX, does not say it.

    Examples
    --------
    >>> params_bytes(b"// PTX", ["scale"])
    [-1]
    """
    if not image.startswith(b"\x7fELF"):
        return [-1] * len(kernels)
    infos = dict(_sections(image))
    return [_size_in(infos.get(_INFO + kernel, b"")) for kernel in kernels]


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, offset, size in headers:
        end = image.index(b"\0", texts + name)
        yield image[texts + name : end].decode(), image[offset : offset + size]


def _size_in(info: bytes) -> int:
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == _PARAMS_BYTES:
            return int(value)
        at += 4 + (value if form == _WITH_BYTES else 0)
    return -1

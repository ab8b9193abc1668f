"""What an image says of its kernels: the launch bounds, and the parameters' bytes.

Drivers do not tell the second before CUDA 12.4, and mix the first with what registers allow.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

_INFO = ".nv.info."  # and the kernel's name: a section of attributes
_PARAMS_BYTES = (3, 0x19)  # EIFMT_HVAL, EIATTR_CBANK_PARAM_SIZE
_MAX_THREADS = (
    4,
    0x05,
)  # EIFMT_SVAL, EIATTR_MAX_THREADS: x, y, z; launch bounds are x
_WITH_BYTES = 4  # EIFMT_SVAL: the value is the size of what follows


def kernel_facts(image: bytes, kernels: Sequence[str]) -> list[int]:
    """Return two numbers for each kernel: bytes of its parameter, -1 if unknown; its kNumThreads.

    The second is 0 where it may be launched with any block.

    Examples
    --------
    >>> kernel_facts(b".entry scale(.param .u64 x) .maxntid 256, 1, 1 {}", ["scale", "other"])
    [-1, 256, -1, 0]
    """
    if image.startswith(b"\x7fELF"):
        infos = dict(_sections(image))
        return [fact for kernel in kernels for fact in _facts(infos.get(_INFO + kernel, b""))]
    text = image.decode(errors="replace")
    bounds = [re.search(rf"\.entry {kernel}\([^{{]*\.maxntid (\d+)", text) for kernel in kernels]
    return [fact for bound in bounds for fact in (-1, int(bound[1]) if bound else 0)]


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry_bytes) for i in range(count)]
    texts = headers[names][4]
    for name, _, _, _, offset, size in headers:
        end = image.index(b"\0", texts + name)
        yield image[texts + name : end].decode(), image[offset : offset + size]


def _facts(info: bytes) -> tuple[int, int]:
    params_bytes, num_threads, at = -1, 0, 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        if (form, attribute) == _PARAMS_BYTES:
            params_bytes = value
        elif (form, attribute) == _MAX_THREADS:
            (num_threads,) = struct.unpack_from("<I", info, at + 4)
        at += 4 + (value if form == _WITH_BYTES else 0)
    return params_bytes, num_threads

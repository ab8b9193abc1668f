"""Names made from content: digests, and text as a file name."""

from __future__ import annotations

import hashlib
import json
import re

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9_.+-]*\Z")
_UNSAFE_CHAR = re.compile(r"[^A-Za-z0-9_.+-]")


def canonical_json(value: object) -> bytes:
    """Render `value` as JSON that is equal byte for byte for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def digest(value: object) -> str:
    """Return 20 hex digits of the SHA-256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:20]


def is_safe_name(name: str) -> bool:
    """Tell whether `name` is a plain file name that cannot leave its directory."""
    return len(name) <= 200 and _SAFE_NAME.match(name) is not None


def slug(name: str) -> str:
    """Return `name` with everything but letters, digits, ``_ . + -`` replaced, 80 at most."""
    text = _UNSAFE_CHAR.sub("_", name)[:80].lstrip(".-")
    return text or "module"

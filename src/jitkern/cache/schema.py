"""What a ``meta.json`` may say: the one door through which foreign input comes into the cache.

A checksum proves that a meta is what somebody wrote, not that it makes sense: whoever writes an
entry also writes its checksum. What has come through here has the types and ranges that all code
behind it relies on. Notes of the builders may be anything that JSON can say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jitkern.errors import CacheError
from jitkern.fs import canonical_json, is_safe_name, parse_json, sha256

SCHEMA = 1
META_NAME = "meta.json"

META_MAX_BYTES = 64 << 20
"""A kernel has one of 0.5 KB, a C++ file that includes all of torch (4,781 files) one of 14 MB."""

_MAX_FILE_BYTES = 1 << 32
_YEAR_5000_S = 1e11

_HEX = frozenset("0123456789abcdef")


def parse_meta(raw: bytes, where: str) -> dict[str, Any]:
    """Parse the text of a ``meta.json``, verify its checksum, and check every field.

    Raises
    ------
    CacheError
        It is damaged, or no meta of ours; the message starts with `where`.
    """
    if len(raw) > META_MAX_BYTES:
        raise CacheError(f"{where}: {len(raw)} bytes, expected at most {META_MAX_BYTES}")
    try:
        meta = parse_json(raw)
    except ValueError as error:
        raise CacheError(f"{where}: not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise CacheError(f"{where}: not an object")
    if meta.pop("checksum", None) != sha256(canonical_json(meta)):
        raise CacheError(f"{where}: checksum does not match")
    for field, is_right, expected in _FIELDS:
        if not is_right(meta.get(field)):
            raise CacheError(f"{where}: {field}: {_short(meta.get(field))}, expected {expected}")
    if meta["artefact"] not in meta["files"]:
        raise CacheError(f"{where}: artefact: {_short(meta['artefact'])}, expected one of files")
    return meta


def check_file(name: str, data: bytes, expected: Mapping[str, Any], where: str) -> None:
    """Raise CacheError unless `data` is what the meta recorded for file `name`."""
    if not is_safe_name(name):
        raise CacheError(f"{where}: file name {name!r}, expected a plain name")
    if len(data) != expected["bytes"]:
        raise CacheError(f"{where}: {name}: {len(data)} bytes, expected {expected['bytes']}")
    if sha256(data) != expected["sha256"]:
        raise CacheError(f"{where}: {name}: checksum does not match")


# -- types -----------------------------------------------------------------------------------------

# `type(...) is`: True is an int to isinstance, and 5.0 equals 5.


def _is_schema(value: Any) -> bool:
    return type(value) is int and value == SCHEMA


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_name(value: Any) -> bool:
    return type(value) is str and is_safe_name(value)


def _is_hex(value: Any, digits: int) -> bool:
    return type(value) is str and len(value) == digits and _HEX.issuperset(value)


def _is_digest(value: Any) -> bool:
    return _is_hex(value, 20)


def _is_describe(value: Any) -> bool:
    if type(value) is not dict:
        return False
    args = value.get("args", [])
    return (
        type(value.get("op", "")) is str
        and type(value.get("arch", "")) is str
        and type(args) is list
        and all(type(arg) is str for arg in args)
    )


def _is_files(value: Any) -> bool:
    return type(value) is dict and bool(value) and all(map(_is_file, value, value.values()))


def _is_file(name: str, value: Any) -> bool:
    return (
        is_safe_name(name)
        and name != META_NAME
        and type(value) is dict
        and value.keys() == {"bytes", "sha256"}
        and type(value["bytes"]) is int
        and 0 <= value["bytes"] <= _MAX_FILE_BYTES
        and _is_hex(value["sha256"], 64)
    )


def is_time(value: Any) -> bool:
    """Tell whether `value` may be a number of seconds since 1970, or a duration."""
    # Comparisons with NaN fail, and those with infinity.
    return type(value) in (int, float) and 0 <= value < _YEAR_5000_S


def _is_time_or_missing(value: Any) -> bool:
    return value is None or is_time(value)


_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("schema", _is_schema, str(SCHEMA)),
    ("route", _is_name, "a plain name"),
    ("name", _is_text, "a string"),
    ("family", _is_digest, "20 hex digits"),
    ("toolchain", _is_name, "a plain name"),
    ("describe", _is_describe, "an object: op and arch strings, args a list of strings"),
    ("artefact", _is_name, "a plain name"),
    ("files", _is_files, "an object: for each plain name its bytes and sha256"),
    ("build_ms", _is_time_or_missing, "a number, 0 or more"),
    ("built_unix_s", _is_time_or_missing, "seconds since 1970"),
)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

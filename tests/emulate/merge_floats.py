"""Numbers made wrong, and their division."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("merge_floats")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/floats.h",
        ("ties upwards", "- 1 + (size >> kDropped & 1);", ";"),
        ("ties downwards", "- 1 + (size >> kDropped & 1);", "- 1;"),
        ("cut off", "((size + half) >> kDropped)", "(size >> kDropped)"),
        ("another exponent", "u32(kLeastExponent + 126)", "u32(kLeastExponent + 127)"),
        ("nothing is subnormal", "? subnormal : normal", "? normal : normal"),
        ("all is subnormal", "? subnormal : normal", "? subnormal : subnormal"),
        ("half a subnormal", "- kMantissa + 23 + 127)", "- kMantissa + 22 + 127)"),
        ("nothing is too large", "result = size >= beyond ? overflow : result;", ""),
        ("largest is too large", "0x477ff000", "0x477fe000"),
        ("infinite later", "0x477ff000", "0x47804000"),
        ("448 later", "0x43e00000", "0x43f00000"),
        ("480 for 448", "0x43e00000, 0x7e,", "0x43e00000, 0x7f,"),
        ("infinity is no number", "return size > 0x7f800000 ?", "return size >= 0x7f800000 ?"),
        ("NaN is a number", "return size > 0x7f800000 ? nan : result;", "return result;"),
        ("NaN is infinite", "0x7c00, 0x7e00", "0x7c00, 0x7c00"),
        ("NaN is 448", "0x7e, 0x7f)", "0x7e, 0x7e)"),
        ("halves doubled", "(127u + 112)", "(127u + 113)"),
        ("infinity is 65,536", "size >= 0x7c00u << 13", "size > 0x7c00u << 13"),
        ("half without a sign", "u32(bits & 0x8000)", "u32(bits & 0)"),
        ("bfloat16 cut off", "(bits + 0x7fff + (bits >> 16 & 1)) >> 16", "bits >> 16"),
        ("ties of bfloat16 upwards", "0x7fff + (bits >> 16 & 1)", "0x8000"),
        ("ties of bfloat16 downwards", "0x7fff + (bits >> 16 & 1)", "0x7fff"),
        (
            "NaN rounded",
            "(bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded",
            "rounded",
        ),
        ("NaN cut off", "bits >> 16 | 0x40", "bits >> 16"),
        ("rounded to half without a sign", "size | (bits >> 16 & 0x8000)", "size"),
        ("rounded to a byte without a sign", "size | (bits >> 24 & 0x80)", "size"),
    ),
    *mutants_of(
        SWEEP,
        "ops/merge.h",
        ("factor rounded down", "/ value + 1)", "/ value)"),
        ("factor of 31 bits", "shift = 31 + log2", "shift = 30 + log2"),
        ("factor of 33 bits", "(u64(1) << log2) < value", "(u64(1) << log2) <= value"),
        ("product of 32 bits", "u64(n) * factor", "u64(n * factor)"),
    ),
]

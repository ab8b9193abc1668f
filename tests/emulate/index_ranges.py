"""Which indices are rows of a table, made wrong: as a call reads rows, and as pairs of them."""

from __future__ import annotations

from emulate import index, index_table
from emulate.mutant import mutants_of

CHANGES = (
    ("bound off by one", "row < u64(p.vocab_length)", "row <= u64(p.vocab_length)"),
    ("start of the range ignored", " - u64(p.vocab_start)", ""),
    ("start of the second range ignored", " - u64(p.added_start)", ""),
    ("second bound off by one", "added < u64(p.added_length)", "added <= u64(p.added_length)"),
    ("second range not behind the first", "p.added_row + i64(added)", "i64(added)"),
    ("second range only", "row < u64(p.vocab_length) ? i64(row) : other", "other"),
    (
        "padding read",
        "u64(index) - u64(p.vocab",
        "u64(index < 0 ? -1 - index : index) - u64(p.vocab",
    ),
    (
        "padding in the second range",
        "p.added_row + i64(added) : -1",
        "p.added_row + i64(added) : 0",
    ),
)
MUTANTS = [
    mutant
    for sweep in (index.SWEEP, index_table.SWEEP)
    for mutant in mutants_of(sweep, "ops/index.h", *CHANGES)
]

"""Ways to get the protocol of a ring wrong, one at a time, in what producers include."""

from __future__ import annotations

from slot_mutants import Mutant

HEADER = "include/jitkern/both/ring.h"
WORD = "    store(word(ticket), value);\n"
RELAXED = "__ATOMIC_RELAXED"

# Of ring_race.cc; those that x86 forgives, ThreadSanitizer does not.
OF_THE_PROTOCOL = (
    Mutant("stores are in no order", "value, __ATOMIC_RELEASE", f"value, {RELAXED}", HEADER),
    Mutant("loads are in no order", "(word, __ATOMIC_ACQUIRE)", f"(word, {RELAXED})", HEADER),
    Mutant(
        "the word is published before what it says",
        WORD,
        f"    __atomic_store_n(word(ticket), value, {RELAXED});\n",
        HEADER,
    ),
    Mutant(
        "a slot is completed before it is read",
        "store(done(ticket), header().generation(ticket));",
        f"__atomic_store_n(done(ticket), header().generation(ticket), {RELAXED});",
        HEADER,
    ),
    Mutant(
        "a slot is written while it is read",
        "return is_free(ticket) ? descriptors(ticket) : nullptr;",
        "return descriptors(ticket);",
        HEADER,
    ),
    Mutant(
        "a word of any generation will do",
        "    if (ring_generation(value) != header().generation(ticket)) return nullptr;\n",
        "    if (value == 0) return nullptr;\n",
        HEADER,
    ),
    Mutant(
        "generation and count are two stores",
        WORD,
        "    *reinterpret_cast<volatile unsigned short*>(word(ticket)) = 0;\n" + WORD,
        HEADER,
    ),
)

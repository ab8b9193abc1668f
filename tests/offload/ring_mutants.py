"""Ways to get a ring wrong, one at a time: in what producers include, and in the CPU's consumer."""

from __future__ import annotations

from slot_mutants import Mutant

HEADER = "include/jitkern/both/ring.h"
CONSUMER = "offload/ring.cc"

SEALED = "i < count; ++i) {\n      store(&written[i].first_seal"
FIRST_SEALED = "      store(&written[i].first_seal, value);\n"
SECOND_SEALED = "      store(&written[i].second_seal, value);\n"
FIRST_SEAL = "if (__atomic_load_n(&found[i].first_seal,"
SECOND_SEAL = "if (__atomic_load_n(&found[i].second_seal,"
WORD = "    store(word(ticket), value);\n"
RELAXED = "__ATOMIC_RELAXED"
NAMED = "static_cast<u64>(slot + taken) % header.num_slots"
NOT_THERE = "if (from == nullptr) return;\n        consumed"
TAKEN = "        consumed = generation;\n        ++taken;\n        if (slot < 0) ++next_;\n"
TAKE = "        take(sides, ticket, from, count);\n"
SRC, DST = "sides.src.row_bytes", "sides.dst.row_bytes"

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
        "a slot is free one push too early",
        "load(done(ticket)) + 1 >= header_",
        "load(done(ticket)) + 2 >= header_",
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

# Of the words that a test puts there by hand, and of bounds.
OF_THE_CONSUMER = (
    Mutant("seals are not looked at", "i < *count; ++i", "i < 0; ++i", HEADER),
    Mutant("any count will do", "if (*count > header()", "if (false && *count > header()", HEADER),
    Mutant("the first seal is not looked at", FIRST_SEAL, "if (false && " + FIRST_SEAL[4:], HEADER),
    Mutant(
        "the second seal is not looked at", SECOND_SEAL, "if (false && " + SECOND_SEAL[4:], HEADER
    ),
    Mutant("seals are not written", SEALED, SEALED.replace("< count", "< 0"), HEADER),
    Mutant("the first seal is not written", FIRST_SEALED, "", HEADER),
    Mutant("the second seal is not written", SECOND_SEALED, "", HEADER),
    Mutant("a producer that died is not noticed", "? 1 : 0)", "? 0 : 0)", HEADER),
    Mutant("one byte too many of src", f"{SRC}, ", f"{SRC} + 1, ", CONSUMER),
    Mutant("one byte too many of dst", f"{DST});", f"{DST} + 1);", CONSUMER),
    Mutant("one byte too few of src", f"{SRC}, ", f"{SRC} - 1, ", CONSUMER),
    Mutant("one byte too few of dst", f"{DST});", f"{DST} - 1);", CONSUMER),
    Mutant(
        "a slot that is refused is not completed",
        "consumer_.complete(ticket);  // so that the ring goes on",
        "",
        CONSUMER,
    ),
    Mutant("a push too many is taken", "taken < num_slots;)", "taken <= num_slots;)", CONSUMER),
    Mutant("a push is taken again", TAKEN, TAKEN.partition("\n")[2], CONSUMER),
    Mutant("a push that is refused is taken again", TAKEN + TAKE, TAKE + TAKEN, CONSUMER),
    Mutant(
        "a push that is not there is left out",
        NOT_THERE,
        NOT_THERE.replace("return;", "{\n          ++next_;\n          return;\n        }"),
        CONSUMER,
    ),
    Mutant(
        "slots behind one that is not there are looked at",
        NOT_THERE,
        NOT_THERE.replace("return;", "{\n          ++taken;\n          continue;\n        }"),
        CONSUMER,
    ),
    Mutant("a named slot is one turn", "if (slot < 0) ++next_;", "++next_;", CONSUMER),
    Mutant("a named slot is not skipped", "if (consumed < generation) {", "if (true) {", CONSUMER),
    Mutant(
        "what is skipped counts", "++next_;  // a call", "++next_, ++taken;  // a call", CONSUMER
    ),
    Mutant("of named slots the first one alone", NAMED, NAMED.replace(" + taken", ""), CONSUMER),
    Mutant(
        "named slots do not go around",
        NAMED,
        "std::min<u64>(slot + taken, header.num_slots - 1)",
        CONSUMER,
    ),
    Mutant(
        "a named slot is of the generation in turn",
        "ticket = consumed_[number] * header",
        "ticket = next_ / header.num_slots * header",
        CONSUMER,
    ),
    Mutant("a wrong value is pushed", "if (wrong != 0) refuse(", "if (false) refuse(", CONSUMER),
)

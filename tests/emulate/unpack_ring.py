"""The consumption of a ring by calls made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("unpack_ring", ("SWEEP_FEW",))  # which compile in less time
MUTANTS = [
    # Nobody sees that a piece is taken for a short one, or a short one for a long one: it is copied
    # all the same. What was there in front of the call is looked for again slot by slot, so that a
    # turn which is old is as good; but not what was taken of a slot.
    *mutants_of(
        SWEEP,
        "ops/ring.cuh",
        ("a slot too far", "Turn{generation + 1, 0} :", "Turn{generation + 1, 1} :"),
        ("one generation for ever", "Turn{generation + 1, 0} :", "Turn{generation, 0} :"),
        ("no next slot", ": Turn{generation, slot + 1};", ": Turn{generation, slot};"),
        ("turn not moved", "  p.state->slot = turn.slot;\n", ""),
        ("turn of the generation behind", "turn.generation - 1;", "turn.generation;"),
        ("owned for ever", "atomicExch(&p.state->owner, u64(0));", ""),
        ("owner not looked at", "if (owner != 0) return owner;", ""),
        ("consumed not looked at again", "load_fresh(&p.consumed[slot]) == consumed;", "true;"),
        ("found old, and kept", "  release_ring(p);\n  return p.call;", "  return p.call;"),
        ("found old, and taken", "  return p.call;", "  return 0;"),
        ("completion of another slot", "turn.slot * p.ring.done_bytes", "p.ring.done_bytes"),
        (
            "completion of another generation",
            "(done), turn.generation)",
            "(done), turn.generation + 1)",
        ),
        ("descriptors of another slot", "slots_at + number * p_.ring", "slots_at + 0 * p_.ring"),
        (
            "descriptors behind the slot",
            "whole && threadIdx.x / 4 < p_.ring.max_descriptors",
            "whole",
        ),
        ("a descriptor too many", "threadIdx.x / 4 < p_.ring", "threadIdx.x / 4 <= p_.ring"),
        ("any count", "ring_count(word) <= p_.ring.max_descriptors ? word : 0;", "word;"),
        (
            "count too large by one",
            "<= p_.ring.max_descriptors ?",
            "<= p_.ring.max_descriptors + 1 ?",
        ),
        ("count too small by one", "<= p_.ring.max_descriptors ?", "< p_.ring.max_descriptors ?"),
        ("a word that not all have", "alongside();\n    __syncthreads();", "alongside();"),
        ("seals of the first trip", "if (__syncthreads_or(old)) {", "if (false) {"),
        (
            "each thread its own seals",
            "if (__syncthreads_or(old)) return false;",
            "if (old) return false;",
        ),
        (
            "seals read again, not compared",
            "if (__syncthreads_or(old)) return false;",
            "__syncthreads();",
        ),
        ("seals of the next trips", "return !__syncthreads_or(wrong);", "return true;"),
        ("seals of the last trip", "wrong |= !is_sealed", "wrong = !is_sealed"),
        ("no next trip", "i < 4 * end; i += kThreads", "i < 4 * begin; i += kThreads"),
        ("one next trip", "i < 4 * end; i += kThreads", "i < 4 * end; i = 4 * end"),
        ("next trip too late", "begin = kAtOnce;", "begin = kAtOnce + 1;"),
        (
            "fewer in the first trip",
            "end < kAtOnce ? end : kAtOnce)",
            "end < kAtOnce ? end : kAtOnce - 1)",
        ),
        ("more in the first trip", "4 * (end < kAtOnce ? end : kAtOnce)", "4 * kAtOnce"),
        ("first seal", "return number % 2 == 0 ||", "return number % 4 != 3 ||"),
        ("second seal", "return number % 2 == 0 ||", "return number % 4 != 1 ||"),
        ("half a seal", "(u64(vector.w) << 32 | vector.z) == word", "vector.z == u32(word)"),
        (
            "the other half",
            "(u64(vector.w) << 32 | vector.z) == word",
            "vector.w == u32(word >> 32)",
        ),
    ),
    *mutants_of(
        SWEEP,
        "ops/unpack_ring.cu",
        (
            "each thread its own turn",
            "const Turn begin = own.begin;",
            "const Turn begin = turn_of(ring);",
        ),
        ("slot not asked for", "p.slot < 0 ? begin :", "true ? begin :"),
        ("turn not asked for", "p.slot < 0 ? begin :", "false ? begin :"),
        ("one push too many", "num_taken < p.most; ++looks", "num_taken <= p.most; ++looks"),
        ("one push alone", "num_taken < p.most; ++looks", "num_taken < 1; ++looks"),
        ("takes the ring twice", "if (looks == 0) own.owner", "if (looks <= 1) own.owner"),
        ("generation of the turn", "if (p.slot >= 0) turn.generation = consumed + 1;", ""),
        ("taken twice", "is_over = consumed >= turn.generation;", "is_over = false;"),
        ("taken one too early", "is_over = consumed >= turn", "is_over = consumed > turn"),
        (
            "busy, and goes on",
            "own.owner != 0 || (is_over && num_taken > 0)",
            "is_over && num_taken > 0",
        ),
        ("over what is over", "own.owner != 0 || (is_over && num_taken > 0)", "own.owner != 0"),
        ("any generation", "if (ring_generation(word) != turn.generation) break;", ""),
        (
            "no later generation",
            "ring_generation(word) != turn.gen",
            "ring_generation(word) < turn.gen",
        ),
        (
            "no older generation",
            "ring_generation(word) != turn.gen",
            "ring_generation(word) > turn.gen",
        ),
        (
            "generations of 32 bits",
            "ring_generation(word) != turn.generation",
            "u32(ring_generation(word)) != u32(turn.generation)",
        ),
        ("taken with wrong seals", "num_staged, has_long)) break;", "num_staged, has_long)) {}"),
        (
            "the last push is the first",
            "threadIdx.x == 0 && num_taken == 0) own",
            "threadIdx.x == 0) own",
        ),
        (
            "consumed not written",
            "if (threadIdx.x == 0) ring.consumed[turn.slot] = turn.generation;",
            "",
        ),
        (
            "descriptors over each other",
            "num_staged += ring_count(word);",
            "num_staged = ring_count(word);",
        ),
        ("completes nothing", "own.num_taken = num_taken;", "own.num_taken = 0;"),
        (
            "busy, and silent",
            "if (own.owner != 0) return report_fault",
            "if (false) return report_fault",
        ),
        (
            "turn of a call by slot",
            "if (p.slot < 0) set_turn(ring, turn);",
            "set_turn(ring, turn);",
        ),
        (
            "turn not advanced",
            "if (p.slot < 0) set_turn(ring, turn);",
            "if (p.slot < 0) set_turn(ring, begin);",
        ),
        ("no names", "if (number % 4 == 3) {", "if (false) {", 0, 2),
        ("name of a vector", "vector.x = number / 4;", "vector.x = number;", 0, 2),
        ("name without the slot", "vector.y = slot;", "vector.y = 0;"),
        (
            "nobody waits",
            "while ((own.value = load_control(&board->control)) == 0) continue;",
            "own.value = load_control(&board->control);",
        ),
        (
            "one thread waits",
            "    __syncthreads();\n    return own.value;",
            "    return own.value;",
        ),
        ("warps of one block", "threadIdx.x / 32 * gridDim.x + blockIdx.x", "threadIdx.x / 32"),
        ("warps of more blocks", "gridDim.x * kWarps);", "gridDim.x * kWarps * 2);"),
        (
            "arrives in front of its copies",
            "               gridDim.x * kWarps);\n    __syncthreads();",
            "               gridDim.x * kWarps);",
        ),
        (
            "does not arrive twice",
            "atomicAdd(&p.board->num_arrived, 1u);",
            "atomicAdd(&p.board->num_arrived, 2u);",
        ),
        (
            "completion in front of the copies",
            "while (load_control(&p.board->num_arrived) != gridDim.x - 1) continue;",
            "",
        ),
        ("waits for all but one", "!= gridDim.x - 1) continue;", "+ 2 < gridDim.x) continue;"),
        (
            "newest behind oldest",
            "if (p.slot >= 0) turn.generation = load",
            "if (false) turn.generation = load",
        ),
        ("one completion", "i < own.num_taken; ++i", "i < own.num_taken; i = own.num_taken"),
        ("board not cleared", "    *p.board = {};\n", ""),
        ("owned by who is gone", "if (own.owner == 0) release_ring(p.ring);", ""),
        ("another call's ring given back", "if (own.owner == 0) release_ring", "release_ring"),
        (
            "given back in front of completions",
            "Turn turn = own.first;",
            "release_ring(p.ring); Turn turn = own.first;",
        ),
    ),
    *mutants_of(
        SWEEP,
        "ops/ring.cuh",
        ("lengths of 31 descriptors", "i < count && is_long(", "i < count - 1 && is_long("),
        (
            "longs twice, by few",
            "if (has_long && is_long(here[1], count, warps)) continue;",
            "if (has_long) continue;",
        ),
        ("the first 32", "begin < count; begin += 32", "begin < 32; begin += 32"),
        ("every second 32", "begin < count; begin += 32", "begin < count; begin += 64"),
        ("the first long one", "found != 0; found &= found - 1", "found != 0; found = 0"),
        (
            "a long one's neighbour",
            "__ffs(static_cast<int>(found)) - 1)",
            "__ffs(static_cast<int>(found)))",
        ),
        ("every team's first", "i < count; i += team.of", "i < count; i = count"),
        (
            "position in the grid",
            "const i64 position = joined(vectors[3].x, vectors[3].y);",
            "const i64 position = joined(vectors[3].x, 0);",
        ),
        ("faults of none", "position, warp == 0 &&", "position, false &&"),
        (
            "shares of all",
            "work.num_segments(), warp, warps);",
            "work.num_segments(), warp, warps + 1);",
        ),
    ),
]

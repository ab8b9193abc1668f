"""The server of a ring made wrong."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

SWEEP = Sweep("serve_ring")
MUTANTS = [
    *mutants_of(
        SWEEP,
        "ops/ring.cuh",
        ("not read again", "if (threadIdx.x < vectors) first_ = load", "if (false) first_ = load"),
        (
            "chunk from the start",
            "i = 4 * begin + threadIdx.x; i < 4 * end",
            "i = threadIdx.x; i < 4 * end",
        ),
        ("first of each chunk", "if (begin == 0 && has_first_)", "if (has_first_)"),
    ),
    *mutants_of(
        SWEEP,
        "ops/unpack_ring.cu",
        ("busy, and serves", "own.ends = own.owner != 0;", "own.ends = false;"),
        ("busy, and silent", "if (own.ends) report_fault(p.fault, p.busy, 0, 0, 0);", ""),
        ("consumed of nobody", "load_fresh(&p.consumed[own.turn.slot])", "own.turn.generation - 1"),
        ("waits for what is over", ">= turn.generation) {", "> turn.generation) {"),
        ("cannot be stopped", "load_fresh(p.stop) != 0;", "false;"),
        ("stopped by an empty ring alone", "turn.generation && !own.is_told)", "turn.generation)"),
        ("never idle", "if (own.is_told || own.is_idle)", "if (own.is_told)"),
        ("idle at once", "nanoseconds() - since > p.idle_ns;", "nanoseconds() > p.idle_ns;"),
        (
            "any generation",
            "if (ring_generation(word) == turn.generation &&",
            "if (word != 0 &&",
        ),
        ("does not end", "if (own.is_told || own.is_idle) own.ends = true;", ""),
        ("name of a vector", "vector.x = number / 4;", "vector.x = number;", 1, 2),
        ("name in its chunk", "vector.x = number / 4;", "vector.x = number / 4 - begin;", 1, 2),
        ("name of another slot", "vector.y = own.slot;", "vector.y = 0;"),
        ("chunk over the others", "own.vectors[number - 4 * begin]", "own.vectors[number]"),
        ("broken, and served", "own.ends = true;\n    }\n  }", "}\n  }"),
        ("broken, and silent", "report_fault(p.ring.fault, p.ring.broken, own.slot, 0, 0);", ""),
        ("broken in another slot", "p.ring.broken, own.slot,", "p.ring.broken, own.slot + 1,"),
        ("copied though broken", "if (!ends) copy(p.unpack", "copy(p.unpack"),
        ("consumed not written", "p.consumed[turn.slot] = turn.generation;", ""),
        ("not completed", "complete_push(p, turn);", ""),
        ("gives back what it has not", "if (own.owner != 0) return;\n    set_turn", "set_turn"),
        ("turn not written", "set_turn(p, turn);", ""),
        ("owned for ever", "release_ring(p);", ""),
        (
            "completed at its end",
            "ends ? leave(p.ring, turn, own) :",
            "ends ? (complete(p.ring, turn), leave(p.ring, turn, own)) :",
        ),
        (
            "no next turn",
            "turn = turn.next(p.ring.ring.num_slots);\n    }\n  }\n\n private",
            "}\n  }\n\n private",
        ),
        ("first chunk alone", "while (begin < count && !ends);", "while (false);"),
        ("chunks too far apart", "begin += kChunk;", "begin += kChunk + 1;"),
        (
            "nobody waits for the chunk",
            "        cluster_sync();\n        ends = first.ends;",
            "        ends = first.ends;",
        ),
        (
            "completed in front of the copies",
            "        cluster_sync();\n      } while",
            "      } while",
        ),
        (
            "all blocks the same",
            "threadIdx.x / 32 * cluster_size() + cluster_rank();",
            "threadIdx.x / 32;",
        ),
        ("fewer in a chunk", "count - begin < kChunk ? count - begin : kChunk;", "kChunk;"),
        (
            "shared of this block",
            "const Shared& first = of_block(own, 0);",
            "const Shared& first = own;",
        ),
    ),
]

"""all_reduce over memory of other ranks made wrong, and which of its kernels are run."""

from __future__ import annotations

from emulate.mutant import mutants_of
from emulate.runner import Sweep

from jitkern.comm.peer_reduce import IN_FLIGHT, WAYS

F32, F16, BF16 = range(3)
ONE_SHOT, TWO_SHOT, _, MEET = range(4)
"""As in WAYS of jitkern.comm.peer_reduce."""


def _kernels(ranks: int, *accesses: tuple[int, int, int]) -> list[str]:
    return [
        f"Kernel<{dtype},{ranks},{access},{way},{in_flight}>"
        for way in range(len(WAYS))
        for dtype, access, in_flight in accesses
    ]


# dtype, bytes of an access, vectors in flight.
_FEW = [
    *_kernels(3, (F32, 4, 2)),
    f"Kernel<{F32},3,16,{TWO_SHOT},1>",
    f"Kernel<{BF16},3,2,{ONE_SHOT},1>",
]
_KERNELS = [
    *_kernels(2, (F32, 4, 1), (F32, 16, IN_FLIGHT[2]), (BF16, 2, IN_FLIGHT[2])),
    *_kernels(3, (F16, 2, IN_FLIGHT[3]), (BF16, 2, 1), (BF16, 8, IN_FLIGHT[3])),
    *_kernels(4, (F32, 4, IN_FLIGHT[4]), (F16, 2, 1)),
    *_kernels(8, (F16, 2, 1), (F16, 16, 1), (F32, 4, 1)),
]

DEFINES = (f"PEER_FEW={','.join(_FEW)}", f"PEER_KERNELS={','.join(_KERNELS)}")
SWEEP = Sweep("peer_reduce", ("SWEEP_FEW",))

FENCE = "if constexpr (kWay == kMeet) __threadfence_system();"
CLEAR = """      each(first, part_of, [&](int, int, u32 w, u32 i) {
        store_fresh(slots + w * p.slots.vecs + i,
                    make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten));
      });
"""
MUTANTS = [
    *mutants_of(
        SWEEP,
        "comm/peer_reduce.cu",
        ("does not wait for kernels", "wait_for_earlier_kernels<kUsePdl>();", ""),
        ("no fence", "      __threadfence_system();\n", ""),
        ("a barrier that is overtaken", f"{FENCE}  // what earlier kernels wrote, too", ""),
        ("a barrier that overtakes", f"{FENCE}  // of what later kernels read", ""),
        ("no barrier between epochs", "!__syncthreads_and(is_done)", "!is_done"),
        ("no epoch", "= epoch + chunks.num;", "= epoch;"),
        ("one epoch of several", "= epoch + chunks.num;", "= epoch + 1;"),
        (
            "counts before all have read",
            "        __syncthreads();  // all have read",
            "        // all have read",
        ),
        ("does not make unwritten", CLEAR, ""),
        (
            "makes unwritten what is not read",
            "      u64 since = 0;\n",
            f"{CLEAR}      u64 since = 0;\n",
        ),
        (
            "the first word alone",
            "for (int k = 0; k < 4; ++k) most",
            "for (int k = 0; k < 1; ++k) most",
        ),
        ("does not wait", "missing != 0; ++looks", "looks == 1; ++looks"),
        (
            "sent as it is",
            "as_sent(vectors[f][kToAll ? 0 : k]).vec",
            "vectors[f][kToAll ? 0 : k].vec",
        ),
        (
            "own value first",
            "if (w == p.rank) return own;",
            "if (w == 0) return own;",
        ),
        ("uses what is broken", "while (is_intact && first", "while (first"),
        (
            "does not break",
            "control->intact, kUnwritten, missing)",
            "control->intact, kUnwritten, kUnwritten)",
        ),
        ("blames at once", "nanoseconds() - now < p.grace_ns()", "false"),
        ("silent of its own", "report_fault(p.failure, p.site, blamed, p.number, p.rank);", ""),
        ("silent", "report_fault(p.fault, p.site, blamed, p.number, p.rank);", ""),
        (
            "whole behind the end",
            "return span.begin + i < p.num_whole_of(kWay, part);",
            "return true;",
        ),
        (
            "parts of one length",
            "(kWay != kTwoShot || span.begin + i < p.num_vecs_of(kWay, part))",
            "true",
        ),
        (
            "second stage of the same",
            "p.slots.at(1, epoch, blockIdx.x, 0)",
            "p.slots.at(0, epoch, blockIdx.x, 0)",
        ),
        (
            "parts from the front of each block",
            "return (span.begin + i) * kPeerVecBytes;",
            "return i64(i) * kPeerVecBytes;",
        ),
    ),
    *mutants_of(
        SWEEP,
        "comm/peer_reduce.h",
        ("one parity", "* 2 + epoch % 2)", "* 2)"),
        ("one slot of all writers", "(block * num_ranks + writer)", "(block * num_ranks)"),
        ("one slot of all blocks", "(block * num_ranks + writer)", "writer"),
        (
            "any value is sent",
            "return word < kUnwritten - 1 ? word : kUnwritten - 1;",
            "return word;",
        ),
        (
            "the waiting are blamed",
            "return (seen & ~given_up) != 0 ? seen & ~given_up : missing;",
            "return missing;",
        ),
    ),
]

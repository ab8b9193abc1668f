"""Which kernels the drivers of the merge and of the peers' sums run, as their C++ names them."""

from __future__ import annotations

from jitkern.comm.peer_reduce import IN_FLIGHT, WAYS
from jitkern.ops.merge import STATES_OF_THREAD, BlockShape

F32, F16, BF16, E4M3 = range(4)
"""As in _TYPES of jitkern.ops.merge."""
ONE_SHOT, TWO_SHOT = 0, 1
"""As in WAYS of jitkern.comm.peer_reduce."""

# dim, elements of a vector, types of the partials, the result and their lse, partials, plain.
_FEW_MERGES = (
    (3, 1, F32, F32, F16, 2, 0),
    (24, 4, F32, BF16, BF16, 16, 0),
    (40, 8, BF16, F32, F32, 4, 0),
    (8, 8, F16, E4M3, F32, 64, 0),
    (3, 1, F16, F16, F32, 2, 1),
    (300, 1, F32, F32, F32, 32, 1),  # in three steps
    (1102, 2, F16, F16, F32, 2, 1),  # in two, and a lane is left over
    (96, 8, F16, F16, F16, 8, 1),
)
_MERGES = (
    *_FEW_MERGES,
    (1, 1, F16, F16, F32, 2, 0), (3, 1, BF16, BF16, F32, 16, 1), (5, 1, F32, E4M3, F32, 8, 1),
    (8, 4, F32, F32, F32, 64, 0), (24, 2, F32, F16, F16, 8, 1), (40, 4, F16, F16, BF16, 32, 0),
    (70, 2, BF16, BF16, F32, 8, 0), (96, 4, BF16, F16, F32, 64, 1), (96, 8, BF16, E4M3, F32, 2, 1),
    (128, 8, BF16, BF16, F32, 2, 0), (128, 8, F16, F32, F32, 16, 1),
    (576, 8, BF16, BF16, F32, 8, 0), (576, 4, F32, F32, F32, 16, 1),
    (2100, 4, BF16, E4M3, BF16, 16, 0),
)  # fmt: skip


def _merge(
    dim: int, vec_elems: int, in_type: int, out_type: int, lse_type: int, capacity: int, plain: int
) -> str:
    teams = max(1, capacity // STATES_OF_THREAD)
    shape = BlockShape.of(dim // vec_elems, teams)
    num_threads = shape.row_threads * shape.rows * teams * shape.times
    numbers = (dim, vec_elems, in_type, out_type, lse_type, capacity, plain)
    return f"Kernel<{','.join(map(str, (*numbers, num_threads, *shape)))}>"


def _reductions(ranks: int, *accesses: tuple[int, int, int]) -> list[str]:
    """Of all ways; an access is a dtype, bytes, vectors in flight."""
    return [
        f"Kernel<{dtype},{ranks},{access},{way},{in_flight}>"
        for way in range(len(WAYS))
        for dtype, access, in_flight in accesses
    ]


_FEW_REDUCTIONS = [
    *_reductions(3, (F32, 4, 2)),
    f"Kernel<{F32},3,16,{TWO_SHOT},1>",
    f"Kernel<{BF16},3,2,{ONE_SHOT},1>",
]
_REDUCTIONS = [
    *_reductions(2, (F32, 4, 1), (F32, 16, IN_FLIGHT[2]), (BF16, 2, IN_FLIGHT[2])),
    *_reductions(3, (F16, 2, IN_FLIGHT[3]), (BF16, 2, 1), (BF16, 8, IN_FLIGHT[3])),
    *_reductions(4, (F32, 4, IN_FLIGHT[4]), (F16, 2, 1)),
    *_reductions(8, (F16, 2, 1), (F16, 16, 1), (F32, 4, 1)),
]

DEFINES = {
    "merge": (
        f"FEW_KERNELS={','.join(_merge(*one) for one in _FEW_MERGES)}",
        f"ALL_KERNELS={','.join(_merge(*one) for one in _MERGES)}",
    ),
    "peer_reduce": (
        f"FEW_KERNELS={','.join(_FEW_REDUCTIONS)}",
        f"ALL_KERNELS={','.join(_REDUCTIONS)}",
    ),
}
"""By driver, what it is compiled with."""

"""The kernel of ``merge_states``: what is compiled, and how it is launched."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own, record_hint
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import widest_vec_bytes

# FloatType of csrc/ops/floats.h, in its order.
_TYPES = ("f32", "f16", "bf16", "e4m3")
_F32, _F16, _BF16 = range(3)
CAPACITIES = (2, 4, 8, 16, 32, 64)
"""Partials that kernels are made for: of fewer the next larger."""
STATES_OF_THREAD = 8  # kStatesOfThread of csrc/ops/merge.h
# Threads of a block, as far as rows are whole: of one for few rows, and at most how many times as
# many where there are more rows; csrc/ops/merge.cc has the figures.
SMALL_THREADS = 128
MOST_TIMES = 4
MOST_THREADS = 512
# For so many threads an SM has registers, 64 or 80 each, of one team and of several.
THREADS_OF_SM = (1024, 768)


class BlockShape(NamedTuple):
    """How the threads of a block share rows.

    Attributes
    ----------
    row_threads
        Threads of a row, in each team.
    rows
        Rows of a small block.
    times
        How many small blocks a large one is.
    """

    row_threads: int
    rows: int
    times: int

    @classmethod
    def of(cls, num_vecs: int, num_teams: int) -> BlockShape:
        """Return the shape for rows of so many vectors: few lanes of a last warp are left over."""
        steps = -(-num_vecs * num_teams // MOST_THREADS)
        row_threads = -(-num_vecs // steps)
        one = row_threads * num_teams
        wanted = SMALL_THREADS if num_teams == 1 else MOST_THREADS // 2

        def cost(rows: int) -> tuple[float, int]:
            return (-one * rows % 32) / (one * rows), wanted - one * rows

        rows = min(range(1, max(1, wanted // one) + 1), key=cost)
        # Teams have their threads at fixed places.
        times = 1 if num_teams > 1 else max(1, min(MOST_TIMES, MOST_THREADS // (one * rows)))
        return cls(row_threads, rows, times)


@cache
def kernel(
    dim: int,
    vec_elems: int,
    in_type: int,
    out_type: int,
    lse_type: int,
    capacity: int,
    plain: int,
) -> DeviceModule:
    """Return the device module of one dim, vector, choice of types and number of partials.

    A plain one is for partials that all count and lie in one way, in which rows follow each other:
    without what the others need a kernel of two partials is 30 % shorter, and as fast as a copy.
    """
    num_teams = max(1, capacity // STATES_OF_THREAD)
    row_threads, rows, times = BlockShape.of(dim // vec_elems, num_teams)
    num_threads = row_threads * rows * num_teams * times
    occupancy = max(1, THREADS_OF_SM[num_teams > 1] // (-(-num_threads // 32) * 32))
    config = KernelConfig(num_threads=num_threads, max_occupancy=occupancy, use_pdl=True)
    args = make_cpp_args(
        dim, vec_elems, in_type, out_type, lse_type, capacity, bool(plain), *config, row_threads
    )
    types = [_TYPES[in_type]]
    types += [f"to_{_TYPES[out_type]}"] * (out_type != in_type)
    types += [f"lse_{_TYPES[lse_type]}"] * (lse_type != _F32)
    types += ["any_strides"] * (not plain)
    name = "_".join(["jitkern_merge", f"v{vec_elems}", f"d{dim}", f"n{capacity}", *types])
    wrappers = [(name, f"jitkern::Merge<{args}>")]
    module = load_own(
        "merge",
        *args,
        device_files=["ops/merge.cu"],
        device_wrappers=wrappers,
        sized_by="head_dim",
    )
    spec = (dim, vec_elems, in_type, out_type, lse_type, capacity, plain)
    if spec not in specialisations(dim):
        module.hint = record_hint  # a --head-dim gives the most common ones only
    return module.launched_with(config, in_flight=times, splits=rows)


def specialisations(head_dim: int) -> list[tuple[int, ...]]:
    """Return the template arguments of heads of this dim: the 16-bit types, of contiguous tensors.

    Of any number of partials, merged into their own type, with an fp32 lse; of two at any strides,
    too, such as those of an lse of [heads, tokens].
    """
    elems = widest_vec_bytes(2 * head_dim) // 2
    return [
        (head_dim, elems, of_type, of_type, _F32, *which)
        for of_type in (_BF16, _F16)
        for which in (*((capacity, 1) for capacity in CAPACITIES), (2, 0))
    ]


host.builds("merge", kernel)

"""Kernels made wrong, one line of source at a time; the sweep of the driver has to notice each.

One of each kind of fault per kernel: bound, offset, fence, order, epoch, tail, padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulate.runner import Sweep

# Vectors of 1, 4 and 8 bytes, both index types, rows for part of a warp and rows cut into splits.
_ROWS = ("SWEEP_ROWS=3,40,300,301",)
RACE = ("SWEEP_ROWS=24", "RACE=1")  # another thread writes the indices of the kernels
_FEW = ("SWEEP_FEW=1",)  # kernels, which compile in half the time
_DEFINES = {
    **dict.fromkeys(("store", "index", "pair_copy"), _ROWS),
    **dict.fromkeys(("formats", "merge", "peer_reduce", "residency"), _FEW),
}


@dataclass(frozen=True)
class Mutant:
    """``old`` in ``file`` becomes ``new``, at its occurrence number ``nth`` of ``of``."""

    driver: str
    file: str
    old: str
    new: str
    nth: int = 0
    of: int = 1
    is_race: bool = False

    @property
    def sweep(self) -> Sweep:
        return Sweep(self.driver, RACE if self.is_race else _DEFINES.get(self.driver, ()))

    def apply(self, csrc: Path) -> None:
        path = csrc / self.file
        parts = path.read_text().split(self.old)
        found = len(parts) - 1
        assert found == self.of, f"{self.file}: {found} of {self.old!r}, expected {self.of}"
        head = self.old.join(parts[: self.nth + 1])
        path.write_text(head + self.new + self.old.join(parts[self.nth + 1 :]))


def mutants_of(driver: str) -> list[Mutant]:
    own = [(file, changes) for (name, file), changes in _TABLE.items() if name == driver]
    races = [(file, change) for (name, file), change in _RACES.items() if name == driver]
    return [
        *(Mutant(driver, file, *change) for file, changes in own for change in changes),
        *(Mutant(driver, file, *change, is_race=True) for file, change in races),
    ]


# Driver, file below csrc; old and new text. What only takes longer is no mistake that is seen: two
# warps with the same work, a line that is read twice, a short piece that is taken for a long one.
_TABLE: dict[tuple[str, str], Sequence[tuple[Any, ...]]] = {
    ("copy_blocks", "ops/copy_blocks.cu"): (
        ("src_block < p.src.num_blocks;", "src_block <= p.src.num_blocks;"),
        ("if (src_block < 0 || dst_block < 0) return {};", ""),
        ("at < 0 ? -at : 0", "0"),
        ("left < kSegmentBytes ? left : kSegmentBytes", "kSegmentBytes"),
        ("kLinesOf == kHostTarget ? target", "kLinesOf != kHostTarget ? target"),
        ("const u32 fast = piece - slow * inner;", "const u32 fast = slow;"),
        ("count < i64(p.num_pairs) ? static_cast<u32>(count) : p.num_pairs", "u32(count)"),
        ("batch + num_warps : num_batches", "num_batches : num_batches"),
        ("if (layer == 0 && row == 0 && segment == 0) {", "if (layer == 1) {"),
        ("== num_warps - 1", "== num_warps - 2"),
        ("signals.num_past[num_told] = 0;", ""),
        ("__threadfence();  // orders this warp's stores before its count", ""),
        ("__threadfence_system();          // orders all warps' stores before the flag", ""),
        ("is_last ? num_segments : batch * kInFlight", "num_segments"),
        ("next >= (num_told + 1) * each", "next > num_told * each"),
        ("layer_first ? fast : slow;", "slow;"),
        ("static_cast<u32>(block) - whole * side.num_parts", "whole"),
        ("if (row_bytes == 0) row_bytes = entry->piece_bytes;", "row_bytes = 16;"),
        ("u64(row) * static_cast<u64>(side.row_stride)", "0"),
    ),
    ("formats", "ops/gather_rows.cu"): (
        ("slot >= 0 && slot < p.num_slots;", "slot >= 0 && slot <= p.num_slots;"),
        ("row < p.num_rows && row < count_of(p)", "row < p.num_rows"),
        ("if (place < kGroup) store_values", "store_values"),
        ("if (has_row && has_rest)", "if (inside && has_rest)"),
        ("rest_at < kRestBytes", "rest_at < kRestBytes + kElems"),
        ("lane == 0 && slot >= p.num_slots", "slot > p.num_slots"),
    ),
    ("formats", "ops/store_rows.cu"): (
        ("slot < 0 || slot >= p.num_slots || slot == p.skip", "slot < 0 || slot == p.skip"),
        ("|| slot == p.skip) return", ") return"),
        ("slot >= p.num_slots && slot != p.skip && lane == 0", "slot >= p.num_slots && lane == 0"),
        ("rest_at < kRestBytes", "rest_at < kRestBytes + kElems"),
        ("distance = kLanes.team / 2", "distance = kLanes.team / 4"),
        ("if (!kIsFull && place >= kGroup) continue;", "", 0, 2),
        ("if (!kIsFull && place >= kGroup) continue;", "", 1, 2),
        ("kRow.is_given() || member != 0", "kRow.is_given() || member != kLanes.team"),
        ("scale_strides.template offset_of<true>", "strides.template offset_of<true>"),
    ),
    ("index", "ops/index.cu"): (
        ("bool inside = row >= 0", "bool inside = row >= -1"),
        ("row < p.num_rows && group.offset(c)", "row < p.num_rows && 16 + group.offset(c)"),
        ("p.weights + (inside ?", "p.weights + (!inside ?"),
        ("source + place)", "source + group.offset(c))"),
        ("value[r][c] = Vec<kVecBytes>{};", "if (inside) value[r][c] = Vec<kVecBytes>{};"),
        ("if (index[r] <= p.last_index)", "if (index[r] < p.last_index)"),
    ),
    ("merge", "ops/merge.cu"): (
        ("is_row(row < to.num_rows)", "is_row(row <= to.num_rows)"),
        ("head = row - token * to.heads.value", "head = row"),
        ("if (is_copy) logs[1] = 0.0f;", ""),
        ("place.is_row ? p.to.num_states : 0", "place.is_row ? kCapacity : 0"),
        ("writes = place.is_row && vec < kVecs", "writes = vec < kVecs"),
        ("if (step == 0 && p.to.lse_is_in_place) __syncthreads();", ""),
        ("largest == -float_of_bits(0x7f800000) ? 0.0f :", ""),
        ("(log - center) * log2_of_base", "log - center"),
        ("if (shares[s] == 0.0f) continue;", ""),
        ("values[i] = sum == 0.0f ? 0.0f : -0.0f;", "values[i] = 0.0f;"),
        ("weight.sum == 1.0f ? weight.log : sum_log", "sum_log"),
        ("inverse_of(scale)", "scale"),
    ),
    ("merge", "ops/floats.cuh"): (("bits_as<kType>(values[1])", "bits_as<kType>(values[0])"),),
    ("merge", "ops/cache_strides.h"): (
        ("/ value + 1)", "/ value)"),
        ("u64(n) * factor", "u64(n * factor)"),
    ),
    ("pair_copy", "ops/pairs.cuh"): (
        ("src_row < p.num_src_rows &&", "src_row <= p.num_src_rows &&"),
        ("!is_padding() && src_row", "src_row"),
        ("offset >= 0 && offset < kRowBytes", "offset < kRowBytes"),
        ("dst_row * p.dst_stride_bytes", "dst_row * p.src_stride_bytes"),
        ("own.dst_row, from", "own.dst_row, 0"),
        ("inside[r] = left != 0;", "inside[r] = true;"),
        ("*p.last_pair + 1u", "*p.last_pair"),
        ("p.num_dst_rows);\n      return;", "p.num_dst_rows);"),
        ("batch + gridDim.x * (blockDim.x / 32)", "num_batches"),
    ),
    ("pair_lists", "ops/sort.cuh"): (
        ("__syncthreads();", "", 2, 4),
        ("block_counts[threadIdx.x]) + 1u;", "block_counts[threadIdx.x]);"),
        ("[2 * i64(owner)] == src_row) return owner;", "[0] < 0) return owner;"),
        ("pairs[2 * i64(owner) + 1]", "pairs[2 * i64(owner)]"),
        ("(place + 1) & p.table_mask", "place + 1"),
        ("kHostSide == kHostSource ?", "kHostSide != kHostSource ?"),
        ("if (rank == kNotListed) return;", ""),
        ("for (int w = 0; w < warp; ++w) start += warp_sums[w];", ""),
    ),
    ("peer_reduce", "comm/peer_reduce.cu"): (
        ("wait_for_earlier_kernels<kUsePdl>();", ""),
        ("      __threadfence_system();\n", ""),
        ("__threadfence_system();  // also covers", "{}  // also covers"),
        ("!__syncthreads_and(is_done)", "!is_done"),
        ("= epoch + chunks.num;", "= epoch;"),
        ("        __syncthreads();  // all have read", "        // all have read"),
        ("store_fresh(slots + w", "if (false) store_fresh(slots + w"),
        ("missing != 0; ++looks", "looks == 1; ++looks"),
        ("as_sent(vectors[f][kToAll ? 0 : k]).vec", "vectors[f][kToAll ? 0 : k].vec"),
        ("if (w == p.rank) return own;", "if (w == 0) return own;"),
        ("while (is_intact && first", "while (first"),
        ("control->intact, kUnwritten, missing)", "control->intact, kUnwritten, kUnwritten)"),
        ("nanoseconds() - now < p.grace_ns()", "false"),
        ("report_fault(p.fault, p.site, blamed, p.number, p.rank);", ""),
        ("(kWay != kTwoShot || span.begin + i < p.num_vecs_of(kWay, part))", "true"),
    ),
    ("peer_reduce", "comm/peer_reduce.h"): (("* 2 + epoch % 2)", "* 2)"),),
    ("residency", "offload/residency.cu"): (
        ("row < s.num_rows ? slot_of_row[row]", "row <= s.num_rows ? slot_of_row[row]"),
        ("step < kRowsAhead ? slots[step] :", "step < 1 ? slots[step] : step < kRowsAhead ? -1 :"),
        ("atomicMin(&shared.firsts[cell], at);", "shared.firsts[cell] = at;"),
        ("shared.used[i] = 0;", ";"),
        ("!__syncthreads_or(is_twice || wrong_at >= 0)", "!is_twice && wrong_at < 0"),
        ("&& shared.firsts[kInCell - found] == at", ""),
        ("cluster.wait();  // all blocks have started", ""),
        ("cluster.wait();  // until then other blocks write to the memory of this one", ""),
        ("__syncthreads();  // the cluster's barrier does not order what follows arrive()", ""),
        ("threadIdx.x)[cluster.rank]", "threadIdx.x)[0]"),
        ("__syncthreads();  // the totals of warps have been read", ""),
        ("num_found + below.front", "below.front"),
        ("num_found += more.front;", "num_found += kThreads;"),
        ("if (__syncthreads_or(is_wrong)) {", "if (is_wrong) {"),
        ("    cluster.wait();\n    const i32 of_block", "    const i32 of_block"),
        ("is_before ? of_block : 0", "0"),
        ("num_missed > num_stale)", "num_missed > num_stale + 1)"),
        ("order.steps > kSlotsAhead", "order.steps >= kSlotsAhead"),
        ("num_stale - num_missed + rank\n", "rank\n"),
        (": num_stale + at - rank", ": at"),
        ("if (u32(old_row) < u32(s.num_rows)) slot_of_row[old_row] = -1;", ""),
        ("    if (is_long) {\n      cluster.sync();", "    if (is_long) {"),
        ("if (list >= count || state < 0)", "if (state < 0)"),
        ("cell + 1 == p.table_size ? 0 : cell + 1", "cell + 1"),
        ("key == kNoRow || key == row", "key == kNoRow"),
        ("&& victim < num_missed) shared", ") shared"),
        ("found == kPadding ? -1 : state", "state"),
        ("(shared.used[slot / 32] >> slot % 32 & 1) == 0", "true"),
        ("totals.asked - misses", "totals.asked"),
        ("host_page >= 0 && host_page <", "host_page <"),
        ("is_wrong |= host_row < 0;", ""),
        ("+ row - page * page_rows;", ";"),
    ),
    ("residency", "offload/residency.cuh"): (
        ("((1u << threadIdx.x % 32) - 1u)", "((2u << threadIdx.x % 32) - 1u)"),
        ("first_row_ + slot) + own_.at", "first_row_ + slot)"),
        ("at < 0 ? -at : 0", "0"),
        ("left < kSegmentBytes ? left : kSegmentBytes", "kSegmentBytes"),
        ("kWarpLanes * cluster.size + cluster.rank", "kWarpLanes * cluster.size"),
        ("shared_.host_rows[row - layer * num_missed_]", "shared_.host_rows[row]"),
        ("row / parts * entry.block_bytes", "row * entry.block_bytes"),
    ),
    ("store", "ops/store.cu"): (
        ("slot[r] < p.num_slots &&", "slot[r] <= p.num_slots &&"),
        ("slot[r] >= 0 && slot[r] <", "slot[r] <"),
        ("if (inside && group.offset(c) <", "if (inside && kVecBytes + group.offset(c) <"),
        ("= copy.rows + row", "= p.copies[1 - blockIdx.y].rows + row"),
        ("copy_rows<kFirstRowBytes>(p", "copy_rows<kRowBytes>(p"),
        ("p.copies[1], p.first_blocks", "p.copies[1], 0"),
        ("fault |= slot[r] >= p.num_slots && slot[r] != p.skip;", ""),
        ("slot[r] < p.num_slots && slot[r] != p.skip;", "slot[r] < p.num_slots;"),
    ),
    ("store", "ops/cache_strides.h"): (
        ("block * page.value) * slot_stride", "block) * slot_stride"),
        ("return block * block_stride +", "return block * slot_stride +"),
        ("at / kHead * head_stride", "0"),
    ),
    ("store", "include/jitkern/copy.cuh"): (
        ("group % kShape.splits", "group * 0"),
        ("seen->state != 0 || atomicCAS(&record->state, 0u, 1u) != 0u", "false"),
        ("seen->state = 2;", ""),
    ),
}

# Kernels that trust an index which another thread may have written since it was checked.
_RACES: dict[tuple[str, str], tuple[str, str]] = {
    ("store", "ops/store.cu"): (
        "offset_of<kPaged>(slot[r])",
        "offset_of<kPaged>(i64(indices[group.first_row + r]))",
    ),
    ("pair_lists", "ops/sort.cuh"): (
        "if (owner == number) return {kFetch, src_row, dst_row};",
        "if (owner == number)"
        " return {kFetch, *static_cast<const volatile Int*>(pairs + 2 * number), dst_row};",
    ),
}

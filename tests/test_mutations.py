"""The sweeps of test_kernels_on_cpu.py, held to kernels that are wrong: they see each mistake."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from emulate.runner import CSRC, Runner, Sweep, compiler

# Vectors of 1, 4 and 8 bytes, both index types, rows for part of a warp and rows cut into splits.
ROWS = ("SWEEP_ROWS=3,40,300,301",)
STORE = Sweep("store", ROWS)
INDEX = Sweep("index", ROWS)
PAIR_COPY = Sweep("pair_copy", ROWS)
H2D_GATHER = Sweep("h2d_gather")

ALL_CHUNKS = "for (int c = 0; c < Rows::kChunks; ++c) {"


@dataclass(frozen=True)
class Mutant:
    """``old`` in ``file`` becomes ``new``, at its occurrence number ``nth`` of ``of``."""

    mistake: str
    sweep: Sweep
    file: str
    old: str
    new: str
    nth: int = 0
    of: int = 1

    def apply(self, csrc: Path) -> None:
        path = csrc / self.file
        parts = path.read_text().split(self.old)
        found = len(parts) - 1
        assert found == self.of, f"{self.file}: {found} of {self.old!r}, expected {self.of}"
        head = self.old.join(parts[: self.nth + 1])
        path.write_text(head + self.new + self.old.join(parts[self.nth + 1 :]))


def mutants_of(sweep: Sweep, file: str, *changes: tuple[str | int, ...]) -> Iterable[Mutant]:
    for mistake, old, new, *occurrence in changes:
        yield Mutant(str(mistake), sweep, file, str(old), str(new), *map(int, occurrence))


MUTANTS = [
    *mutants_of(
        STORE,
        "ops/store.cu",
        ("bound off by one", "slot[r] < p.num_slots;", "slot[r] <= p.num_slots;"),
        ("padding written", "slot[r] >= 0 && slot[r] <", "slot[r] <"),
        ("row behind the last", "row < p.num_rows && group", "row <= p.num_rows && group"),
        (
            "missing tail",
            "if (inside && group.offset(c) <",
            "if (inside && kVecBytes + group.offset(c) <",
        ),
        ("end of row ignored", "inside && group.offset(c) < kRowBytes", "inside"),
        ("wrong stride", "slot[r] * copy.cache_stride_bytes", "slot[r] * copy.row_stride_bytes"),
        ("K and V swapped", "= copy.rows + row", "= p.copies[1 - blockIdx.y].rows + row"),
        ("V forgotten", "p.copies[blockIdx.y]", "p.copies[0]"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x % 32 == 31) continue;", 1, 2),
        ("wrong position", "group.first_row + r, slot[r]", "group.first_row, slot[r]"),
        ("fault forgotten", "fault |= slot[r] >= p.num_slots;", ""),
    ),
    *mutants_of(
        INDEX,
        "ops/index.cu",
        ("bound off by one", "row < u64(p.vocab_length)", "row <= u64(p.vocab_length)"),
        ("padding read", "u64(index[r]) - u64(p", "u64(index[r] < 0 ? 0 : index[r]) - u64(p"),
        ("row behind the last", "row < p.num_rows ? i64", "row <= p.num_rows ? i64"),
        (
            "missing tail",
            "row < p.num_rows && group.offset(c)",
            "row < p.num_rows && kVecBytes + group.offset(c)",
        ),
        ("wrong stride", "i64(row) * p.weights_stride_bytes", "i64(row) * p.output_stride_bytes"),
        ("start of the range ignored", " - u64(p.vocab_start)", ""),
        (
            "not zeroed",
            "value[r][c] = Vec<kVecBytes>{};",
            "if (inside) value[r][c] = Vec<kVecBytes>{};",
        ),
        ("rows swapped", "char* target = p.output + row", "char* target = p.output + (row ^ 1)"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x == 7) continue;", 1, 2),
        ("fault for the last row", "if (index[r] < p.bound)", "if (index[r] < p.bound - 1)"),
    ),
    *mutants_of(
        PAIR_COPY,
        "ops/pairs.cuh",
        ("source bound off by one", "src_row < p.num_src_rows &&", "src_row <= p.num_src_rows &&"),
        ("target bound off by one", "dst_row < p.num_dst_rows;", "dst_row <= p.num_dst_rows;"),
        ("padding copied", "!is_padding() && src_row", "src_row"),
        ("neighbour copied", "offset >= 0 && offset < kRowBytes", "offset < kRowBytes", 1, 2),
        ("neighbour read", "offset >= 0 && offset < kRowBytes", "offset < kRowBytes", 0, 2),
        ("missing tail", "offset < kRowBytes", "offset + kVecBytes < kRowBytes", 1, 2),
        ("wrong stride", "pair.dst_row * p.dst_stride_bytes", "pair.dst_row * p.src_stride_bytes"),
        ("swapped pair", "return {pair[0], pair[1]};", "return {pair[1], pair[0]};"),
        ("skipped lane", ALL_CHUNKS, ALL_CHUNKS + " if (threadIdx.x == 31) continue;", 1, 2),
        ("one round only", "batch + gridDim.x * (blockDim.x / 32)", "num_batches"),
        (
            "batch lost",
            "atomicAdd(p.last_batch, 1u) + 1u",
            "atomicAdd(p.last_batch, 1u) + 2u",
        ),
        ("count off by one", "*p.last_pair + 1u", "*p.last_pair"),
        (
            "slot map of a fault",
            "p.num_src_rows : p.num_dst_rows);\n      return;",
            "p.num_src_rows : p.num_dst_rows);",
        ),
        ("slot map of nobody", "if (row < 0) return;", ""),
    ),
    *mutants_of(
        H2D_GATHER,
        "ops/h2d_gather.cu",
        ("barrier forgotten", "__syncthreads();", "", 1, 3),
        ("lists overlap", "place += block_starts[found.list];", ""),
        ("first place lost", "block_counts[threadIdx.x]) + 1u;", "block_counts[threadIdx.x]);"),
        ("fetched twice", "if (pairs[2 * i64(owner)] == src_row) return owner;", ""),
        ("copied from another row", "pairs[2 * i64(owner) + 1]", "pairs[2 * i64(owner)]"),
        ("known row ignored", "if (slot >= 0) return", "if (slot > 0) return"),
        ("slot bound off by one", "slot >= p.num_dst_rows", "slot > p.num_dst_rows"),
        ("search behind the table", "(place + 1) & p.table_mask", "place + 1"),
    ),
    *mutants_of(
        STORE,
        "include/jitkern/copy.cuh",
        ("split forgotten", "group % kShape.splits", "group * 0"),
        ("rows overlap", "kShape.splits * kRows", "kShape.splits"),
        ("chunks overlap", "chunk * (kShape.lanes * kVecBytes)", "chunk * kVecBytes"),
    ),
    *mutants_of(
        STORE,
        "include/jitkern/fault.cuh",
        (
            "first fault overwritten",
            "seen->state != 0 || atomicCAS(&record->state, 0u, 1u) != 0u",
            "false",
        ),
        ("never complete", "seen->state = 2;", ""),
        ("no bound", "seen->bound = bound;", ""),
    ),
]


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Path:
    try:
        compiler()
    except RuntimeError as error:
        pytest.skip(str(error))
    return Path(request.config.cache.mkdir("kernels_on_cpu"))


@pytest.mark.parametrize("sweep", [STORE, INDEX, PAIR_COPY, H2D_GATHER], ids=str)
def test_right_kernels_pass(store: Path, sweep: Sweep) -> None:
    done = Runner(store).run(sweep)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.mistake}"
)
def test_mutant_is_caught(store: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    mutant.apply(csrc)
    runner = Runner(store, csrc)
    done = runner.run(mutant.sweep)
    runner.build(mutant.sweep).unlink()
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    # Noticed by a check, not by a crash of something else.
    noticed = ("FAILED:", "AddressSanitizer", "runtime error:", "emulate:")
    assert any(text in done.stderr for text in noticed), done.stderr

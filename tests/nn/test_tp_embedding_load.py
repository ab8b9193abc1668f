"""TPEmbedding's rows: out of whole tables and out of parts, and no others are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from embedding_ranks import SilentComm, whole_of
from ref import same_bits
from torch import Tensor

from jitkern.nn import TPEmbedding

VOCAB, ADDED, HIDDEN = 11, 3, 5
FULL = (VOCAB + ADDED, HIDDEN)


class Slice:
    """As ``safe_open(...).get_slice(name)`` returns it; notes what is read."""

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.read: list[tuple[int, int]] = []

    def get_shape(self) -> list[int]:
        return list(self.table.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        start, stop, step = rows.indices(len(self.table))
        assert step == 1 and start < stop
        self.read.append((start, stop - start))
        return self.table[rows].clone()


def ranks_of(size: int, **options: Any) -> list[TPEmbedding]:
    given = {"num_added": ADDED, **options}
    return [TPEmbedding(VOCAB, HIDDEN, comm=SilentComm(r, size), **given) for r in range(size)]


def table_of(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(FULL).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 20])
def test_only_the_rows_of_a_rank_are_read(size: int) -> None:
    table = table_of()
    modules, read = ranks_of(size), []
    for module in modules:
        source = Slice(table)
        module.load_full(source)
        ranges = [module.vocab_range, module.added_range]
        assert source.read == [one for one in ranges if one[1] > 0]
        read += source.read
    assert torch.equal(whole_of([module.weight for module in modules], modules), table)
    rows = [row for start, length in read for row in range(start, start + length)]
    assert sorted(rows) == list(range(VOCAB + ADDED))  # each by one rank


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8])
def test_other_dtypes_and_devices(device: torch.device, dtype: torch.dtype) -> None:
    table = table_of(dtype)
    modules = ranks_of(3, device=device)
    for module in modules:
        module.load_full(table)
    whole = whole_of([module.weight for module in modules], modules)
    assert whole.device.type == device.type
    assert same_bits(whole.detach(), table.float())


def test_a_tensor_that_is_mapped_from_a_file(tmp_path: Path) -> None:
    table = table_of(torch.bfloat16)
    torch.save({"embed": table}, tmp_path / "weights.pt")
    mapped = torch.load(tmp_path / "weights.pt", mmap=True)["embed"]
    modules = ranks_of(2, dtype=torch.bfloat16)
    for module in modules:
        module.load_full(mapped)
    assert torch.equal(whole_of([module.weight for module in modules], modules), table)


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    table = table_of()
    # By hand: its save_file() wants numpy.
    values = struct.pack(f"<{table.numel()}f", *table.flatten().tolist())
    entry = {"dtype": "F32", "shape": [*FULL], "data_offsets": [0, len(values)]}
    header = json.dumps({"embed": entry}).encode()
    path = tmp_path / "one.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values)
    modules = ranks_of(20)  # of which some have no rows
    with safetensors.safe_open(path, framework="pt") as file:
        for module in modules:
            module.load_full(file.get_slice("embed"))
    assert torch.equal(whole_of([module.weight for module in modules], modules), table)


class ShortSlice(Slice):
    def __getitem__(self, rows: slice) -> Tensor:
        return super().__getitem__(rows)[1:]


class Lists(Slice):
    def __getitem__(self, rows: slice) -> Any:
        return super().__getitem__(rows).tolist()


WRONG: list[tuple[Any, type[Exception], str]] = [
    (torch.zeros(VOCAB, HIDDEN), ValueError, f"shape [{VOCAB}, {HIDDEN}], expected {[*FULL]}"),
    (torch.zeros(7, HIDDEN), ValueError, f"shape [7, {HIDDEN}], expected {[*FULL]}"),
    (torch.zeros(14, 6), ValueError, f"shape [14, 6], expected {[*FULL]}"),
    (torch.zeros(14 * HIDDEN), ValueError, f"shape [70], expected {[*FULL]}"),
    (Slice(torch.zeros(13, HIDDEN)), ValueError, f"shape [13, {HIDDEN}], expected {[*FULL]}"),
    (ShortSlice(torch.zeros(FULL)), ValueError,
     "a slice of 6 rows has shape [5, 5], expected [6, 5]"),
    (Lists(torch.zeros(FULL)), TypeError, "slices are list, expected tensors"),
    ([[0.0] * HIDDEN] * 14, TypeError, "list, expected a tensor"),
    (None, TypeError, "None, expected a tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("weight", "kind", "text"), WRONG, ids=lambda value: type(value).__name__)
def test_wrong_tables(weight: Any, kind: type[Exception], text: str) -> None:
    module = ranks_of(2)[0]
    before = module.weight.detach().clone()
    with pytest.raises(kind) as caught:
        module.load_full(weight)
    assert str(caught.value) == f"TPEmbedding: weight: {text}"
    assert torch.equal(module.weight, before)


# -- state dicts -----------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, embed: torch.nn.Module) -> None:
        super().__init__()
        self.embed = embed
        self.norm = torch.nn.LayerNorm(HIDDEN)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts(size: int, assign: bool) -> None:
    """Of a model that is not split, and of ranks, which keep what is theirs."""
    whole = Model(torch.nn.Embedding(*FULL)).state_dict()
    models = [Model(module) for module in ranks_of(size)]
    for model in models:
        keys = model.load_state_dict(whole, assign=assign)
        assert not keys.missing_keys and not keys.unexpected_keys
    assert whole["embed.weight"].shape == FULL  # what was given is as it was
    modules: list[Any] = [model.embed for model in models]
    parts = [model.state_dict()["embed.weight"] for model in models]
    assert all(
        part.shape == module.weight.shape for part, module in zip(parts, modules, strict=True)
    )
    assert torch.equal(whole_of(parts, modules), whole["embed.weight"])
    fresh = [Model(module) for module in ranks_of(size)]
    for new, old in zip(fresh, models, strict=True):
        new.load_state_dict(old.state_dict(), assign=assign)
        assert torch.equal(new.embed.weight, old.embed.weight)  # type: ignore[arg-type]


def test_one_row_for_two_ranks() -> None:
    """Where a part has the shape of the whole, which of them it is makes no difference."""
    for rank in (0, 1):
        module = TPEmbedding(1, 2, comm=SilentComm(rank))
        module.load_state_dict({"weight": torch.tensor([[1.0, 2.0]])})
        rows = module(torch.tensor([0, -1])).tolist()
        assert rows == [[1.0, 2.0] if rank == 0 else [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("strict", [False, True])
def test_a_state_dict_of_another_shape(strict: bool) -> None:
    model = Model(ranks_of(4)[1])
    before = model.state_dict()["embed.weight"].clone()
    wrong = {**model.state_dict(), "embed.weight": torch.zeros(6, HIDDEN)}
    text = (
        r"TPEmbedding: embed\.weight: shape \[6, 5\], expected \[14, 5\], the whole table, or "
        r"\[4, 5\], the rows of rank 1$"
    )
    with pytest.raises(RuntimeError, match=text):
        model.load_state_dict(wrong, strict=strict)
    assert torch.equal(model.state_dict()["embed.weight"], before)


def test_a_state_dict_without_it() -> None:
    model = Model(ranks_of(2)[1])
    keys = model.load_state_dict({"norm.bias": torch.ones(HIDDEN)}, strict=False)
    assert keys.missing_keys == ["embed.weight", "norm.weight"]

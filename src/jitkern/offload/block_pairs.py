"""Numbers of blocks and slots, checked, as the pairs that ``copy_blocks`` takes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from jitkern.host import module as host

if TYPE_CHECKING:
    import torch


class Numbers(NamedTuple):
    """An argument: its name, what came, and how many blocks there are."""

    name: str
    values: Any
    bound: int


def single(call: str, number: Numbers) -> int:
    """Return one number. A tensor is refused: one on a GPU would be waited for.

    Raises
    ------
    TypeError, IndexError
        No int; none of the blocks.
    """
    name, value, bound = number
    if isinstance(value, bool) or hasattr(value, "untyped_storage"):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected an int")
    try:
        found = index(value)
    except TypeError:
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected an int") from None
    if not 0 <= found < bound:
        raise IndexError(f"{call}: {name}: {found}, expected 0 to {bound - 1}")
    return found


def pair(source: int, target: int) -> torch.Tensor:
    """Return the pair of two numbers."""
    import torch

    return torch.frombuffer(array("q", (source, target)), dtype=torch.int64).view(1, 2)


def run_of(source: int, target: int, count: int) -> torch.Tensor:
    """Return pairs of numbers that follow each other on both sides."""
    import torch

    begins = torch.tensor([source, target], device="cpu")  # whatever torch's default device
    return torch.arange(count, device="cpu").unsqueeze(1) + begins


def pairs_of(
    call: str, sources: Numbers, targets: Numbers, device: torch.device
) -> torch.Tensor | None:
    """Return pairs of numbers, None if there are none.

    Those on the host are checked; of those on the GPU nobody looks at more than their shape, and a
    kernel is queued that makes the pairs.

    Raises
    ------
    TypeError, ValueError, IndexError
        What is no sequence of ints; lists of different lengths, a number that comes twice; a number
        that is none of the blocks; one of two on the GPU, or on another GPU.
    """
    import torch

    for side, other in ((sources, targets), (targets, sources)):
        if isinstance(side.values, torch.Tensor) and side.values.is_cuda:
            _check_tensor(call, side, device)
            _check_tensor(call, other, device)
            _check_lengths(call, sources, len(sources.values), targets, len(targets.values))
            return torch.stack((sources.values, targets.values), 1) if len(side.values) else None
    first, second = _numbers(call, sources), _numbers(call, targets)
    count = len(first)
    _check_lengths(call, sources, count, targets, len(second))
    if count == 0:
        return None
    both = array("q", bytes(16 * count))
    addresses = map(_address, (both, first, second))
    if not _make_block_pairs()(*addresses, count, sources.bound, targets.bound):
        # What was copied: another thread may have changed the caller's since.
        _refuse(call, sources, both[0::2].tolist())
        _refuse(call, targets, both[1::2].tolist())
    return torch.frombuffer(both, dtype=torch.int64).view(-1, 2)


@cache
def _make_block_pairs() -> Callable[..., bool]:
    """Return what checks and pairs numbers: by sets and slices 128 took 23 us, by this 13."""
    return host.module()["make_block_pairs"]


def places_for(call: str, numbers: Numbers, num_places: int) -> range | torch.Tensor:
    """Return 0, 1, ... for all numbers, where they are.

    Raises
    ------
    TypeError, ValueError
        What is no sequence of ints; more numbers than places.
    """
    import torch

    values = numbers.values
    if isinstance(values, torch.Tensor):
        _check_tensor(call, numbers, values.device)
    count = 1 if _is_single(values) else len(values)
    if count > num_places:
        text = f"{count} numbers, expected at most {num_places}, the blocks of tensor"
        raise ValueError(f"{call}: {numbers.name}: {text}")
    if isinstance(values, torch.Tensor) and values.is_cuda:
        return torch.arange(count, device=values.device)
    return range(count)


def _numbers(call: str, argument: Numbers) -> array[int] | torch.Tensor:
    """Return int64 numbers that lie one behind the other on the host."""
    import torch

    name, values, _ = argument
    if isinstance(values, torch.Tensor):
        _check_tensor(call, argument, torch.device("cpu"))
        return values.long().contiguous()
    if _is_single(values):
        values = [values]
    expected = "an int, a sequence of ints or a tensor"
    if isinstance(values, str | bytes | bytearray):
        raise TypeError(f"{call}: {name}: {type(values).__name__}, expected {expected}")
    kinds = {int} if isinstance(values, range) else set(map(type, values))
    try:
        if bool in kinds:  # a mask, it seems
            raise TypeError
        return array("q", values if kinds <= {int} else map(index, values))
    except TypeError:
        found = ", ".join(sorted(kind.__name__ for kind in kinds if kind is not int))
        raise TypeError(f"{call}: {name}: {found}, expected {expected}") from None
    except OverflowError:
        _refuse(call, argument, list(map(index, values)))
        raise


def _is_single(values: Any) -> bool:
    """Tell whether it is no sequence, no array and no tensor; NumPy's ints are none."""
    return not isinstance(values, Sequence) and getattr(values, "ndim", 0) == 0


def _address(numbers: array[int] | torch.Tensor) -> int:
    return numbers.buffer_info()[0] if isinstance(numbers, array) else numbers.data_ptr()


def _check_tensor(call: str, argument: Numbers, device: torch.device) -> None:
    import torch

    name, values, _ = argument
    where = values.device if isinstance(values, torch.Tensor) else "numbers on the host"
    if where != device:
        raise ValueError(f"{call}: {name}: {where}, expected a tensor on {device}")
    if values.dtype not in (torch.int32, torch.int64):
        came = str(values.dtype).removeprefix("torch.")
        raise TypeError(f"{call}: {name}: dtype {came}, expected int32 or int64")
    if values.dim() != 1:
        raise ValueError(f"{call}: {name}: shape {list(values.shape)}, expected one dimension")


def _check_lengths(
    call: str, sources: Numbers, num_sources: int, targets: Numbers, num_targets: int
) -> None:
    if num_sources != num_targets:
        text = f"{num_targets} numbers, expected {num_sources}, as many as {sources.name}"
        raise ValueError(f"{call}: {targets.name}: {text}")


def _refuse(call: str, argument: Numbers, numbers: list[int]) -> None:
    """Raise for the first number that is none of the blocks, or comes twice, if one does."""
    name, _, bound = argument
    for at, number in enumerate(numbers):
        if not 0 <= number < bound:
            text = f"{number} at position {at}, expected 0 to {bound - 1}"
            raise IndexError(f"{call}: {name}: {text}")
    places: dict[int, int] = {}
    for at, number in enumerate(numbers):
        if places.setdefault(number, at) != at:
            text = f"{number} at positions {places[number]} and {at}"
            raise ValueError(f"{call}: {name}: {text}, expected each number once")

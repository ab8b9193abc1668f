"""The example of a radix tree: what is cached, locked and evicted, and the day it serves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import radix_cache as example
import torch
from torch import Tensor


@pytest.mark.parametrize("page_size", [1, 3])
def test_pages_are_matched_inserted_and_evicted_oldest_first(page_size: int) -> None:
    tree = example.RadixCache(page_size)

    def pages(*numbers: int) -> Tensor:
        return torch.tensor(numbers).repeat_interleave(page_size)

    first, second = pages(1, 2, 3), pages(1, 2, 4, 5)
    slots = torch.arange(len(first) + len(second))
    assert tree.insert(first, slots[: len(first)]) == 0
    assert tree.insert(second, slots[len(first) :]) == 2 * page_size
    expected = torch.cat([slots[: 2 * page_size], slots[len(first) + 2 * page_size :]])
    found, node = tree.match_prefix(torch.cat([second, pages(9)[: page_size - 1]]))
    assert torch.equal(found, expected)
    assert (tree.evictable_size, tree.protected_size) == (5 * page_size, 0)
    tree.lock(node)
    assert (tree.evictable_size, tree.protected_size) == (page_size, 4 * page_size)
    assert tree.evict(99).tolist() == slots[2 * page_size : len(first)].tolist()
    tree.unlock(node)
    assert sorted(tree.evict(1).tolist()) == expected[2 * page_size :].tolist()
    assert torch.equal(tree.match_prefix(second)[0], expected[: 2 * page_size])


def test_a_day_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a cache so small that much of it is evicted and computed again."""
    file = tmp_path / "result.json"
    args = ["--page-size", "16", "--requests", "600", "--cache-tokens", "60000"]
    assert example.main([*args, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert 0.3 < result["hit_rate"] < 1
    assert result["us_per_match"] > 0 and result["us_per_match_with_slices"] > 0
    said = capsys.readouterr().out
    rate, tokens = f"{result['hit_rate']:.1%}", result["prompt_tokens"]
    assert f"\n{rate} of {tokens} tokens of prompts were cached\na match takes " in said

"""The plug-in of SGLang: each function that it wraps, against indexing by torch; no engine needed.

``SGLANG_SOURCE``: a folder with sglang and sgl_kernel, to compare their functions' parameters.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jitkern
from jitkern import integrations
from jitkern.errors import UnsupportedError
from jitkern.integrations import plug_into_sglang
from jitkern.integrations import sglang as plug_in

sys.path.append(str(Path(__file__).parents[1] / "ops"))
from format_reference import quantised, ref_store_row

# sglang 0.5.23, sglang-kernel 0.4.10: parameters; host layouts to try, to the GPU > or from it <.
CHUNK = "registration_granularity_bytes"
TABLE = """
HICACHE one_layer k_cache_dst v_DST k_cache_src v_SRC element_dim TUNE page_size: lf> pf> pf<
HICACHE one_layer_mla DST SRC element_dim TUNE page_size: lf> pf>
HICACHE all_layer k_ptr_dst v_ptr_dst indices_dst k_ptr_src v_ptr_src indices_src \
  kv_cache_src_STRIDE kv_cache_dst_STRIDE element_size TUNE page_size: lf< pf<
HICACHE all_layer_mla ptr_dst indices_dst ptr_src indices_src cache_src_STRIDE cache_dst_STRIDE \
  element_size TUNE page_size: lf<
KVCACHEIO per_layer KV BOTH item_size QUOTA: lf> lf<
KVCACHEIO per_layer_pf_lf KV BOTH layer_id item_size src_layout_dim QUOTA: pf>
KVCACHEIO per_layer_ph_lf KV BOTH layer_id item_size src_layout_dim page_size head_num QUOTA: ph>
KVCACHEIO per_layer_mla src dst BOTH item_size QUOTA: lf>
KVCACHEIO per_layer_mla_pf_lf src dst BOTH layer_id item_size src_layout_dim QUOTA: pf>
KVCACHEIO all_layer TABLES BOTH item_size num_layers QUOTA: lf< lf>
KVCACHEIO all_layer_lf_pf LF BOTH item_size dst_layout_dim num_layers QUOTA: pf<
KVCACHEIO all_layer_lf_ph LF BOTH item_size dst_layout_dim num_layers page_size head_num QUOTA: ph<
KVCACHEIO all_layer_mla src_layers dst_layers BOTH item_size num_layers QUOTA: lf<
KVCACHEIO all_layer_mla_lf_pf src_layers dst BOTH item_size dst_layout_dim num_layers QUOTA: pf<
COMMON alloc_with_host_register dims dtype device pin_memory allocator CHUNK:
POOL _write_mla_kv_buffer self dst_buffer loc cache_k_nope cache_k_rope:
"""
SHORT = {
    "DST": "cache_dst indices_dst", "SRC": "cache_src indices_src",
    "KV ": "src_k dst_k src_v dst_v ", "LF ": "src_k_layers dst_k src_v_layers dst_v ",
    "TABLES": "src_k_layers dst_k_layers src_v_layers dst_v_layers",
    "BOTH": "src_indices dst_indices", "QUOTA": "block_quota num_warps_per_block",
    "TUNE": "unroll block_quota", "STRIDE": "stride_bytes", "CHUNK": CHUNK,
    "HICACHE ": "sglang.kernels.ops.kvcache.hicache.transfer_hicache_",
    "KVCACHEIO ": "sgl_kernel.kvcacheio.transfer_kv_",
    "COMMON ": "sglang.srt.mem_cache.pool_host.common.",
    "POOL ": "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.",
}  # fmt: skip
PARAMETERS: dict[str, list[str]] = {}
CASES: list[tuple[str, ...]] = []
for line in TABLE.strip().splitlines():
    for short, name in SHORT.items():
        line = line.replace(short, name)
    names, _, tried = line.partition(":")
    target, *PARAMETERS[target] = names.split()
    CASES += [(target, one[:-1], one[-1]) for one in tried.split()]
HICACHE, KVCACHEIO, COMMON, POOL = list(SHORT.values())[-4:]

CPU = torch.device("cpu")
LAYER, HEADS, PAGE = 1, 4, 4
KERNELS = SimpleNamespace(TMA_BLOCK_QUOTA=4, use_hicache_tma_kernel=lambda **_: False)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in place the engine's function that says whether its TMA kernel takes a row."""
    where = SimpleNamespace(hicache=KERNELS)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.kvcache", where)


LAYOUTS = {"lf": "LPTHD", "pf": "PTLHD", "ph": "PHTLD"}  # see make


def make(layout: str, pages: int, head: int, parts: int, device: Any) -> Tensor:
    """Return K and V, or the pool of MLA; device None is pinned host memory."""
    sizes = {"L": 3, "P": pages, "T": PAGE, "H": HEADS, "D": head}  # layers, ..., bytes of a head
    shape = parts, *(sizes[dim] for dim in LAYOUTS[layout])
    made = torch.randint(256, shape, dtype=torch.uint8)
    return made.pin_memory() if device is None else made.to(device)


def rows_of(layout: str, pools: Tensor) -> Tensor:
    """Return views as ``[parts, layers, pages, tokens of a page, heads, bytes]``."""
    return pools.permute(0, *(1 + LAYOUTS[layout].index(dim) for dim in "LPTHD"))


def original_of(target: str, calls: list[Any] | None = None) -> Callable[..., Any]:
    """Return a stand-in for the engine's function: its parameters, and a record of its calls."""

    def original(*args: Any, **kwargs: Any) -> str:
        assert calls is not None, "jitkern left it to the engine"
        calls.append((args, kwargs))
        return "the engine's"

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(name, kind) for name in PARAMETERS[target]]
    original.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    return original


def arguments(target: str, sides: Any, indices: Any, head: int, near: Any) -> dict[str, Any]:
    """Return the arguments of a call, by the names of the function's parameters."""
    item = HEADS * head
    found: dict[str, Any] = {"item_size": item, "num_layers": 3, "layer_id": LAYER}
    found |= {"page_size": PAGE, "head_num": HEADS, "element_dim": item}
    found["element_size"] = item
    for (side, (layout, whole)), one in zip(sides.items(), indices, strict=True):
        dims, is_near = LAYOUTS[layout], layout == "lf"
        pools = whole.flatten(1 + dims.find("PT"), 2 + dims.find("PT")) if "PT" in dims else whole
        layers = [list(pool.unbind(0 if is_near else 1)) for pool in pools]
        numbers = [[x.data_ptr() for x in part] for part in layers]
        tables = [torch.tensor(x, dtype=torch.uint64, device=near) for x in numbers]
        ones = [part[LAYER] for part in layers]
        pf = ones if is_near else list(pools)
        found |= {f"{side}_indices": one, f"indices_{side}": one, side: pf[0]}
        found |= {f"cache_{side}": ones[0], f"ptr_{side}": tables[0]}
        found[f"{side}_layers"] = tables[0]
        for name in ("{}_layout_dim", "kv_cache_{}_stride_bytes", "cache_{}_stride_bytes"):
            found[name.format(side)] = item if is_near else 3 * item
        for x, pool, layer, addresses in zip("kv", pf, ones, tables, strict=False):
            found |= {f"{side}_{x}": pool, f"{x}_cache_{side}": layer}
            found |= {f"{x}_ptr_{side}": addresses, f"{side}_{x}_layers": addresses}
    return {x: found[x] for x in PARAMETERS[target] if x in found}


def check(case: Any, near: Any, head: int, of: Any = lambda side, x: x, count: int = 12) -> None:
    """Call as the engine does, and compare all bytes of both sides; ``of`` changes indices."""
    target, layout, direction = case
    parts, step = 1 if "mla" in target else 2, 1 if direction == ">" else -1
    host = layout, make(layout, 6, head, parts, "cpu" if near.type == "cpu" else None)
    ends = (host, ("lf", make("lf", 8, head, parts, near)))[::step]
    sides = {"src": ends[0], "dst": ends[1]}
    pages = (torch.tensor([4, 0, 5]), torch.tensor([6, 1, 2]))[::step]
    tokens = [(one[:, None] * PAGE + torch.arange(PAGE)).flatten() for one in pages]
    layers = slice(LAYER, LAYER + 1) if re.search("one_|per_", target) else slice(None)
    expected = {side: whole.clone().cpu() for side, (_, whole) in sides.items()}
    old, new = (rows_of(sides[side][0], expected[side])[:, layers] for side in sides)
    at, to = (one[:count] for one in tokens)
    new[:, :, to // PAGE, to % PAGE] = old[:, :, at // PAGE, at % PAGE]
    indices = [of(side, one.to(near)) for side, one in zip(sides, tokens, strict=True)]
    call = arguments(target, sides, indices, head, near)
    assert plug_in.HOOKS[target](original_of(target), **call) is None
    for side, (_, whole) in sides.items():
        assert torch.equal(whole.cpu(), expected[side])


@pytest.mark.parametrize("head", [64, 164, 144])  # rows of 256, 656 and 576 bytes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_function_copies_as_the_engine_does(case: Any, head: int, device: Any) -> None:
    check(case, device, head)


INDICES: dict[str, Callable[[str, Tensor], Tensor]] = {
    "int32": lambda side, x: x.int(),
    "both dtypes": lambda side, x: x.int() if side == "dst" else x,
    "none": lambda side, x: x[:0],
    "src on the host": lambda side, x: x.cpu() if side == "src" else x,
    "dst on the host": lambda side, x: x.cpu() if side == "dst" else x,
}


@pytest.mark.parametrize("of", INDICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_indices_are_of_any_kind(case: Any, of: str, device: torch.device) -> None:
    check(case, device, 64, INDICES[of], count=0 if of == "none" else 12)


def test_rows_of_the_device_may_have_a_distance(device: torch.device) -> None:
    """A unified pool: a slot has K and V of each layer, and a gap, which is not written."""
    slots = torch.arange(9 * 96, dtype=torch.int16, device=device).view(9, 96)
    k, v = (slots.as_strided((9, 2, 8), (96, 8, 1), offset) for offset in (16, 48))
    host = torch.zeros(2, 5, 2, 8, dtype=torch.int16, pin_memory=device.type == "cuda")
    src, dst = torch.tensor([8, 2], device=device), torch.tensor([0, 4], device=device)
    before, target = slots.clone(), HICACHE + "one_layer"
    plug_in.HOOKS[target](original_of(target), *host, dst, k, v, src, element_dim=16)
    copied = torch.stack([k[src], v[src]]).cpu()  # waits for the call
    assert torch.equal(host[:, [0, 4]], copied) and host[:, 1:4].eq(0).all()
    slots.zero_()
    plug_in.HOOKS[target](original_of(target), k, v, src, *host, dst, element_dim=16)
    assert torch.equal(slots, before * slots.ne(0)) and slots.ne(0).sum() == 64


def test_a_table_is_read_once(device: torch.device) -> None:
    table = torch.tensor([4096, 8192], dtype=torch.uint64, device=device)
    side = plug_in.Table("src_indices", ("src_layers",))
    buffers = side.blocks(plug_in.Call(src_layers=table), 64)
    table.view(torch.int64).zero_()
    assert side.blocks(plug_in.Call(src_layers=table), 64) is buffers
    assert not vars(table)  # nothing is written on the engine's tensors


@pytest.mark.parametrize("starts, size, stride, rows", [
    ([0, 640, 1280], 64, 64, 10),  # layer first
    ([0, 64, 128, 1920, 1984, 2048], 64, 192, 10),  # page first, K and V
    ([640, 0, 640], 64, 64, 10),  # a layer that two names share
    ([0, 660], 64, 64, 10), ([0], 64, 64, 1 << 31),
])  # fmt: skip
def test_a_table_has_as_many_rows_as_fit(starts: Any, size: int, stride: int, rows: int) -> None:
    assert plug_in._num_rows_apart(tuple(starts), size, stride) == rows


def test_a_bad_index_is_reported(device: torch.device) -> None:
    src, bad = torch.zeros(4, 64, device=device), torch.tensor([4], device=device)
    dst, target = torch.zeros_like(src), KVCACHEIO + "per_layer_mla"
    with pytest.raises(IndexError, match="4"):
        plug_in.HOOKS[target](original_of(target), src, dst, bad, bad * 0, item_size=256)
        torch.cuda.synchronize()  # on the CPU the call has raised
        jitkern.check()


def test_roles_are_parameters_of_the_engine_s_functions() -> None:
    assert set(plug_in.HOOKS) == set(PARAMETERS)
    for target, copy in plug_in.COPIES.items():
        sides = copy.src, copy.dst
        named = {copy.size, *(name for side in sides for name in (side.indices, *side.tensors))}
        named |= {side.stride for side in sides if side.stride}
        assert named <= set(PARAMETERS[target])


@pytest.mark.parametrize(("src", "dst", "message"), [
    (torch.zeros(2), torch.zeros(2), r"pairs\[0\]: dtype float32"),
    (torch.arange(2), torch.arange(1), r"pairs\[1\]: 1 blocks, expected 2"),
])  # fmt: skip
def test_errors_of_our_checks_are_raised(src: Tensor, dst: Tensor, message: str) -> None:
    """They say what is wrong with a call. They do not count as left to the engine."""
    pool, target = torch.zeros(4, 64), KVCACHEIO + "per_layer_mla"
    with pytest.raises((TypeError, ValueError), match=f"copy_blocks: {message}"):
        plug_in.HOOKS[target](original_of(target), pool, pool.clone(), src, dst, item_size=256)


@pytest.mark.parametrize(("cache", "item_size", "reason"), [
    (torch.zeros(4, 64), {}, "no argument item_size"),  # of another version of the engine
    (torch.zeros(64, 4).T, {"item_size": 16}, "rows that are not contiguous"),
])  # fmt: skip
def test_calls_left_to_the_engine_are_logged_once(
    cache: Tensor, item_size: Any, reason: str, caplog: Any
) -> None:
    target, calls, rows = KVCACHEIO + "per_layer_mla", list[Any](), torch.arange(2)
    integrations._logged.clear()
    with caplog.at_level("INFO", "sglang.jitkern"):
        for _ in range(2):
            hook = plug_in.HOOKS[target]
            assert hook(original_of(target, calls), cache, cache, rows, rows, **item_size)
    assert calls == [((cache, cache, rows, rows), item_size)] * 2
    (record,) = caplog.records
    assert record.message.endswith(f"{target} to sglang: {reason}")


@pytest.mark.parametrize("value", [None, 0, -1, "x", 1.5, torch.zeros(())], ids=repr)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_arguments_are_left_to_the_engine(case: Any, value: Any) -> None:
    """As of another version: no KeyError, AttributeError or ZeroDivisionError is raised."""
    target, layout, direction = case
    calls, parts = list[Any](), 1 if "mla" in target else 2
    pools = [(name, make(name, 6, 64, parts, CPU)) for name in (layout, "lf")]
    sides = dict(zip(("src", "dst"), pools if direction == ">" else pools[::-1], strict=True))
    good = arguments(target, sides, [torch.arange(4)] * 2, 64, CPU)
    optional = {"element_dim", "element_size", "page_size"}
    for name in {*good} - (optional if HICACHE in target else set()):
        if (name, value) != ("layer_id", 0):
            plug_in.HOOKS[target](original_of(target, calls), **{**good, name: value})
            assert calls.pop()[1][name] is value
    assert not calls
    assert plug_in.HOOKS[target](original_of(target, calls)) == "the engine's"


@pytest.mark.parametrize(
    ("row", "is_packed", "is_its_own"),
    [(512, True, True), (656, True, True), (512, False, True), (656, False, False)],
)
def test_the_engine_keeps_what_its_tma_kernel_is_as_fast_at(
    row: int, is_packed: bool, is_its_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()
    monkeypatch.setattr(KERNELS, "use_hicache_tma_kernel", lambda **how: asked.append(how) or True)
    host, near = torch.ones(8, 3, row, dtype=torch.uint8), torch.zeros(8, row, dtype=torch.uint8)
    of = host.transpose(0, 1).contiguous() if is_packed else host.transpose(0, 1)
    indices, target, calls = torch.arange(4), HICACHE + "one_layer_mla", list[Any]()
    hook = plug_in.HOOKS[target]
    hook(original_of(target, calls), near, indices, of[1], indices, page_size=4)
    assert (len(calls) == 1) == (not near.any()) == is_its_own
    how = {"element_size": row, "page_size": 4, "block_quota": 4}
    assert asked == ([how] if is_its_own else [])


@pytest.mark.parametrize("other", ["allocator", "pin_memory", "pages", "no GPU", ""])
def test_host_pools_are_pinned_pools(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: other != "no GPU")
    monkeypatch.setenv("SGLANG_HUGEPAGE_SIZE", "2MB" if other == "pages" else "")
    calls = list[Any]()

    def make_pool(num_bytes: int) -> Any:
        assert num_bytes == 2 * 3 * 2
        return SimpleNamespace(tensor=lambda shape, dtype: torch.zeros(shape, dtype=dtype))

    monkeypatch.setattr(plug_in, "PinnedPool", make_pool)
    allocator = type("Shared" if other == "allocator" else "HostTensorAllocator", (), {})()
    how = {"pin_memory": other != "pin_memory", "allocator": allocator, "device": "cpu"}
    target = COMMON + "alloc_with_host_register"
    found = plug_in.HOOKS[target](original_of(target, calls), (2, 3), dtype=torch.int16, **how)
    assert len(calls) == bool(other)
    assert other or found._sglang_cuda_host_registered_ranges == []


def mla_pool(is_fp8: bool, **other: Any) -> Any:
    """Return what a store asks sglang's pool of packed fp8 rows, or of bf16."""
    dtypes = (torch.float8_e4m3fn, torch.uint8) if is_fp8 else (torch.bfloat16, torch.bfloat16)
    asked = {"dsa_kv_cache_store_fp8": is_fp8, "use_dsa": is_fp8, "_write_loc_dcp_span": 1}
    asked |= {"dtype": dtypes[0], "store_dtype": dtypes[1], "write_loc_is_dcp_resolved": False}
    return SimpleNamespace(**asked | other)


@pytest.mark.parametrize("rope_dim", [64, 0, None])
@pytest.mark.parametrize("is_fp8", [True, False])
def test_rows_of_mla_are_stored(is_fp8: bool, rope_dim: int | None, device: torch.device) -> None:
    latent = torch.randn(5, 1, 512 + (rope_dim or 0)).bfloat16()
    latent[1, :, 128:256] = 0
    nope, rope = latent[..., :512], latent[..., 512:]
    slots, row = [3, 0, 7, 1, 8], 528 + 2 * rope.shape[-1] if is_fp8 else latent.shape[-1]
    expected = torch.full((9, 1, row), 5, dtype=torch.uint8 if is_fp8 else torch.bfloat16)
    cache = expected.to(device)
    for i, slot in enumerate(slots):
        if is_fp8 and (slot or not rope_dim):
            payload, scales = quantised(nope[i, 0], "fp8_ds_mla", "fp32")
            rest = rope[i, 0] if rope_dim else None
            ref_store_row(expected[:, 0], slot, payload, scales, rest, "fp8_ds_mla")
        elif slot or not rope_dim:  # sglang's kernel for rows without a RoPE part knows no padding
            expected[slot] = latent[i]
    parts = nope.to(device), None if rope_dim is None else rope.to(device)
    target = POOL + "_write_mla_kv_buffer"
    call = mla_pool(is_fp8), cache, torch.tensor(slots, device=device), *parts
    assert plug_in.HOOKS[target](original_of(target), *call) is None
    assert torch.equal(cache.cpu(), expected)


@pytest.mark.parametrize(("is_fp8", "pool", "dtype", "reason"), [
    (True, {"_write_loc_dcp_span": 2}, torch.bfloat16, "context parallelism"),
    (True, {"write_loc_is_dcp_resolved": True}, torch.bfloat16, "context parallelism"),
    (True, {}, torch.float16, "not bf16"),
    (False, {}, torch.float32, "another dtype"),
    (False, {"dtype": torch.float8_e4m3fn, "store_dtype": torch.uint8}, torch.float8_e4m3fn,
     "another dtype"),
])  # fmt: skip
def test_rows_of_mla_left_to_the_engine(
    is_fp8: bool, pool: Any, dtype: Any, reason: str, caplog: Any
) -> None:
    target, calls, cache = POOL + "_write_mla_kv_buffer", list[Any](), torch.zeros(4, 1, 656)
    call = mla_pool(is_fp8, **pool), cache, torch.tensor([1]), *torch.ones(2, 1, 1, 64).to(dtype)
    integrations._logged.clear()
    with caplog.at_level("INFO", "sglang.jitkern"):
        assert plug_in.HOOKS[target](original_of(target, calls), *call) == "the engine's"
    assert calls == [(call, {})] and reason in caplog.text


def test_errors_of_stores_are_raised() -> None:
    """A cache of other rows than the parts': sglang would write past them."""
    target, parts = POOL + "_write_mla_kv_buffer", torch.ones(2, 1, 1, 64).bfloat16()
    call = mla_pool(False), torch.zeros(4, 1, 64).bfloat16(), torch.tensor([1]), *parts
    with pytest.raises(ValueError, match="store_rows: cache: rows of 128 bytes"):
        plug_in.HOOKS[target](original_of(target), *call)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the hooks registered with a stand-in for the engine."""
    found: dict[str, Any] = {}
    registry = SimpleNamespace(register=lambda *args: found.update({args[0]: args[1:]}))
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__version__="0.5.23"))
    for name, module in (
        ("srt", None),
        ("srt.plugins", None),
        ("srt.plugins.hook_registry", hooks),
    ):
        monkeypatch.setitem(sys.modules, f"sglang.{name}", module or SimpleNamespace())
    return found


@pytest.mark.parametrize("named", ["other, jitkern", "other", ""])
def test_the_plug_in_registers_each_function_if_it_is_named(
    named: str, registered: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", named)
    plug_into_sglang()
    names = PARAMETERS if "jitkern" in named else ()
    assert registered == {name: (plug_in.HOOKS[name], "around") for name in names}


def test_entry_points_are_there() -> None:
    text = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    named = dict(
        re.findall(r'entry-points\."(.+)"\]\njitkern = "jitkern.integrations:(\w+)"', text)
    )
    expected = {"vllm.general_plugins": "plug_into_vllm", "sglang.srt.plugins": "plug_into_sglang"}
    assert named == expected
    assert all(callable(getattr(integrations, name)) for name in named.values())


def test_other_versions_are_refused(registered: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "jitkern")
    for version in "0.5.24", "0.5.23.post1", "0.5.23rc1":
        monkeypatch.setattr(sys.modules["sglang"], "__version__", version)
        with pytest.raises(UnsupportedError, match=rf"sglang {version}, expected 0\.5\.23"):
            plug_into_sglang()
    assert not registered
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.5.23+cu130")
    plug_into_sglang()
    assert set(registered) == set(PARAMETERS)


@pytest.mark.skipif("SGLANG_SOURCE" not in os.environ, reason="needs SGLANG_SOURCE")
@pytest.mark.parametrize("target", PARAMETERS)
def test_parameters_are_the_engine_s(target: str) -> None:
    module, _, name = target.replace(".MLATokenToKVPool.", ".").rpartition(".")
    path = Path(os.environ["SGLANG_SOURCE"], *module.split(".")).with_suffix(".py")
    nodes = (x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.FunctionDef))
    arguments = next(node for node in nodes if node.name == name).args
    assert [x.arg for x in arguments.args + arguments.kwonlyargs] == PARAMETERS[target]

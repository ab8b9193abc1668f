"""The tables of the docs, written from ``bench/results/*.json`` by ``python -m bench.tables``.

In a page a table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``; a test compares.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_NUMBER = re.compile(r"\d[\d,.]*")
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Three lines per table. First: its name, the file of results, the benchmark, the case with {} for
# the part that varies, the figure, the text of the corner. Second: the cases, by the text of {}.
# Third: the implementations, and after || those that are not compared, such as a limit. The best
# figure of a case is bold.
# "NAME ~ TEXT" is shown as TEXT; names with " / " between them share a cell. An implementation is
# a row and a case a column; "rows:" in front of the cases turns that round.
TABLES_TEXT = """
store | nvidia-h200 | store | 131072 rows of {} B | gb_s | 131,072 rows of
rows: 256 ~ 256 B | 656 ~ 656 B | 1024 ~ 1 KB | 2048 ~ 2 KB
jitkern | nvcc, mini-sglang style ~ warp per row (nvcc) | triton ~ Triton | torch cache[idx] = x, twice ~ torch `cache[idx] = x`, twice || copy kernel, same bytes ~ copy

index | nvidia-h200 | index | 65536 rows of {} B | gb_s | 65,536 rows of
rows: 656 ~ 656 B | 7168 ~ 7 KB | 8192 ~ 8 KB
jitkern | nvcc, mini-sglang style ~ warp per row (nvcc) | triton ~ Triton | torch index_select(out=) ~ index_select | torch F.embedding ~ F.embedding || copy kernel ~ copy

warm-store | warm | store | {} B, warm | us | in the L2 cache
rows: 16 rows of 1024 ~ 16 rows of 1 KB | 1024 rows of 656 ~ 1,024 of 656 B | 1024 rows of 1024 ~ 1,024 of 1 KB | 1024 rows of 2048 ~ 1,024 of 2 KB
jitkern | nvcc, mini-sglang style ~ warp per row (nvcc) | triton ~ Triton | torch cache[idx] = x, twice ~ torch `cache[idx] = x`, twice || empty kernel

warm-index | warm | index | {} B, warm | us | in the L2 cache
rows: 64 rows of 8192 ~ 64 rows of 8 KB | 1024 rows of 656 ~ 1,024 of 656 B | 1024 rows of 8192 ~ 1,024 of 8 KB | 2048 rows of 8192 ~ 2,048 of 8 KB | 4096 rows of 8192 ~ 4,096 of 8 KB
jitkern | nvcc, mini-sglang style ~ warp per row (nvcc) | triton ~ Triton | torch index_select(out=) ~ index_select | torch F.embedding ~ F.embedding || empty kernel

h2d-gather | nvidia-h200 | h2d_gather | 262144 rows of 656 B, {} | gb_s
distinct ~ distinct rows | repeats ~ random rows with repeats
loads before stores, all SMs ~ batched loads (nvcc) | line-aligned, 2 SMs ~ aligned loads (nvcc), 2 SMs | triton ~ Triton | jitkern, num_sms=2, dedup=False ~ jitkern, 2 SMs, `dedup=False` | jitkern || cudaMemcpyAsync, contiguous ~ `cudaMemcpyAsync`, as many bytes in one piece | zero-copy kernel, contiguous, 132 SMs ~ 132 SMs, contiguous memory

pools-gather | nvidia-h200 | pools | gather of 262144 rows of 656 B, pool of {} GiB | gb_s | `h2d_gather`
0.2 ~ 0.2 GiB | 1 | 4 | 8 | 16 | 32 | 64
jitkern ~ jitkern (`order="auto"`) | jitkern, as they come ~ jitkern, unsorted (`order="given"`) | line-aligned, 4 SMs ~ aligned loads (nvcc), unsorted | loads before stores, all SMs ~ batched loads (nvcc), unsorted | torch.argsort, then line-aligned, 4 SMs ~ `torch.argsort`, then aligned loads (nvcc) || cudaMemcpyAsync, contiguous ~ copy engine, in one piece

lists-h2d | lists | lists | h2d, {} | gb_s | to the GPU
1024 blocks x 8 buffers x 8 KiB of 0.5 GiB ~ 8 KiB, 8,192 pieces | 256 blocks x 8 buffers x 16 KiB of 0.5 GiB ~ 16 KiB, 2,048 | 256 blocks x 8 buffers x 64 KiB of 0.5 GiB ~ 64 KiB, 2,048 | 64 blocks x 80 buffers x 16 KiB of 0.5 GiB ~ 16 KiB, 80 tensors | 4096 blocks x 64 buffers x 2 KiB of 1 GiB ~ 2 KiB, 64 tensors
jitkern ~ lists, one launch | jitkern, with signals ~ with signals | jitkern, a call per buffer ~ a call per tensor | Triton over addresses, as vLLM ~ Triton over addresses, as vLLM's | sglang's transfer kernel || cudaMemcpyAsync, contiguous ~ one contiguous copy

lists-d2h | lists | lists | d2h, {} | gb_s | to the host
1024 blocks x 8 buffers x 8 KiB of 0.5 GiB ~ 8 KiB, 8,192 pieces | 256 blocks x 8 buffers x 16 KiB of 0.5 GiB ~ 16 KiB, 2,048 | 256 blocks x 8 buffers x 64 KiB of 0.5 GiB ~ 64 KiB, 2,048 | 64 blocks x 80 buffers x 16 KiB of 0.5 GiB ~ 16 KiB, 80 tensors | 4096 blocks x 64 buffers x 2 KiB of 1 GiB ~ 2 KiB, 64 tensors
jitkern ~ lists, one launch | jitkern, with signals ~ with signals | Triton over addresses, as vLLM ~ Triton over addresses, as vLLM's | sglang's transfer kernel || cudaMemcpyAsync, contiguous ~ one contiguous copy

first-call | nvidia-h200 | first_call | {} | ms
first kernel of a process | store | index ~ indexing | h2d_gather | h2d_gather, large call
jitkern: NVRTC, cold ~ cold, NVRTC | load_inline with nvcc, cold ~ cold, nvcc through `load_inline` | jitkern: warm, new process ~ another process | load_module of it, new process ~ the same, `tvm_ffi.load_module` of what nvcc made

store-rows | formats | store_rows | {} rows, fp8_ds_mla | us | rows of `fp8_ds_mla`
rows: 1 | 16 | 256 | 4096 ~ 4,096 | 16384 ~ 16,384 | 131072 ~ 131,072
jitkern | vLLM | sglang, two launches | torch ops and cache[idx] = x ~ PyTorch || copy kernel, same bytes in and out ~ copy

store-rows-kv | formats | store_rows | {} rows, fp8, K and V of 8 x 128 | us | rows of `fp8`, K and V, 8 heads of 128
rows: 1 | 16 | 256 | 4096 ~ 4,096 | 16384 ~ 16,384 | 131072 ~ 131,072
jitkern | vLLM | torch ops and cache[idx] = x ~ PyTorch || copy kernel, same bytes in and out ~ copy

gather-rows | formats | gather_rows | {} rows, fp8_ds_mla | us | rows of `fp8_ds_mla`
rows: 1 | 16 | 256 | 4096 ~ 4,096 | 16384 ~ 16,384 | 131072 ~ 131,072
jitkern | jitkern, indexing, then convert ~ two launches | torch cache[idx] and ops ~ PyTorch || copy kernel, same bytes in and out ~ copy

peer-sums | nvidia-h100-x2 | peer | all_reduce, {} bf16, 2 GPUs | us
8 KB | 128 KB | 1 MB | 2 MB | 4 MB
jitkern ~ `PeerCommunicator` | torch.distributed ~ torch.distributed (NCCL 2.28.9) | torch symmetric memory, one shot / torch symmetric memory, two shots ~ torch symmetric memory, one shot / two || jitkern, one behind the other ~ `PeerCommunicator`, nothing between two calls

residency | residency | residency | {} missing | us | lists, missing rows
rows: batch 1, 0 % of 2048 rows of 656 B ~ 1, 0 % | batch 1, 5 % of 2048 rows of 656 B ~ 1, 5 % | batch 1, 20 % of 2048 rows of 656 B ~ 1, 20 % | batch 1, 100 % of 2048 rows of 656 B ~ 1, 100 % | batch 4, 0 % of 2048 rows of 656 B ~ 4, 0 % | batch 4, 5 % of 2048 rows of 656 B ~ 4, 5 % | batch 4, 20 % of 2048 rows of 656 B ~ 4, 20 % | batch 4, 100 % of 2048 rows of 656 B ~ 4, 100 % | batch 16, 0 % of 2048 rows of 656 B ~ 16, 0 % | batch 16, 5 % of 2048 rows of 656 B ~ 16, 5 % | batch 16, 20 % of 2048 rows of 656 B ~ 16, 20 % | batch 64, 0 % of 2048 rows of 656 B ~ 64, 0 % | batch 64, 5 % of 2048 rows of 656 B ~ 64, 5 % | batch 64, 20 % of 2048 rows of 656 B ~ 64, 20 % | batch 1, 20 % of 2048 rows of 512 B ~ 1, 20 %, 512 B | batch 16, 20 % of 2048 rows of 512 B ~ 16, 20 %, 512 B | batch 1, 20 % of 2048 rows of 1152 B ~ 1, 20 %, 1,152 B | batch 16, 20 % of 2048 rows of 1152 B ~ 16, 20 %, 1,152 B | batch 1, 25 % of 8 rows of 4194304 B ~ 1, 2 of 8 experts of 4 MiB
jitkern ~ `swap_in` | sglang | vLLM ~ vLLM, table full || jitkern, resolve alone ~ `resolve` | h2d_gather of the misses ~ fetch of the misses | h2d_gather of all rows ~ fetch of all rows

residency-vllm | residency-vllm | residency | {} % of 2048 rows of 656 B missing | us | lists, missing rows
batch 1, 0 ~ 1, 0 % | batch 1, 5 ~ 1, 5 % | batch 1, 20 ~ 1, 20 % | batch 16, 0 ~ 16, 0 % | batch 16, 5 ~ 16, 5 % | batch 16, 20 ~ 16, 20 %
jitkern ~ `swap_in` | sglang | vLLM
"""  # noqa: E501

# The unit, the key of a result and its divisor, and which number is the best. The first calls of
# other processes have no best: their rows are cold or warm.
FIGURES: dict[str, tuple[str, str, float, Callable[[Iterable[float]], float] | None]] = {
    "gb_s": ("GB/s", "gb_s", 1, max),
    "us": ("us", "median_us", 1, min),
    "ms": ("ms", "median_us", 1e3, None),
}

BESIDE = {
    "engine, contiguous, h2d": "copy engine, to the GPU",
    "engine, contiguous, d2h": "copy engine, to the host",
    "engine, contiguous, both": "copy engine, both ways at once",
    "copy_blocks h2d": "`copy_blocks`, layer first, to the GPU",
    "copy_blocks d2h": "`copy_blocks`, to the host",
    "copy_blocks both": "`copy_blocks`, both ways at once",
    "copy_blocks d2h, 4 SMs": "`copy_blocks(num_sms=4)`, to the host",
    "host page first, h2d": "`copy_blocks`, host page first, to the GPU",
    "host page first, d2h": "`copy_blocks`, host page first, to the host",
    "host page first, both": "`copy_blocks`, host page first, both ways",
    "pages, h2d": "`copy_blocks`, pages of 512 KiB, to the GPU",
    "pages, d2h": "`copy_blocks`, pages of 512 KiB, to the host",
    "h2d_gather": "`h2d_gather`, rows of 656 B",
    "d2h_scatter": "`d2h_scatter`, the same rows",
}


def _table(paragraph: str) -> list[str]:
    head, case_line, impl_line = paragraph.splitlines()
    _, file, op, case_name, figure, corner = (*head.split(" | "), "")[:6]
    if not _path(file).exists():
        return [f"No figures yet: `python -m bench {op} --json {_path(file).relative_to(ROOT)}`."]
    unit, key, divisor, best = FIGURES[figure]
    corner = f"{unit}, {corner}" if corner else unit
    cases = _shown(case_line.removeprefix("rows: "))
    compared, *others = map(_shown, impl_line.split(" || "))
    impls = compared | (others[0] if others else {})
    cells = {}
    for case in cases:
        rows = _rows(file, op, case_name.format(case))
        for impl in impls:
            cells[case, impl] = _text(rows, impl, key, divisor)
        if best:
            texts = _bold([cells[case, impl] for impl in compared], best)
            cells |= {(case, impl): text for impl, text in zip(compared, texts, strict=True)}
    if case_line.startswith("rows: "):
        body = [[shown, *(cells[c, i] for i in impls)] for c, shown in cases.items()]
        return _markdown([corner, *impls.values()], body)
    body = [[shown, *(cells[c, i] for c in cases)] for i, shown in impls.items()]
    return _markdown([corner, *cases.values()], body)


def _shown(line: str) -> dict[str, str]:
    pairs = (cell.partition(" ~ ") for cell in line.split(" | "))
    return {name: shown or name for name, _, shown in pairs}


def _text(rows: dict[str, Any], impl: str, key: str, divisor: float) -> str:
    cells = [rows[name] for name in impl.split(" / ") if name in rows]
    if any(row["median_us"] is None for row in cells):
        return "none"
    return " / ".join(three_digits(row[key] / divisor) for row in cells)


def _bold(texts: list[str], best: Callable[[Iterable[float]], float]) -> list[str]:
    """Return the texts with the best of their numbers in bold, as often as it is there."""
    numbers = {text: float(text.replace(",", "")) for text in _NUMBER.findall(" ".join(texts))}
    top = best(numbers.values())
    return [
        _NUMBER.sub(lambda m: f"**{m[0]}**" if numbers[m[0]] == top else m[0], text)
        for text in texts
    ]


def _markdown(head: list[str], body: list[list[str]]) -> list[str]:
    rows = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in rows]


@cache
def read(file: str) -> Any:
    return json.loads(_path(file).read_text())


def _path(file: str) -> Path:
    return ROOT / "bench" / "results" / f"{file}.json"


def _rows(file: str, op: str, case: str) -> dict[str, Any]:
    rows = {r["impl"]: r for r in read(file)["benchmarks"][op]["rows"] if r["case"] == case}
    if not rows:
        raise ValueError(f"tables: {file}: {op}: no case {case!r}")
    return rows


def three_digits(value: float) -> str:
    """Return ``4,015``, ``48.5``, ``1.30`` or ``0.28``."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def beside() -> list[str]:
    """Return the table of movers beside a decode step, the figures of all batches in a cell."""
    cases = [_rows("beside", "beside", f"decode step, batch {batch}") for batch in (1, 32, 128)]
    body = []
    for way, shown in BESIDE.items():
        rows = [case[way] for case in cases]
        params = [row["params"] for row in rows]
        body.append([shown])
        body[-1] += [
            " / ".join(f"{p[k]:.2f}" for p in params) for k in ("slowdown", "p99_slowdown")
        ]
        speeds = " / ".join(f"{row['gb_s']:.0f}" for row in rows)
        body[-1].append(f"{speeds} ({params[0]['gb_s_alone']:.0f})")
        body[-1].append(" / ".join(f"{p['lost_ms_per_gb']:.1f}" for p in params))
    heads = [
        "",
        "step with copy / without",
        "the same, p99",
        "GB/s with the model (alone)",
        "step time lost, ms per GB",
    ]
    return _markdown(heads, body)


SPARSE = {
    "all rows on the GPU": "all rows on the GPU",
    "jitkern": "`ResidencyMap`",
    "h2d_gather of all rows": "`h2d_gather` of all rows",
}


def sparse(context: int) -> list[str]:
    """Return the table of decode steps of sparse attention."""
    body = []
    for batch, share in product((1, 8, 32, 64), (5, 20)):
        rows = _rows("sparse", "sparse", f"batch {batch}, context {context}, {share} % missing")
        ours = rows["jitkern"]["params"]
        cells = [three_digits(rows[name]["median_us"] / 1e3) for name in SPARSE]
        link = rows["the missing bytes by the copy engine"]["median_us"] / 1e3
        cells += [f"{ours['to_resident']:.2f}", f"{ours['tokens_per_s']:,.0f}", f"{link:.2f}"]
        body.append([f"{batch}, {share} %", *cells])
    heads = ["ms per step; requests, missing rows", *SPARSE.values()]
    heads += ["map / all on the GPU", "tokens per s with the map", "missing bytes, copy engine"]
    return _markdown(heads, body)


def sparse_memory() -> list[str]:
    """Return the table of the memory of a request."""
    body = []
    for context in (32768, 131072):
        rows = _rows("sparse", "sparse", f"batch 64, context {context}, 5 % missing")
        for name in ("all rows on the GPU", "jitkern"):
            params = rows[name]["params"]
            megabytes = f"{params['request_bytes'] / 1e6:.0f}"
            fits = f"{params['batch_in_80_gb']:,}"
            body.append([f"{context:,}, {SPARSE[name]}", megabytes, fits])
    return _markdown(["context, rows", "MB of GPU memory per request", "requests in 80 GB"], body)


def sparse_ranks() -> list[str]:
    """Return the table of two GPUs that fetch for each other."""
    body = []
    for batch, share in product((8, 32), (5, 20)):
        where = f"batch {batch}, context 32768, {share} % missing, 2 GPUs"
        cells = [f"{batch}, {share} %"]
        for case in (f"fetch of {where}", where):
            rows = _rows("sparse", "sparse", case)
            each, part = (rows[f"jitkern, {how}"]["median_us"] for how in RANKS)
            cells += [three_digits(each), three_digits(part), f"{part / each:.2f}"]
        body.append(cells)
    heads = ["us; requests, missing rows"]
    heads += [f"{what}, {how}" for what in ("fetch", "step") for how in (*RANKS, "ratio")]
    return _markdown(heads, body)


RANKS = ("all rows each", "a part each")


TABLES: dict[str, Callable[[], list[str]]] = {
    paragraph.partition(" ")[0]: partial(_table, paragraph)
    for paragraph in TABLES_TEXT.strip().split("\n\n")
}
TABLES["beside"] = beside
TABLES |= {f"sparse-{context}": partial(sparse, context) for context in (32768, 131072)}
TABLES |= {"sparse-memory": sparse_memory, "sparse-ranks": sparse_ranks}


def with_tables(text: str) -> str:
    """Return a page with its tables written anew."""
    return _MARKED.sub(lambda m: "\n".join([m[1].rstrip("\n"), *TABLES[m[2]](), m[3]]), text)


def main() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.read_text()
        if (text := with_tables(page)) != page:
            path.write_text(text)
            print(f"tables: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

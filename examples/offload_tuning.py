"""The fastest chunk for `offload_attention.py`, and what its overlap gains.

At best overlap doubles the speed, if copies take as long as the compute. That depends on the size
of a chunk: the script times some sizes, and then the fastest with and without overlap. On the CPU
nothing overlaps: there it shows only that the results are right.

    python examples/offload_tuning.py
    python examples/offload_tuning.py --tokens 32768 --layers 4 --json result.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from offload_attention import DTYPE, MAX_ERROR, Case, Prefill, default_case, rms_error
from torch import Tensor


class OneStream(Prefill):
    """The same work without overlap: copies and compute in turn, on the current stream."""

    def store(self, layer: int, cpu_blocks: list[int], kv: Tensor) -> None:
        kv = kv.contiguous().unflatten(1, (-1, self.case.block_size))
        self.engine.store_blocks_from(kv, cpu_blocks[: kv.shape[1]], layer=layer)

    def units(self, layer: int, cpu_blocks: list[int], stored: Any) -> Iterator[Tensor]:
        case, step = self.case, self.case.unit_blocks
        block = (case.block_size, case.kv_heads, case.head_dim)
        for at in range(0, len(cpu_blocks), step):
            unit = cpu_blocks[at : at + step]
            tensor = torch.empty(2, len(unit), *block, dtype=DTYPE, device=case.device)
            self.engine.load_blocks_into(tensor, unit, layer=layer)
            yield tensor


def seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Return the time of a call, the GPU's work included."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def fastest(case: Case) -> Case:
    """Time up to 12 sizes of a chunk, as far as a quarter of the cache has room for one."""
    room = case.tokens * case.layers // case.block_size // 4  # blocks
    most = max(1, (room - 3 * case.unit_blocks) // case.layers)
    step = -(-most // 12)
    times: dict[Case, float] = {}
    for num_blocks in range(step, most + 1, step):
        trial = case._replace(chunk=num_blocks * case.block_size)
        prefill = Prefill(trial)
        prefill.run()  # the first call loads kernels
        times[trial] = seconds(case.device, prefill.run)
        print(f"chunks of {trial.chunk} tokens: {times[trial] * 1e3:.1f} ms", flush=True)
    return min(times, key=lambda trial: times[trial])


def main(argv: Sequence[str] | None = None) -> int:
    """Time both ways; return 1 if the result is wrong."""
    default = default_case()
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=default.layers, help="layers of the model")
    parser.add_argument("--tokens", type=int, default=default.tokens, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each kind")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if default.device.type == "cpu":
        print("no GPU: copies and compute share the cores, so these times mean nothing", flush=True)
        torch.set_num_threads(1)  # on a busy machine threads would wait for each other for a minute
    case = fastest(default._replace(layers=args.layers, tokens=args.tokens))
    ways = {"tokens_per_s": Prefill(case), "tokens_per_s_without_overlap": OneStream(case)}
    error = max(rms_error(case, way.run()) for way in ways.values())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.repeats):  # in turn: a slow machine slows both
        for name, way in ways.items():
            times[name].append(seconds(case.device, way.run))
    speeds = {name: case.tokens / statistics.median(times[name]) for name in ways}
    gain = speeds["tokens_per_s"] / speeds["tokens_per_s_without_overlap"]
    result = {"chunk": case.chunk, **speeds, "gain": gain, "rms_error": error}
    print("\n".join(f"{name}: {value:.6g}" for name, value in result.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0 if error < MAX_ERROR else 1


if __name__ == "__main__":
    sys.exit(main())

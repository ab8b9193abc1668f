"""An embedding whose vocabulary is split over ranks, compared with `torch.nn.Embedding`.

Every rank loads its own rows of a table, and looks up the same ids; the rows come back equal bit
for bit. With a GPU for each rank they are read from the rank that holds them, or summed over NCCL;
else the same on the CPU, over shared memory or gloo.

    torchrun --nproc-per-node 4 examples/tp_embedding.py
    torchrun --nproc-per-node 2 examples/tp_embedding.py --vocab-size 1003 --algorithm all_reduce
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from jitkern import comm
from jitkern.nn import TPEmbedding


def communicator() -> tuple[comm.Communicator, torch.device]:
    """Return the communicator of all ranks, and this rank's device."""
    dist.init_process_group("gloo")
    if torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"]):
        return comm.TorchCommunicator(), torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    over_nccl = comm.init_pynccl(tp_rank=rank, tp_size=size, tp_cpu_group=dist.group.WORLD)
    return over_nccl, device


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Return the median time of a call, the GPU's work included."""
    times_ms = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times_ms.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times_ms)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="An embedding split over ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--vocab-size", type=int, default=32_003, help="rows of the table")
    parser.add_argument("--num-added", type=int, default=5, help="tokens added to the vocabulary")
    parser.add_argument("--hidden-size", type=int, default=1024, help="values per row")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a batch")
    parser.add_argument(
        "--algorithm",
        choices=["auto", "peer", "all_reduce"],
        default="auto",
        help="how rows come from other ranks",
    )
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("start it with: torchrun --nproc-per-node 2 examples/tp_embedding.py")

    rows = args.vocab_size + args.num_added
    if os.environ["RANK"] == "0":
        print(f"a table of {rows} rows over {os.environ['WORLD_SIZE']} ranks", flush=True)
    ranks, device = communicator()
    torch.manual_seed(0)  # the same table and ids on every rank
    whole = torch.nn.Embedding(rows, args.hidden_size, dtype=torch.bfloat16)
    ids = torch.randint(0, rows, (args.tokens,)).to(device)

    split = TPEmbedding(
        args.vocab_size,
        args.hidden_size,
        comm=ranks,
        dtype=torch.bfloat16,
        device=device,
        num_added=args.num_added,
        algorithm=args.algorithm,
        group=dist.group.WORLD,
    )
    # From a checkpoint: split.load_full(safetensors.safe_open(path, "pt").get_slice(name)).
    split.load_full(whole.weight.detach())

    with torch.inference_mode():
        expected = whole.to(device)(ids)
        is_equal = torch.equal(split(ids).view(torch.int16), expected.view(torch.int16))
        time_ms = milliseconds(lambda: split(ids), device)
    held = split.vocab_range[1] + split.added_range[1]
    # One write: otherwise the lines of several ranks mix if output is not buffered.
    sys.stdout.write(
        f"rank {ranks.rank} of {ranks.world_size}, {device}: {held} of {rows} rows, "
        f"by {split.algorithm}, {args.tokens} tokens in {time_ms:.3f} ms, "
        f"{'equal' if is_equal else 'DIFFERENT'}\n"
    )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())

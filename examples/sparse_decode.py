"""Sparse attention whose KV cache is in host memory: store, find, fetch, attend, in one CUDA graph.

The decode step of latent attention as in DeepSeek V3.2 (DSA): 128 heads read the rows of the 2,048
tokens that a small indexer picks. Weights and prompts are random. The rows are in a pinned pool;
the GPU keeps those that each layer of each request used last. In each layer

- the current stream computes, picks the top k tokens, and attends to their rows;
- the store stream writes the new token's row to the pool;
- the fetch stream finds the picked rows in the cache and fetches the others (`ResidencyMap`),
  while the current stream computes the queries.

A second decoder, with all rows on the GPU, runs the same steps: outputs must have the same bits.

    python examples/sparse_decode.py --batch 32 --context 131072 --offloaded
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, rms_norm

from jitkern import check, d2h_scatter, gather_rows, store_rows
from jitkern.offload import PinnedPool, ResidencyMap

FORMAT, ROW_BYTES, LATENT, ROPE = "fp8_ds_mla", 656, 512, 64
HEAD_DIM, QUERY_RANK, INDEX_DIM = 128, 1536, 32
PAGE, VOCAB, DTYPE = 64, 1024, torch.bfloat16


class Model:
    """Random weights of attention layers, with V3.2's shapes by default; no MLP."""

    def __init__(self, args: Any, device: torch.device) -> None:
        self.args, self.device = args, device
        rng = torch.Generator(device).manual_seed(args.seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng, device=device, dtype=DTYPE) / shape[-2] ** 0.5

        self.embedding, self.head = weight(VOCAB, args.hidden), weight(args.hidden, VOCAB)
        self.layers = [
            SimpleNamespace(
                row=weight(args.hidden, LATENT + ROPE),
                index=weight(args.hidden, 2 * INDEX_DIM),  # a key, and the drift of the query
                query_down=weight(args.hidden, QUERY_RANK),
                query_up=weight(QUERY_RANK, args.heads * (HEAD_DIM + ROPE)),
                key=weight(args.heads, HEAD_DIM, LATENT),  # of a head: into the latent
                value=weight(args.heads, LATENT, HEAD_DIM),
                out=weight(args.heads * HEAD_DIM, args.hidden),
            )
            for _ in range(args.layers)
        ]

    def queries(self, x: Tensor, layer: int) -> Tensor:
        """Return `[batch, heads, 576]`, absorbed: scores are products with rows of the cache."""
        w = self.layers[layer]
        q = (rms_norm(x @ w.query_down, (QUERY_RANK,)) @ w.query_up).unflatten(1, (-1, 192))
        plain, rope = q.split([HEAD_DIM, ROPE], 2)
        return torch.cat([torch.bmm(plain.transpose(0, 1), w.key).transpose(0, 1), rope], 2)

    def attend(self, q: Tensor, rows: Tensor, is_padding: Tensor, layer: int) -> Tensor:
        """Return `[batch, hidden]` of `rows` `[batch, k, 576]`."""
        w = self.layers[layer]
        scores = torch.bmm(q, rows.transpose(1, 2)) * (HEAD_DIM + ROPE) ** -0.5
        shares = scores.masked_fill_(is_padding.unsqueeze(1), -torch.inf).softmax(2)
        latent = torch.bmm(shares, rows[:, :, :LATENT])
        values = torch.bmm(latent.transpose(0, 1), w.value).transpose(0, 1)
        return values.flatten(1) @ w.out


class Resident:
    """The rows of all tokens in GPU memory."""

    def __init__(self, args: Any, pages: Tensor) -> None:
        self.device, self.pages = pages.device, pages  # for each layer of each request
        rows = pages[: args.batch, :, None] * PAGE + torch.arange(PAGE, device=self.device)
        self.row_of_token = pad(rows.flatten(1), (0, 1), value=-1)  # the last: token -1 is padding
        self.numbers = torch.arange(args.batch, device=self.device)
        self.rows = self.allocate(args.layers, rows.numel(), ROW_BYTES)

    def allocate(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def store(self, layer: int, latent: Tensor, rows: Tensor) -> None:
        """Quantise `latent` `[n, 576]`, and store it in rows of the layer."""
        store_rows(self.rows[layer], rows, latent.split([LATENT, ROPE], 1), format=FORMAT)

    def find(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return a cache, and the row there of each of `tokens` `[batch, k]`, -1 for padding."""
        return self.rows[layer], self.row_of_token[self.numbers.unsqueeze(1), tokens]

    def wait(self) -> None:
        """Have the current stream wait for what `store` and `find` began."""

    def forget(self, request: int) -> None:
        """Prepare for other rows in the pages of a request, which has ended."""


class Offloaded(Resident):
    """The rows of all tokens in host memory, those used last in GPU memory too."""

    def __init__(self, args: Any, pages: Tensor) -> None:
        super().__init__(args, pages)
        num_states = len(pages)  # one for each layer of each request
        self.map = ResidencyMap(num_states, args.slots, pages.shape[1] * PAGE, device=self.device)
        self.states = torch.arange(num_states, device=self.device).view(args.layers, -1)
        self.cache = super().allocate(num_states * args.slots, ROW_BYTES)
        on_gpu = self.device.type == "cuda"
        self.store_stream = torch.cuda.Stream() if on_gpu else None
        self.fetch_stream = torch.cuda.Stream(priority=-1) if on_gpu else None

    def allocate(self, *shape: int) -> Tensor:
        return PinnedPool(torch.Size(shape).numel()).tensor(shape, torch.uint8)

    def store(self, layer: int, latent: Tensor, rows: Tensor) -> None:
        numbers = torch.arange(len(rows), device=self.device)
        pairs = torch.stack([numbers, rows], 1)
        staged = torch.empty(len(rows), ROW_BYTES, dtype=torch.uint8, device=self.device)
        store_rows(staged, numbers, latent.split([LATENT, ROPE], 1), format=FORMAT)
        with beside(self.store_stream, staged, pairs):
            d2h_scatter(staged, self.rows[layer], pairs)

    def find(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.fetch_stream is not None:
            self.fetch_stream.wait_stream(self.store_stream)  # the new row may be asked for
        slots, states = torch.empty_like(tokens), self.states[layer]
        where = (self.rows[layer], self.cache)
        with beside(self.fetch_stream, tokens, slots):
            self.map.swap_in(*where, tokens, slots, states=states, pages=self.pages)
        return self.cache, slots

    def wait(self) -> None:
        for stream in filter(None, (self.store_stream, self.fetch_stream)):
            torch.cuda.current_stream().wait_stream(stream)

    def forget(self, request: int) -> None:
        self.map.reset(self.states[:, request].contiguous())


@contextmanager
def beside(stream: torch.cuda.Stream | None, *tensors: Tensor) -> Iterator[None]:
    """Queue work on another stream, behind the current one; on the CPU, do it at once."""
    if stream is None:
        yield
    else:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        for tensor in tensors:
            tensor.record_stream(stream)


class Decoder:
    """The steps of a batch of requests. When one ends, another takes its place and its pages."""

    def __init__(self, model: Model, make_rows: Callable[[Any, Tensor], Resident]) -> None:
        args, device = model.args, model.device
        self.model, self.args, self.device = model, args, device
        self.source = torch.Generator(device).manual_seed(args.seed + 1)
        self.lengths_to_come = random.Random(args.seed)
        num_pages = args.batch * -(-args.context // PAGE)
        pages = torch.randperm(num_pages, generator=self.source, device=device)
        pages = pages.view(args.batch, -1).repeat(args.layers, 1)
        before = torch.cuda.memory_allocated()
        self.rows = make_rows(args, pages)
        self.row_bytes = torch.cuda.memory_allocated() - before
        shape = (args.layers, args.batch, args.context, INDEX_DIM)
        self.index_keys = torch.zeros(shape, dtype=DTYPE, device=device)
        self.index_queries = self.index_keys[:, :, 0].float()
        self.drift = torch.tensor(args.drift, device=device)
        self.numbers = torch.arange(args.batch, device=device)
        self.positions = torch.arange(args.context, device=device)
        self.lengths, self.tokens = torch.zeros_like(self.numbers), torch.zeros_like(self.numbers)
        self.output = torch.zeros(args.batch, args.hidden, dtype=DTYPE, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.seconds: list[float] = []  # of each step
        for request in range(args.batch):
            self.begin(request)

    def begin(self, request: int) -> None:
        """Begin a request whose prompt is random: three quarters of the context, or more."""
        most = self.args.context - self.args.steps
        length = self.lengths_to_come.randint(most * 3 // 4, most)
        self.rows.forget(request)
        rows = self.rows.row_of_token[request, :length]
        for layer in range(self.args.layers):
            self.rows.store(layer, self.randn(length, LATENT + ROPE), rows)
            self.index_keys[layer, request, :length] = self.randn(length, INDEX_DIM)
        self.rows.wait()
        self.index_queries[:, request] = self.randn(self.args.layers, INDEX_DIM)
        self.lengths[request] = length

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.source, device=self.device, dtype=DTYPE)

    def step(self) -> None:
        """Decode a token of each request; from the third step on as a replay of a CUDA graph."""
        if self.device.type == "cuda" and len(self.seconds) == 2:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.run_layers()
        self.output.cpu()  # a request may just have begun, which is not part of the step
        begin = time.perf_counter()
        self.run_layers() if self.graph is None else self.graph.replay()
        self.output.cpu()  # waits
        self.seconds.append(time.perf_counter() - begin)
        if len(self.seconds) % self.args.turn == 0:
            self.begin(len(self.seconds) // self.args.turn % self.args.batch)

    def run_layers(self) -> None:
        model, hidden = self.model, (self.args.hidden,)
        new_rows = self.rows.row_of_token[self.numbers, self.lengths]
        h = model.embedding[self.tokens] + model.embedding[self.lengths % VOCAB]
        for layer, w in enumerate(model.layers):
            x = rms_norm(h, hidden)
            self.rows.store(layer, x @ w.row, new_rows)
            tokens = self.top_tokens(x, layer)
            cache, slots = self.rows.find(layer, tokens)
            queries = model.queries(x, layer)
            self.rows.wait()
            read = torch.empty(*slots.shape, LATENT + ROPE, dtype=DTYPE, device=self.device)
            parts = read.flatten(0, 1).split([LATENT, ROPE], 1)
            gather_rows(cache, slots.flatten(), parts, format=FORMAT)
            h = h + model.attend(queries, read, tokens < 0, layer)
        self.output.copy_(h)
        self.tokens.copy_((rms_norm(h, hidden) @ model.head).argmax(1))
        self.lengths += 1

    def top_tokens(self, x: Tensor, layer: int) -> Tensor:
        """Return the k tokens of each request with the highest scores, -1 where there are fewer."""
        w, keys = self.model.layers[layer], self.index_keys[layer]
        keys[self.numbers, self.lengths], drift = (x @ w.index).split(INDEX_DIM, 1)
        # As in a model, queries of consecutive tokens are similar.
        query = normalize(self.index_queries[layer] + self.drift * normalize(drift.float()))
        self.index_queries[layer] = query
        scores = torch.bmm(keys, query.to(DTYPE).unsqueeze(2)).squeeze(2)
        scores.masked_fill_(self.positions > self.lengths.unsqueeze(1), -torch.inf)
        values, tokens = scores.topk(self.args.k, sorted=False)
        return torch.where(values > -torch.inf, tokens, -1)


def main(argv: Sequence[str] | None = None) -> int:
    """Decode; return 1 if an output differs from that with all rows on the GPU."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, for_gpu, for_cpu, text in (
        ("batch", 8, 2, "requests"),
        ("context", 32768, 512, "most tokens of a request"),
        ("k", 2048, 64, "tokens that a step attends to"),
        ("slots", 8192, 192, "rows that the GPU keeps, for each layer of a request"),
        ("layers", 8, 2, "layers"),
        ("hidden", 7168, 256, "width of the model"),
        ("heads", 128, 4, "heads"),
        ("steps", 200, 20, "tokens that each place decodes"),
        ("turn", 10, 5, "steps after which a request ends"),
        ("seed", 0, 0, "seed of weights and prompts"),
    ):
        default = for_gpu if on_gpu else for_cpu
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--drift", type=float, default=0.1, help="of the index queries (0.1)")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--resident", action="store_true", help="only with all rows on the GPU")
    only.add_argument("--offloaded", action="store_true", help="only with rows on the host")
    args = parser.parse_args(argv)
    if not 0 < args.k <= min(args.slots, args.context):
        parser.error("--k: expected 1 to --slots and to --context")
    model = Model(args, torch.device("cuda" if on_gpu else "cpu"))
    kinds = {Resident: not args.offloaded, Offloaded: not args.resident}
    decoders, wrong = [Decoder(model, kind) for kind, is_used in kinds.items() if is_used], 0
    for _ in range(args.steps):
        for decoder in decoders:
            decoder.step()
        wrong += not torch.equal(decoders[0].output, decoders[-1].output)
    check(model.device)  # raises if a row was past the end
    for decoder in decoders:
        seconds = statistics.median(decoder.seconds)
        rate = f"{args.batch / seconds:.0f} tokens/s, {1e3 * seconds:.2f} ms per step, rows take"
        print(f"{type(decoder.rows).__name__}: {rate} {decoder.row_bytes / 1e9:.2f} GB of the GPU")
        if isinstance(decoder.rows, Offloaded):
            stats = decoder.rows.map.stats()
            share = stats.misses / (stats.hits + stats.misses)
            print(f"{share:.1%} missing, {stats.moved_bytes / 1e6:.2f} MB fetched")
    if len(decoders) == 2:
        print(f"{wrong} of {args.steps} steps differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

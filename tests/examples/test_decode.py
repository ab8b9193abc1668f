"""Paged decode, sparse decode, a KV connector, fp8 rows: the examples, and mistakes they find."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import EXAMPLES, run_example, with_mistake

PAGED, SPARSE, CONNECTOR = "paged_decode.py", "sparse_topk.py", "kv_connector.py"
FP8, HOST = "fp8_rows.py", "sparse_decode.py"


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help_runs_nothing(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        import_module(name).main(["--help"])
    assert capsys.readouterr().out.startswith("usage: ")


def output_of(name: str, device: torch.device, *argv: str) -> str:
    done = run_example(name, device, *argv)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_attention_without_pages(device: torch.device) -> None:
    argv = ["--steps", "40", "--page-size", "4", "--max-tokens", "18"]
    said = output_of(PAGED, device, *argv)
    how = "one graph, replayed" if device.type == "cuda" else "eagerly"
    assert f"40 steps of 8 rows on {device.type}, {how}\n" in said
    found = re.search(r"(\d+) requests, (\d+) tokens, (\d+) rows of padding", said)
    assert found is not None
    requests, tokens, padded = map(int, found.groups())
    assert requests > 8  # rows have served several
    assert tokens + padded == 40 * 8 and tokens > 100 and padded > 30


@pytest.mark.parametrize("parts", [2, 5])
def test_it_fetches_what_is_missing(device: torch.device, parts: int) -> None:
    argv = ["--tokens", "3000", "--top", "100", "--steps", "9", "--parts", str(parts)]
    said = output_of(SPARSE, device, *argv)
    steps = re.findall(r"step \d+: (\d+)% on the GPU, (\d+) bytes fetched", said)
    assert len(steps) == 9
    assert steps[0] == ("0", "65600")
    for share, num_bytes in steps:
        assert int(num_bytes) == (100 - int(share)) * 656
    assert f"{100 * parts} slots of 3000 tokens on {device.type}: " in said
    assert all(int(share) > 40 for share, _ in steps[1:])  # the query drifts slowly


def test_it_loads_what_prompts_share(device: torch.device) -> None:
    said = output_of(CONNECTOR, device)
    hits = re.findall(r"prompt \d+: (\d+) of 12 blocks loaded", said)
    assert hits == ["0"] * 3 + ["10"] * 9
    assert "40 blocks on the host, 0 wrong values\n" in said  # some were evicted


def test_a_host_smaller_than_a_prompt(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host block is written twice in a call, where its content would be undefined."""
    shape = (6, 16, 8, 64)
    k, v = ([torch.randn(shape, device=device).bfloat16() for _ in range(2)] for _ in "kv")
    connector = import_module("kv_connector").Connector(k, v, num_host_blocks=2)
    to_tensor = connector.pairs

    def checked(pairs: list[list[int]]) -> torch.Tensor:
        assert len({host_block for _, host_block in pairs}) == len(pairs)
        return to_tensor(pairs)

    monkeypatch.setattr(connector, "pairs", checked)
    for hashes in ([1, 2, 3, 4, 5], [3, 2, 9], [9, 1, 7]):
        blocks = torch.randperm(6)[: len(hashes)].tolist()
        before = dict(connector.blocks)
        connector.store(hashes, blocks)
        connector.wait_for_stores()
        if device.type == "cuda":
            torch.cuda.synchronize()  # this host reads the blocks
        assert len({*connector.blocks.values()}) == len(connector.blocks) == 2
        for key, block in zip(hashes, blocks, strict=True):
            if key in connector.blocks and key not in before:
                stored = connector.host[connector.blocks[key], 0].cpu()
                assert torch.equal(stored, k[0][block].flatten().cpu())


def test_it_stores_rows_in_fp8(device: torch.device) -> None:
    said = output_of(FP8, device)
    assert said == f"1000 rows on {device.type}, 656 bytes instead of 1152\n0 wrong rows\n"


@pytest.mark.parametrize("where", [[], ["--resident"], ["--offloaded"]], ids=str)
def test_rows_on_the_host_give_the_same_bits(device: torch.device, where: list[str]) -> None:
    sizes = "--batch 3 --context 448 --k 50 --slots 150 --layers 2 --hidden 128 --heads 2"
    argv = [*sizes.split(), "--steps", "16", "--turn", "3", "--seed", "7", *where]
    said = output_of(HOST, device, *argv)
    kinds = re.findall(r"^(\w+): \d+ tokens/s", said, re.MULTILINE)
    missing = re.search(r"\n([\d.]+)% missing, ([\d.]+) MB fetched\n", said)
    if where:
        assert kinds == [where[0][2:].capitalize()] and "differ" not in said
    else:
        assert kinds == ["Resident", "Offloaded"] and "0 of 16 steps differ\n" in said
    if "Offloaded" in kinds:
        assert missing is not None and 5 < float(missing[1]) < 50 and float(missing[2]) > 0


def test_the_resident_step_is_attention(device: torch.device) -> None:
    """To which the step with rows on the host is compared: both could be wrong alike."""
    example = import_module("sparse_decode")
    args = SimpleNamespace(
        batch=3, context=200, k=190, layers=2, hidden=64, heads=2, steps=40, turn=2, seed=3,
        drift=0.3,
    )  # fmt: skip
    latents: dict[tuple[int, int, int], torch.Tensor] = {}  # of layer, request, token
    num_checked = 0

    class Kept(example.Resident):  # type: ignore[misc, name-defined]
        """Rows that a plain dict keeps too."""

        def store(self, layer: int, latent: torch.Tensor, rows: torch.Tensor) -> None:
            super().store(layer, latent, rows)
            requests, tokens = (self.row_of_token[:, :-1] == rows[:, None, None]).nonzero().T[1:]
            for request, token, values in zip(
                requests.tolist(), tokens.tolist(), latent.float().cpu(), strict=True
            ):
                latents[layer, request, token] = values

        def find(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.tokens = tokens
            found: tuple[torch.Tensor, torch.Tensor] = super().find(layer, tokens)
            return found

    model = example.Model(args, device)
    attend = model.attend

    def checked(
        q: torch.Tensor, rows: torch.Tensor, is_padding: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compare with attention by values in float, of keys and values of each head."""
        nonlocal num_checked
        output: torch.Tensor = attend(q, rows, is_padding, layer)
        w, outputs = model.layers[layer], []
        for request in range(args.batch):
            length = int(decoder.lengths[request])
            tokens = [token for token in decoder.rows.tokens[request].tolist() if token >= 0]
            assert len(set(tokens)) == len(tokens) == min(args.k, length + 1)
            assert max(tokens) <= length
            plain = torch.stack([latents[layer, request, token] for token in tokens]).to(device)
            scores = q[request].float() @ plain.T / 192**0.5
            values = plain[:, :512] @ w.value.float()
            outputs.append((scores.softmax(1).unsqueeze(1) @ values).flatten() @ w.out.float())
        expected = torch.stack(outputs)  # 5 % apart, as the rows are in fp8
        assert (output.float() - expected).norm() < 0.1 * expected.norm()
        num_checked += 1
        return output

    model.attend = checked
    decoder = example.Decoder(model, Kept)
    for _ in range(12):
        decoder.run_layers()
        decoder.begin(1)
    assert num_checked == 24


@pytest.mark.parametrize(
    ("name", "right", "wrong", "says"),
    [
        # The newest token is not seen; other tokens' slots; nothing is loaded; another row's slot.
        (PAGED, "self.lengths.unsqueeze(1)", "self.lengths.unsqueeze(1) - 1", "largest diff"),
        (SPARSE, "cache, tokens, slots", "cache, tokens.flip(1), slots", "wrong steps: [^0]"),
        (CONNECTOR, "(hashes[:hits], gpu_blocks[:hits])", "([], [])", "[1-9]\\d* wrong values"),
        (FP8, "gather_rows(cache, slots,", "gather_rows(cache, slots.roll(1),", "1000 wrong rows"),
        # Rows of a request that has ended are found.
        (HOST, "        self.rows.forget(request)\n", "", "[1-9]\\d* of \\d+ steps differ"),
    ],
    ids=["length", "fetch", "load", "roll", "forget"],
)
def test_a_mistake_is_found(
    device: torch.device, tmp_path: Path, name: str, right: str, wrong: str, says: str
) -> None:
    done = run_example(with_mistake(name, tmp_path, right, wrong), device)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(says, done.stdout)

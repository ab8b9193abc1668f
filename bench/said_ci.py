"""Figures of ``docs/bench-ci.md``: what the study of the guard found."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Said, said, span
from bench.tables import read


def bench_ci() -> Iterator[Said]:
    """The guard's study."""
    study = read("ci-guard")
    yield from _silence(study["silence"], study["second look"])
    yield from _limits(study["silence"])
    yield from _planted([*study["seeds"], *study["seeds, 100 steps"]])


def _silence(found: dict, again: dict) -> Iterator[Said]:
    alarms, runs, took = found["alarms"], found["runs"], found["seconds"]
    yield said(
        "{:d} runs of one tree on the quiet machine, {:d} beside two busy processes,",
        runs["quiet"],
        runs["beside 2 busy processes"],
    )
    yield said(
        "of {:,d} verdicts **none was a false alarm on the quiet machine, and two beside the"
        " load**, both in one run (packing of arguments, +{:.0f} % and +{:.0f} % where +{:.0f} %"
        " and +{:.0f} % were the limits). With the second look that figure was measured in {:d}"
        " more runs, beside ten busy processes, by the baseline that had called it slower: none"
        " ended with an alarm. A run took {:.0f} s, {:.0f} s beside the load;",
        found["verdicts"],
        *(100 * alarm[key] for key in ("change", "tolerance") for alarm in alarms),
        again["runs"],
        took["quiet"],
        took["beside 2"],
        holds=[alarm["load"] for alarm in alarms] == ["beside 2"] * 2
        and again["load average"] == 10
        and not again["alarms"],
    )


def _limits(found: dict) -> Iterator[Said]:
    limits = {name: 100 * limit["time"] for name, limit in found["tolerances"].items()}
    single = [
        limits.pop(name)
        for name in (
            "process: warm load of a kernel",
            "process: first call, no bytecode",
            "launch: arguments to bytes, 3",
            "launch: arguments to bytes, 11",
        )
    ]
    copies = [limits.pop(name) for name in list(limits) if limits[name] > 20]
    gate, inform = (found["figures"][key] for key in ("that gate by time", "that inform"))
    yield said(
        "{:d} of the {:d} times gate. Most speak from {:.0f} to {:.0f} % on; copies of several MB,"
        " which move with the memory's other users, from {:.0f} to {:.0f} %; a warm load and a"
        " first call without bytecode files from {:.0f} and {:.0f} %; packing, for that one run,"
        " from {:.0f} and {:.0f} %.",
        gate,
        gate + inform,
        *span(limits.values()),
        *span(copies),
        *single,
    )


def _planted(study: list[dict]) -> Iterator[Said]:
    seeds = {seed["seed"]: seed for seed in study}

    def caught(seed: str, key: str, others: bool = True) -> int:
        names = seeds[seed]["by"] + seeds[seed]["others that spoke"] * others
        return sum(name.endswith(f", {key}") for name in names)

    def rose(seed: str, key: str) -> tuple[float, float]:
        changes = seeds[seed]["changes"].items()
        return span(100 * change for name, change in changes if name.endswith(f", {key}"))

    seed = "30 % in a CPU copy"
    spoke = [caught(seed, key) for key in ("time", "count")]
    yield said(f"| {seed} | {{:d}} times and {{:d}} counts |", *spoke)

    seed = "0.5 us in the argument check"
    yield said(
        f"| {seed} | {{:d}} times and {{:d}} counts; of the checks alone the time rose by"
        " {:.0f} to {:.0f} %, the count by {:.0f} to {:.0f} % |",
        *(caught(seed, key) for key in ("time", "count")),
        *rose(seed, "time"),
        *rose(seed, "count"),
    )
    seed = "20 ms in import, computing"
    yield said(
        f"| {seed} | {{:d}} times; the import's rose by {{:.0f}} %, its count by {{:.1f}} % |",
        caught(seed, "time"),
        rose(seed, "time")[0],
        rose(seed, "count")[0],
    )
    for seed, what in (
        ("20 ms in import, waiting", "import"),
        ("2 ms in the warm load, waiting", "warm load"),
    ):
        yield said(
            f"| {seed} | {{:d}} times; the {what}'s rose by {{:.0f}} % |",
            caught(seed, "time"),
            rose(seed, "time")[0],
        )
    seed = "30 % in launch packing"
    yield said(
        f"| {seed} | {{:d}} counts, by {{:.0f}} %; the times rose by {{:.0f}} and {{:.0f}} % |",
        caught(seed, "count"),
        rose(seed, "count")[0],
        *rose(seed, "time"),
    )
    seed = "100 steps of Python in a push of a ring"
    yield said(
        f"| {seed} | {{:d}} times and {{:d}} counts; the counts rose by {{:.0f}} and {{:.0f}} % |",
        *(caught(seed, key, others=False) for key in ("time", "count")),
        *rose(seed, "count"),
    )
    seed = "100 steps of Python in a load of an engine"
    yield said(
        f"| {seed} | its count, by {{:.0f}} %; the time rose by {{:.0f}} % |",
        *(rose(seed, key)[0] for key in ("count", "time")),
    )
    seed = "100 steps of Python in a look-up of a split embedding"
    yield said(
        f"| {seed} | its time, by {{:.0f}} %, and its count, by {{:.0f}} % |",
        *(rose(seed, key)[0] for key in ("time", "count")),
    )

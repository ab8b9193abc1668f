"""Names in public signatures follow the rules at the top of docs/reference.md."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, get_type_hints

import pytest

from jitkern import errors

MODULES = ("jitkern", "jitkern.comm", "jitkern.offload", "jitkern.nn")

DEVICE = "torch.device | str | int | None"
BYTES = re.compile(r"byte|pitch|width|stride|offset|footprint")
TIME = re.compile(r"time(?!d)|deadline|latency|second|delay")
COMMUNICATOR = re.compile(r"Communicator|PeerReducer")
INSTEAD = {
    "size": "num_bytes or world_size",
    "outs": "partials",
    "files": "replays",
    "out": "output",
    "num_ranks": "world_size",
    "tp_rank": "rank",
    "tp_size": "world_size",
    "tp_cpu_group": "group",
    "deadline_s": "timeout_s or device_timeout_s",
}

EXCEPTIONS = {
    *(f"memcpy_2d_async.{name}" for name in ("dst", "dpitch", "spitch", "width")),  # CUDA's
    *(f"init_pynccl.tp_{name}" for name in ("rank", "size", "cpu_group")),  # mini-sglang's
    *("perf_cpu.repetitions", "perf_cuda.repetitions"),  # mini-sglang's, as the next
    "compare_memory_kernel_perf.memory_footprint",
    "DeviceModule.files",  # those of its sources
    *("ResidencyStats.hits", "ResidencyStats.misses"),  # the words of caches
    "warm.out",  # as --out
}


def public_objects() -> dict[str, Any]:
    """Return classes and functions, and public methods and properties by "class.name"."""
    objects: dict[str, Any] = {}
    for module in map(import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            if is_ours(value):
                objects[name] = value
            for member in dir(value) if inspect.isclass(value) and name in objects else ():
                method = inspect.unwrap(getattr(value, member))
                if member[0] != "_" and (isinstance(method, property) or is_ours(method)):
                    objects[f"{name}.{member}"] = method
    return objects


def is_ours(value: Any) -> bool:
    return callable(value) and str(getattr(value, "__module__", "")).startswith("jitkern")


def signatures() -> Iterator[tuple[str, Signature]]:
    """Yield a class with the parameters of its constructor: the fields, for a dataclass."""
    for name, value in public_objects().items():
        is_plain_error = value in vars(errors).values() and "__init__" not in vars(value)
        if not isinstance(value, property) and not is_plain_error:
            yield name, inspect.signature(value)


def attributes() -> Iterator[tuple[str, str, str]]:
    """Yield class, name and annotation of properties, and of what a class sets in ``self``."""
    for name, value in public_objects().items():
        if isinstance(value, property):
            yield (*name.split("."), "")
        elif inspect.isclass(value):
            pattern = re.compile(r"^ +self\.([a-z]\w*): (.+?) = ", re.M)
            for attribute, annotation in pattern.findall(inspect.getsource(value)):
                yield name, attribute, annotation


def name_rule(name: str, annotation: str) -> str | None:
    """Return the rule that a name breaks."""
    if name in INSTEAD:
        return f"is {INSTEAD[name]}"
    if BYTES.search(name):
        return None if name.endswith("_bytes") else "ends in _bytes"
    if TIME.search(name) and annotation != "bool":
        return None if name.endswith(("_s", "_ms")) else "ends in _s or _ms"
    is_number = annotation == "int" and name.endswith("s")
    return "begins with num_" if is_number and not name.startswith(("num_", "max_")) else None


def mistakes(signature: Signature) -> Iterator[tuple[str, str]]:
    """Yield the parameters that break a rule, and the rule."""
    parameters = {name: p for name, p in signature.parameters.items() if name != "self"}
    names = [*parameters]
    for name, parameter in parameters.items():
        if rule := name_rule(name, parameter.annotation):
            yield name, rule
        if name == "device" and (parameter.annotation, parameter.default) != (DEVICE, None):
            yield name, f"is {DEVICE} = None"
        if name == "device" and names != ["device"] and parameter.kind != Parameter.KEYWORD_ONLY:
            yield name, "is passed by name, unless it is the only parameter"
        is_communicator = COMMUNICATOR.search(str(parameter.annotation)) is not None
        if (name == "comm") != is_communicator:
            yield name, "is comm, if it is a communicator"
        if name in ("count", "counts") and "Tensor" not in str(parameter.annotation):
            yield name, "is num_*, unless a kernel reads it"
        if name[0] == "_":
            yield name, "is not private"
    if {"src", "dst"} <= {*names} and names[:2] != ["src", "dst"]:
        yield "dst", "comes second, after src"
    if {"group", "rank"} <= {*names} and names.index("group") > names.index("rank"):
        yield "group", "comes before rank"
    if "output" in names and any(name.endswith("_out") for name in names):
        yield "output", "is <what>_out, beside another"
    if "output" in names[1:] and parameters["output"].kind != Parameter.KEYWORD_ONLY:
        yield "output", "comes first, as in torch.distributed, or by name"


def test_public_names_follow_the_rules() -> None:
    walked, broken = set(), {}
    for where, signature in signatures():
        walked |= {f"{where}.{name}" for name in signature.parameters}
        broken |= {f"{where}.{name}": rule for name, rule in mistakes(signature)}
    for where, name, annotation in attributes():
        walked.add(f"{where}.{name}")
        if rule := name_rule(name, annotation):
            broken[f"{where}.{name}"] = rule
    assert walked >= {
        *("PinnedPool.tensor.shape", "KernelConfig.num_threads"),  # a method, a named tuple
        *("PeerMemory.share_bytes", "Communicator.world_size"),  # an attribute, a property
    }
    assert {name: rule for name, rule in broken.items() if name not in EXCEPTIONS} == {}
    assert {*broken} >= EXCEPTIONS, "not all exceptions are ones"


def test_a_question_is_a_name_with_is() -> None:
    objects = public_objects()
    getters = {name: getattr(value, "fget", value) for name, value in objects.items()}
    questions = {
        name.rpartition(".")[2]
        for name, getter in getters.items()
        if getattr(getter, "__annotations__", {}).get("return") in ("bool", bool)
    }
    assert questions >= {"is_done", "is_running"}
    assert all(name.startswith("is_") for name in questions)


def test_what_ends_has_close_and_is_a_context_manager() -> None:
    classes = [value for value in public_objects().values() if inspect.isclass(value)]
    closes, managers = (
        {value.__name__ for value in classes if hasattr(value, method)}
        for method in ("close", "__exit__")
    )
    assert closes == managers and "RingServer" in closes
    assert not any(
        hasattr(value, name) for value in classes for name in ("stop", "end", "shutdown")
    )


def test_a_name_is_in_one_package() -> None:
    names = [name for module in MODULES for name in import_module(module).__all__]
    assert sorted(names) == sorted({*names})


TYPES = {*import_module("jitkern.typing").__all__, *public_objects(), "ReduceOp"}
TYPES |= {"Any", "Callable", "Iterable", "Literal", "PathLike", "ProcessGroup", "Sequence"}
TYPES |= {"False", "None", "Tensor"}


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_types_in_signatures_are_public(name: str) -> None:
    value = public_objects()[name]
    value = getattr(value, "fget", value.__init__ if inspect.isclass(value) else value)
    get_type_hints(value)  # raises NameError for a name that only a type checker sees
    annotations = " ".join(map(str, getattr(value, "__annotations__", {}).values()))
    assert {*re.findall(r"(?<![\w.'])[A-Z]\w+", annotations)} <= TYPES


def test_figures_are_returned_by_stats() -> None:
    returned = {
        name: str(signature.return_annotation)
        for name, signature in signatures()
        if not inspect.isclass(public_objects()[name])
    }
    by_stats = {name: text for name, text in returned.items() if name.split(".")[-1] == "stats"}
    assert by_stats == {name: text for name, text in returned.items() if text.endswith("Stats")}
    assert len(by_stats) == 4

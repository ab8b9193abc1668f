"""``@op`` makes an op of a public function's signature and docstring.

It makes the direct call into C++, the operator ``torch.ops.jitkern.<name>`` and what torch.compile
traces. C++ takes the arguments in the signature's order, "auto" as None: a string takes 0.13 us.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from jitkern.host import library as host
from jitkern.ops import dispatch
from jitkern.ops.block_buffers import BlockBuffers

F = TypeVar("F", bound=Callable[..., Any])


class TorchOverload(NamedTuple):
    """One operator of an op in ``torch.ops.jitkern``.

    `fake` is the same on tensors without memory; None if there is no result. `one_by_one` is the
    same by operators that write one tensor each, for tensors that share an allocation, such as a
    pool of K and V: PyTorch's inductor writes only one of them in place, and the other to a copy of
    the allocation; in torch 2.11 it copies from the wrong address.
    """

    schema: str  # ``indexing.out(Tensor weights, ...) -> ()``
    function: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    one_by_one: Callable[..., None] | None = None


OVERLOADS: dict[str, list[TorchOverload]] = {}
"""The operators of each op, by its public name; ``torch_ops`` registers them."""

# The direct call. A plain function, generated: one that binds *args costs 1 us a call.
_DIRECT = """\
def {name}({parameters}):
    if dispatch.in_inference_mode() or dispatch.may_write({written}, {read}):
        try:
            if not call.call({arguments}):
                dispatch.wrote(*{changed})
                return
        except dispatch.UNREADABLE as error:
            dispatch.require_wrapper(error, "{name}", OPTIONS, {by_name})
    {untraced}dispatch.through_torch("{name}", {by_name})


def now({parameters}):
    call_now({arguments})
"""

_SCHEMA_TYPES = {"int": "SymInt", "int | None": "SymInt?", "bool": "bool"}


def op(
    kernel: host.Builder,
    *,
    writes: Sequence[str],
    reads: Sequence[str] = (),
    name: str = "",
    one_by_one: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Return a decorator that makes an op of a function without a body.

    ``kernel`` builds what C++ asks for. ``writes`` and ``reads`` name the tensors that are written,
    and those whose values are read: not indices. At most the last of each is optional. ``name`` is
    that of the C++ function, by default the function's.
    """

    def decorate(public: F) -> F:
        called = name or public.__name__
        parameters = inspect.signature(public).parameters
        plain = [one.replace(annotation=one.empty) for one in parameters.values()]
        objects = [name for name, one in parameters.items() if _is_object(one)]
        refusal = f'dispatch.refuse_objects("{called}", {_by_name(objects)})\n    '
        source = _DIRECT.format(
            name=called,
            parameters=str(inspect.Signature(plain))[1:-1],
            arguments=", ".join(map(_argument, parameters.values())),
            written=_tuple(parameters, writes),
            read=_tuple(parameters, reads),
            changed=_changed(parameters, writes),
            by_name=_by_name(one for one in parameters if one not in objects),
            untraced=refusal if objects else "",
        )

        host.builds(called, kernel)
        functions: dict[str, Any] = {
            "AUTO": "auto",
            "OPTIONS": {p.name: _expected(p) for p in parameters.values() if not _is_tensor(p)},
            "dispatch": dispatch,
            "BlockBuffers": BlockBuffers,
            "call": host.Function(called),
            "call_now": host.Function(f"{called}_now"),
        }
        exec(compile(source, f"<jitkern op {called}>", "exec"), functions)
        schema = _schema(called, parameters.values(), writes)
        overload = TorchOverload(schema, functions["now"], one_by_one=one_by_one)
        OVERLOADS.setdefault(called, []).append(overload)

        def traced(*args: Any, **options: Any) -> None:
            by_name = {**dict(zip(parameters, args, strict=False)), **options}
            dispatch.refuse_objects(called, **{one: by_name.pop(one, None) for one in objects})
            dispatch.through_torch(called, **by_name)

        return cast("F", dispatch.traced_as(traced)(wraps(public)(functions[called])))

    return decorate


def _by_name(names: Iterable[str]) -> str:
    return ", ".join(f"{one}={one}" for one in names)


def _argument(parameter: inspect.Parameter) -> str:
    name = parameter.name
    # "is": an array as an option is no error before C++ says so.
    return f"None if {name} is AUTO else {name}" if isinstance(parameter.default, str) else name


def _is_tensor(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation).startswith("Tensor")


def _is_object(parameter: inspect.Parameter) -> bool:
    """Tell whether an argument is an object of jitkern, which no operator of PyTorch takes."""
    return str(parameter.annotation).startswith("LayerSignals")


def _expected(parameter: inspect.Parameter) -> str:
    """Return what an argument that is no tensor should be, in the words of C++'s errors."""
    annotation = str(parameter.annotation)
    if words := [f'"{word}"' for word in re.findall("'([^']+)'", annotation)]:
        return f"{', '.join(words[:-1])} or {words[-1]}"
    if _is_object(parameter):
        return annotation.partition(" ")[0]
    return "a bool" if annotation == "bool" else "an int"


def _tuple(parameters: Any, names: Sequence[str]) -> str:
    """Return the source of a tuple of these tensors, without the last one where it is None."""
    every, but_one = (f"({''.join(f'{one}, ' for one in some)})" for some in (names, names[:-1]))
    if not names or parameters[names[-1]].annotation == "Tensor":
        return every
    return f"({but_one} if {names[-1]} is None else {every})"


def _changed(parameters: Any, names: Sequence[str]) -> str:
    """Return the source of the tensors that count as changed: 80 of a list would take 10 us."""
    if "BlockBuffers" not in str(parameters[names[0]].annotation):
        return _tuple(parameters, names)
    return f"(() if type({names[0]}) is BlockBuffers else ({names[0]},))"


def _schema(name: str, parameters: Any, writes: Sequence[str]) -> str:
    """Return the operator's schema: ``name(Tensor src, Tensor(a!) dst, *, ...) -> ()``."""
    entries: list[str] = []
    for one in parameters:
        if _is_object(one):
            continue
        if one.kind is one.KEYWORD_ONLY and "*" not in entries:
            entries.append("*")
        annotation = str(one.annotation)
        if _is_tensor(one):
            alias = f"({'abcd'[writes.index(one.name)]}!)" if one.name in writes else ""
            kind = f"Tensor{alias}{'?' * annotation.endswith('None')}"
        else:
            kind = _SCHEMA_TYPES.get(annotation, "str")
        default = f'"{one.default}"' if isinstance(one.default, str) else one.default
        entries.append(f"{kind} {one.name}" + f"={default}" * (one.default is not one.empty))
    return f"{name}({', '.join(entries)}) -> ()"

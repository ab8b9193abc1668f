"""``@op`` makes an op of a public function's signature and docstring: it is written once.

From the signature come three things: the direct call into C++, the operator
``torch.ops.jitkern.<name>``, and what ``torch.compile`` traces. The C++ function takes the
arguments in the order of the signature. An option that is "auto" goes there as None: a string costs
0.13 us on its way.
"""

from __future__ import annotations

import inspect
import linecache
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

from jitkern.host import module as host
from jitkern.ops import dispatch

F = TypeVar("F", bound=Callable[..., Any])


class TorchOverload(NamedTuple):
    """One operator of an op in ``torch.ops.jitkern``."""

    schema: str
    """``indexing.out(Tensor weights, ...) -> ()``."""

    function: Callable[..., Any]

    fake: Callable[..., Any] | None = None
    """The same on tensors without memory: returns one of the result's shape; None: no result."""

    differentiable: Callable[[Callable[..., Any]], Any] | None = None
    """Given the operator without a gradient, returns the ``torch.autograd.Function`` that has one.

    Its ``apply`` takes the operator's arguments in their order.
    """

    one_by_one: Callable[..., None] | None = None
    """The same by operators that write one tensor each, for tensors that share an allocation.

    PyTorch's inductor writes only one of them in place, and the other to a copy of the allocation,
    such as a pool of K and V; in torch 2.11 it copies from the wrong address.
    """


OVERLOADS: dict[str, list[TorchOverload]] = {}
"""The operators of each op, by its public name; :mod:`jitkern.torch_ops` registers them."""

# The direct call. A plain function, generated: one that binds *args costs 1 us a call.
_DIRECT = """\
def {name}({parameters}):
    if dispatch.in_inference_mode() or dispatch.may_write({written}, {read}):
        try:
            if not call({arguments}):
                dispatch.wrote(*{written})
                return
        except dispatch.UNREADABLE as error:
            dispatch.require_wrapper(error, "{name}", OPTIONS, {by_name})
    dispatch.through_torch("{name}", {by_name})


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

    Parameters
    ----------
    kernel
        Builds the kernels of a specialisation, by the names and ints that C++ asks for.
    writes, reads
        Names of the tensors that the op writes, and of those whose values it reads: not indices,
        which have no gradient. At most the last of each is optional.
    name
        Of the op and its C++ function; by default that of the function.
    one_by_one
        See :class:`TorchOverload`.
    """

    def decorate(public: F) -> F:
        called = name or public.__name__
        parameters = inspect.signature(public).parameters
        source = _DIRECT.format(
            name=called,
            parameters=_parameters(parameters.values()),
            arguments=", ".join(map(_argument, parameters.values())),
            written=_tuple(parameters, writes),
            read=_tuple(parameters, reads),
            by_name=", ".join(f"{one}={one}" for one in parameters),
        )
        file = f"<jitkern op {called}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        functions: dict[str, Any] = {
            "AUTO": "auto",
            "OPTIONS": {p.name: _expected(p) for p in parameters.values() if not _is_tensor(p)},
            "dispatch": dispatch,
            "call_now": lambda *args: host.op_now(called, kernel)(*args),
        }
        functions["call"] = _first_call(called, kernel, functions)
        exec(compile(source, file, "exec"), functions)
        schema = _schema(called, parameters.values(), writes)
        overload = TorchOverload(schema, functions["now"], one_by_one=one_by_one)
        OVERLOADS.setdefault(called, []).append(overload)

        def traced(*args: Any, **options: Any) -> None:
            by_name = {**dict(zip(parameters, args, strict=False)), **options}
            dispatch.through_torch(called, **by_name)

        return cast("F", dispatch.traced_as(traced)(wraps(public)(functions[called])))

    return decorate


def _first_call(name: str, kernel: host.Builder, functions: dict[str, Any]) -> Callable[..., Any]:
    """Return what loads the host module at the first call, and stands aside from then on."""

    def call(*args: Any) -> Any:
        functions["call"] = host.op(name, kernel)
        return functions["call"](*args)

    return call


def _parameters(parameters: Any) -> str:
    """Return the signature without its annotations."""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(plain))[1:-1]


def _argument(parameter: inspect.Parameter) -> str:
    name = parameter.name
    # "is": an array as an option is no error before C++ says so.
    return f"None if {name} is AUTO else {name}" if isinstance(parameter.default, str) else name


def _is_tensor(parameter: inspect.Parameter) -> bool:
    return str(parameter.annotation).startswith("Tensor")


def _expected(parameter: inspect.Parameter) -> str:
    """Return what an argument that is no tensor should be, in the words of C++'s errors."""
    annotation = str(parameter.annotation)
    if words := [f'"{word}"' for word in re.findall("'([^']+)'", annotation)]:
        return f"{', '.join(words[:-1])} or {words[-1]}"
    return "a bool" if annotation == "bool" else "an int"


def _tuple(parameters: Any, names: Sequence[str]) -> str:
    """Return the source of a tuple of these tensors, without the last one where it is None."""
    every = "".join(f"{one}, " for one in names)
    if not names or parameters[names[-1]].annotation == "Tensor":
        return f"({every})"
    without = "".join(f"{one}, " for one in names[:-1])
    return f"(({without}) if {names[-1]} is None else ({every}))"


def _schema(name: str, parameters: Any, writes: Sequence[str]) -> str:
    """Return the operator's schema: ``name(Tensor src, Tensor(a!) dst, *, ...) -> ()``."""
    entries: list[str] = []
    for one in parameters:
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

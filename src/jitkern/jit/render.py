"""The text that NVRTC compiles: an entry point for each kernel, and what its Params are to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jitkern.jit.params import Param

# Name and template class of a kernel.
Wrapper = tuple[str, str]

_DECLARE = "declare the parameters as the third item of device_wrappers"


def render(
    includes: Sequence[str],
    wrappers: Sequence[Wrapper],
    params: Mapping[str, tuple[Param, ...]] = MappingProxyType({}),
) -> str:
    """Return the translation unit that gives each kernel class a plain C entry point.

    The compiler compares `params`, by the kernels' names, with their structs.

    Examples
    --------
    >>> print(render(["ops/copy.cu"], [("copy", "Copy<4>")]))
    #include <jitkern/launch_bounds.cuh>
    #include "ops/copy.cu"
    extern "C" __global__ void
    __launch_bounds__(jitkern::num_threads<Copy<4>>(0), jitkern::min_blocks<Copy<4>>(0))
    copy(const __grid_constant__ Copy<4>::Params params) {
      Copy<4>::run(params);
    }
    <BLANKLINE>
    """
    lines = ["#include <jitkern/launch_bounds.cuh>"]
    lines += ["#include <jitkern/declared.cuh>"] if any(params.values()) else []
    lines += [f'#include "{name}"' for name in includes]
    for export, kernel in wrappers:
        bounds = f"jitkern::num_threads<{kernel}>(0), jitkern::min_blocks<{kernel}>(0)"
        lines += ['extern "C" __global__ void', f"__launch_bounds__({bounds})"]
        lines.append(f"{export}(const __grid_constant__ {kernel}::Params params) {{")
        if params.get(export):
            lines.append(f"  using Params = {kernel}::Params;")
            lines += [f"  {check}" for check in _checks(export, params[export])]
        lines += [f"  {kernel}::run(params);", "}"]
    return "\n".join(lines) + "\n"


def _checks(kernel: str, params: tuple[Param, ...]) -> list[str]:
    """Return the lines that have the compiler compare `params` with the kernel's ``Params``.

    They need ``jitkern/declared.cuh``, and ``Params`` to name the struct.
    """
    lines, offset, alignment = [], 0, 1
    is_declared = all(param.is_declared for param in params)
    advice = "" if is_declared else f"; {_DECLARE}"
    for param in params:
        offset += -offset % param.nbytes + param.nbytes
        alignment = max(alignment, param.nbytes)
        fits = "points_to" if param.is_pointer else "is_number"
        asked = f"decltype(Params::{param.name}){{}}, '{param.kind}', {param.item_bytes}"
        other = f"{kernel}: taken as {param}, but Params has another type or order{advice}"
        lines.append(f'static_assert(jitkern::{fits}({asked}), "{other}");')
    members = ", ".join(map(str, params))
    size = offset + -offset % alignment
    has_others = f"{kernel}: Params has more members than {members}{advice}"
    lines.append(f'static_assert(sizeof(Params) == {size}, "{has_others}");')
    # By addresses, for NVRTC 13.0 has no __builtin_offsetof yet.
    names = [f"member{number}" for number in range(len(params))]
    same = " && ".join(
        f"jitkern::at({name}) == jitkern::at(p.{param.name})"
        for name, param in zip(names, params, strict=True)
    )
    is_so = f"[](Params p) {{ auto& [{', '.join(names)}] = p; return {same}; }}"
    other = f"{kernel}: taken as {members}, but Params has another type or order{advice}"
    lines += [f"constexpr auto is_so = {is_so};", f'static_assert(is_so(Params{{}}), "{other}");']
    return lines

"""``torch`` for signatures: PyTorch, imported by the first use of one of its names.

``typing.get_type_hints`` resolves the types of modules that take it from here, and ``jitkern
warm`` imports these modules without the second that PyTorch takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch as torch
else:

    class _Lazy:
        def __getattr__(self, name: str) -> object:
            import torch

            return vars(self).setdefault(name, getattr(torch, name))  # the next access finds it

    torch = _Lazy()

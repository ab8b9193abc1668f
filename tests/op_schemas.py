"""Write tests/op_schemas.txt: ``PYTHONPATH=src python tests/op_schemas.py``.

A graph in a warm inductor cache, or an exported program, calls ``torch.ops.jitkern.*`` with the
argument names of the version that made it. PyTorch does not notice that a schema has changed.
"""

from __future__ import annotations

from pathlib import Path

import torch

FROZEN = Path(__file__).with_suffix(".txt")


def op_schemas() -> list[str]:
    """Return the schemas of the operators ``torch.ops.jitkern.*``, sorted."""
    import jitkern.torch_ops  # noqa: F401 - registers them

    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith("jitkern::"))


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{schema}\n" for schema in op_schemas()))

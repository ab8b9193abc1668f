"""What a test needs of its machine, as marks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jitkern.compilers.find import find_cuda_home, find_cxx, find_nvrtc
from jitkern.errors import ToolchainError


def has(find: Callable[[], object]) -> bool:
    """Tell whether a compiler is found."""
    try:
        find()
    except ToolchainError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has(find_nvrtc), reason="needs NVRTC")
needs_nvcc = pytest.mark.skipif(not has(find_cuda_home), reason="needs a CUDA toolkit")
needs_cxx = pytest.mark.skipif(not has(find_cxx), reason="needs a C++ compiler")

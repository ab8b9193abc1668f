"""Launches of the kernels of a module. C++ checks and launches: csrc/host/user_launch.cc."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jitkern.arch import Arch
from jitkern.errors import UnsupportedError, name_unreadable
from jitkern.jit.params import Param

ParamsOf = Mapping[str, tuple[Param, ...]]
"""The members of each kernel's ``Params``, as far as they are known."""


class CpuForm(NamedTuple):
    """C++ functions that do on the CPU what the kernels in `names` do; `load` loads them."""

    names: frozenset[str] = frozenset()
    load: Callable[[], Any] = dict


class Launches:
    """The part of a ``DeviceModule`` that launches."""

    exports: tuple[str, ...]
    image: Callable[[Arch], bytes]
    _params: ParamsOf
    _cpu: CpuForm
    _launchers: dict[str, Callable[..., Any]]

    def launch(
        self,
        export: str,
        *args: Any,
        grid: int | Sequence[int],
        block: int | Sequence[int] | None = None,
        shared_bytes: int = 0,
        use_pdl: bool = False,
        cluster: int | Sequence[int] | None = None,
        cooperative: bool = False,
    ) -> None:
        """Launch a kernel on the current torch stream; returns at once.

        If all tensors are on the CPU, the C++ function of the kernel's name is called with the same
        arguments; grid, block and the like are only checked. The first call on a device loads the
        code, also while a stream is captured. The kernels of a module share ``__device__``
        variables.

        Parameters
        ----------
        export
            The kernel's name in ``device_wrappers``.
        *args
            Members of the kernel's ``Params``, in order. If these are known (see
            ``load_jit``), a number is converted to its member's type, and a tensor must
            be contiguous and of its dtype. Otherwise an int is ``long long``, a float ``double``, a
            bool ``bool``, and a driver for CUDA 12.4 or newer checks the bytes of all. A ctypes
            value keeps its type. An object with ``__dlpack__``, ``data_ptr()`` or
            ``__cuda_array_interface__`` is passed as its pointer.
        grid, block
            Numbers of blocks and threads, in one to three dimensions. A kernel whose class has
            ``kNumThreads`` has that many threads, also by default; any other requires `block`.
        shared_bytes
            Dynamic shared memory of a block, bytes, up to the GPU's limit (227 KiB on an H200).
        use_pdl
            Let the kernel start while the one before it drains (programmatic dependent launch, from
            compute capability 9.0 on; elsewhere without effect). It must call
            ``wait_for_earlier_kernels`` of ``jitkern/pdl.cuh`` before it touches what earlier
            kernels write.
        cluster
            Blocks of a thread block cluster, one to three sizes that divide the grid's.
        cooperative
            Have all blocks resident at once, so that they may wait for each other.

        Raises
        ------
        ValueError, TypeError
            An unknown kernel, an argument that does not fit its member, memory that this GPU cannot
            reach, sizes that no GPU has.
        UnsupportedError
            There is no GPU.
        CompileError, ToolchainError
            The first call on a device, or on the CPU, has to compile, and cannot.

        Examples
        --------
        >>> module.launch("copy", dst, src, 1024, grid=4)  # doctest: +SKIP
        """
        if export not in self.exports:
            known = ", ".join(self.exports)
            raise ValueError(f"launch: export: {export!r}, expected one of {known}")
        launch = self._launchers.get("") or self._make_launcher()
        kinds = set(map(type, args))
        members = args if _PLAIN.issuperset(kinds) else tuple(map(_readable, args))
        number = self.exports.index(export)
        how = (number, grid, block, shared_bytes, use_pdl, cooperative, cluster)
        # tvm-ffi passes the stream of a torch tensor to C++; asking torch for it takes 5 us.
        is_told = not _TENSORS.isdisjoint(kinds)
        try:
            wanted = launch(*how, -1, is_told, *members)
        except RuntimeError as error:
            names = [param.name for param in self._params.get(export, ())]
            names += [f"args[{i}]" for i in range(len(names), len(args))]
            name_unreadable(error, export, **dict(zip(names, args, strict=False)))
        if wanted is None:
            return
        if wanted == _ON_CPU:
            self._cpu.load()[export](*map(_for_cpu, args, members))
        else:
            launch(*how, *device_and_stream(wanted), *members)

    def _make_launcher(self) -> Callable[..., Any]:
        from jitkern.host import module as host

        # Weak, because C++ keeps the function: the module would hold itself.
        this = weakref.proxy(self)

        @host.through_cpp()
        def resolve(_op: str, _names: Any, _values: Any, arch: int) -> tuple[Any, ...]:
            return this.image(Arch(*divmod(arch, 10))), this.exports, ()

        # The name of each kernel, whether C++ does the same on the CPU, and its members.
        signatures = []
        for export in self.exports:
            members = [param.for_cpp() for param in self._params.get(export, ())]
            signatures.append((export, export in self._cpu.names, members))
        made = host.module()["make_launch"](resolve, signatures)
        # Of two threads one is first, and both launch from what it loads.
        return self._launchers.setdefault("", made)


# What C++ reads as it is. The classes of torch's tensors join both sets when they are first seen.
_PLAIN: set[type] = {int, float, bool}
_TENSORS: set[type] = set()
_ON_CPU = -2
"""What C++ answers, having checked all, if all tensors are on the CPU."""


def _readable(arg: Any) -> Any:
    """Return an argument as C++ reads it: a tensor, a number, bytes or a pointer."""
    if type(arg) in _PLAIN:
        return arg
    import torch
    import tvm_ffi

    if isinstance(arg, torch.Tensor):
        _PLAIN.add(type(arg))
        _TENSORS.add(type(arg))
        return arg
    if isinstance(arg, (ctypes._SimpleCData, ctypes.Structure)):
        return bytes([ctypes.alignment(arg)]) + bytes(arg)
    if hasattr(arg, "__dlpack__"):
        return tvm_ffi.from_dlpack(arg)
    if hasattr(arg, "data_ptr"):
        return ctypes.c_void_p(arg.data_ptr())
    if hasattr(arg, "__cuda_array_interface__"):
        return ctypes.c_void_p(arg.__cuda_array_interface__["data"][0])
    return arg  # C++ names it in a TypeError


def _for_cpu(arg: Any, member: Any) -> Any:
    """Return an argument for a C++ function: numbers of ctypes become plain ones."""
    is_number = isinstance(arg, ctypes._SimpleCData) and not isinstance(arg, ctypes.c_void_p)
    return arg.value if is_number else member


def device_and_stream(device: int) -> tuple[int, int]:
    """Return a device, the current one for -1, and torch's current stream on it."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("launch: there is no CUDA device")
    number = torch.cuda.current_device() if device < 0 else device
    return number, torch.cuda.current_stream(number).cuda_stream

"""``BlockBuffers`` and ``LayerSignals``, arguments of ``copy_blocks`` that are no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jitkern.args import device_arg, int_arg, refuse_lazy, type_text
from jitkern.errors import UNREADABLE, name_unreadable
from jitkern.host import library as host
from jitkern.lazy import torch


class BlockBuffers:
    """A KV cache that is a list of tensors, one per layer: one side of ``copy_blocks``.

    The tensors are checked once, here. Each call of ``copy_blocks`` then copies blocks of all
    layers in one launch. The first one uploads a table of addresses, 32 bytes per tensor, and
    cannot be captured. Writes do not bump the tensors' version counters.

    The list keeps the memory that its tensors have now: ``tensor.data = other`` changes the tensor
    but not the list. After a ``resize_`` of a tensor or its storage, which frees the memory, do not
    use the list: make a new one.

    Parameters
    ----------
    *tensors : sequence of Tensor
        One list with a tensor per layer, or several lists of equal length, such as K and V. With
        several lists their tensors alternate: K and V of layer 0, K and V of layer 1, and so on.
        One tensor is not a list: pass ``list(tensor)``. All tensors are on one device, have the
        same dtype and number of blocks, and are in pinned memory if the other side is on a GPU.
        Bytes per block may differ. A block is contiguous, or consists of equally spaced rows.
    num_block_dims : int
        1: the first dimension counts blocks. 2: the first two dimensions do, as in ``[pages,
        page_size, ...]`` with one block per token, or ``[cpu_blocks, factor, ...]`` with ``factor``
        GPU blocks in a CPU block. Block ``i`` is then ``[i // n, i % n]``.

    Raises
    ------
    TypeError, ValueError
        An argument is not a list of tensors; devices, dtypes or numbers of blocks differ; a block
        is not made of equally spaced rows.

    Examples
    --------
    >>> import torch, jitkern
    >>> k, v = ([torch.zeros(200, 16, 8) for _ in range(4)] for _ in "kv")
    >>> pool = torch.ones(1000, 8, 16 * 8)  # block first: K and V of each layer in turn
    >>> cache = jitkern.BlockBuffers(k, v)
    >>> jitkern.copy_blocks(pool, cache, torch.tensor([[7, 0], [999, 5]]), src_block_dim=0)
    >>> k[3][5].eq(1).all().item(), len(cache)
    (True, 8)
    """

    # Attributes of tensors that a call reads: a list has no gradient and no version counter.
    requires_grad: bool = False
    _version = 0

    def __init__(self, *tensors: Sequence[torch.Tensor], num_block_dims: int = 1) -> None:
        name = "BlockBuffers"
        lists = [_list_arg(sequence) for sequence in tensors]
        if len({len(tensor_list) for tensor_list in lists}) > 1:
            lengths = ", ".join(str(len(tensor_list)) for tensor_list in lists)
            raise ValueError(f"{name}: tensors: lists of {lengths}, expected equal lengths")
        layers = [tensor for layer in zip(*lists, strict=True) for tensor in layer]
        by_name = {f"tensors[{i}]": tensor for i, tensor in enumerate(layers)}
        for i, (argument, tensor) in enumerate(by_name.items()):
            if getattr(tensor, "requires_grad", False):
                text = "requires a gradient, expected none; pass .detach()"
                raise ValueError(f"{name}: {argument}: {text}")
            if isinstance(tensor, torch.Tensor):
                refuse_lazy(name, **{argument: tensor})
                layers[i] = tensor.detach()  # `tensor.data = other` leaves it as it is
        self._length = len(layers)
        try:
            self._handle: Any = host.module()["make_block_buffers"](layers, num_block_dims)
        except UNREADABLE as error:
            name_unreadable(error, name, **by_name)

    @classmethod
    def from_trusted_addresses(
        cls,
        addresses: Sequence[int] | torch.Tensor,
        block_bytes: int | Sequence[int],
        num_blocks: int,
        *,
        device: torch.device | str | int | None = None,
        block_stride_bytes: Sequence[int] | None = None,
    ) -> BlockBuffers:
        """Return a list of buffers at given addresses, such as an engine's pointer table.

        Nothing is checked: a wrong address or size corrupts memory or ends the process. Keep the
        memory allocated. Host memory must be pinned and have the same address on the GPU. The
        other side of a copy may have any dtype.

        Parameters
        ----------
        addresses : sequence of int or Tensor
            The address of block 0 of each layer. A tensor on the GPU is read once, here, which
            synchronises.
        block_bytes : int or sequence of int
            Bytes per block in each layer.
        num_blocks : int
        device : torch.device, str or int, optional
            The device of the memory; "cpu" for host memory. Default: the current GPU, or the CPU if
            there is none.
        block_stride_bytes : sequence of int, optional
            Bytes from one block to the next in each layer. Default: ``block_bytes``.
        """
        name = "BlockBuffers.from_trusted_addresses"

        def ints(argument: str, numbers: Any) -> list[int]:
            numbers = numbers.tolist() if hasattr(numbers, "tolist") else numbers
            if not isinstance(numbers, Sequence) or isinstance(numbers, str | bytes):
                raise TypeError(f"{name}: {argument}: {type_text(numbers)}, expected ints")
            return [int_arg(name, f"{argument}[{i}]", n, 1) for i, n in enumerate(numbers)]

        values = ints("addresses", addresses)
        if not values:
            raise ValueError(f"{name}: addresses: none, expected at least one")
        if isinstance(block_bytes, int):
            block_bytes = [int_arg(name, "block_bytes", block_bytes, 1)] * len(values)
        sizes = ints("block_bytes", block_bytes)
        strides = sizes
        if block_stride_bytes is not None:
            strides = ints("block_stride_bytes", block_stride_bytes)
        for argument, counts in (("block_bytes", sizes), ("block_stride_bytes", strides)):
            if len(counts) != len(values):
                text = f"{len(counts)} values, expected {len(values)} as in addresses"
                raise ValueError(f"{name}: {argument}: {text}")
        num_blocks = int_arg(name, "num_blocks", num_blocks, 0)
        place = device_arg(name, "device", device)
        ordinal = place.index if place.type == "cuda" else -1
        buffers = cls.__new__(cls)
        buffers._length = len(values)
        make = host.module()["trust_block_buffers"]
        buffers._handle = make(values, sizes, strides, num_blocks, ordinal)
        return buffers

    def __len__(self) -> int:
        """Return the number of buffers."""
        return self._length

    def __repr__(self) -> str:
        return f"BlockBuffers({host.module()['block_buffers_text'](self._handle)})"

    def __tvm_ffi_object__(self) -> Any:
        return self._handle


def _list_arg(tensors: Any) -> list[Any]:
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        advice = "a list of tensors, one per layer"
        if hasattr(tensors, "__dlpack__"):
            advice += ": BlockBuffers([a, b, c]), or list(tensor)"
        raise TypeError(f"BlockBuffers: tensors: {type_text(tensors)}, expected {advice}")
    return list(tensors)


class LayerSignals:
    """Signals to streams and to the host which layers of a ``copy_blocks`` have arrived.

    So attention of layer 0 can start while later layers are still being copied. Only one copy at a
    time may use the signals; each copy resets them. CUDA graphs cannot capture them.

    A wait always ends: it can be queued only after the copy, and the copy sets the flags of all
    layers, even if it skips blocks that are out of range. The next jitkern call on the device, or
    ``jitkern.check``, raises IndexError for those.

    Parameters
    ----------
    num_layers : int
        Number of flags. It divides the number of buffers of the copy; each flag stands for a group
        of consecutive buffers, such as K and V of a layer.
    device : torch.device, str or int, optional
        The GPU of the copies. Default: the current GPU, or the CPU if there is none. On the CPU all
        layers are done when ``copy_blocks`` returns.

    Examples
    --------
    >>> import torch, jitkern
    >>> cache = [torch.zeros(20, 64) for _ in range(4)]
    >>> pool = torch.ones(100, 4, 64)
    >>> signals = jitkern.LayerSignals(4, device="cpu")
    >>> pairs = torch.tensor([[3, 0]])
    >>> copy = dict(src_block_dim=0, signals=signals)
    >>> jitkern.copy_blocks(pool, jitkern.BlockBuffers(cache), pairs, **copy)
    >>> signals.wait(0)  # the current stream: attention of layer 0 may follow
    >>> signals.is_done(3)
    True
    """

    def __init__(self, num_layers: int, *, device: torch.device | str | int | None = None) -> None:
        self.num_layers: int = int_arg("LayerSignals", "num_layers", num_layers, 1)
        self.device: torch.device = device_arg("LayerSignals", "device", device)
        on_gpu = self.device.type == "cuda"
        with torch.inference_mode(False):
            how: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
            flags = torch.zeros(self.num_layers, **how, pin_memory=on_gpu)
            num_past = torch.zeros(self.num_layers, **{**how, "device": self.device})
        if on_gpu:
            torch.cuda.current_stream(self.device).synchronize()  # before copies on other streams
        module: Any = host.module()
        self._handle: Any = module["make_layer_signals"](flags, num_past)
        self._wait, self._is_done = module["wait_layer_signal"], module["is_layer_done"]

    def wait(self, layer: int, stream: torch.cuda.Stream | None = None) -> None:
        """Make ``stream`` (default: torch's current one) wait until this layer has arrived.

        The wait is a stream memory operation: no kernel runs, and the host does not wait.

        Raises
        ------
        IndexError
            No such layer.
        RuntimeError
            No copy was queued with these signals, or a graph is being captured.
        """
        layer = self._layer_arg("LayerSignals.wait", layer)
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            text = f"{type_text(stream)}, expected a torch.cuda.Stream or None"
            raise TypeError(f"LayerSignals.wait: stream: {text}")
        handle = 0
        if self.device.type == "cuda":
            handle = (stream or torch.cuda.current_stream(self.device)).cuda_stream
        self._wait(self._handle, layer, handle)

    def is_done(self, layer: int) -> bool:
        """Tell whether this layer of the last copy has arrived, without a driver call."""
        return bool(self._is_done(self._handle, self._layer_arg("LayerSignals.is_done", layer)))

    def _layer_arg(self, call: str, layer: int) -> int:
        if type(layer) is int and 0 <= layer < self.num_layers:
            return layer
        return int_arg(call, "layer", layer, 0, self.num_layers - 1, error=IndexError)

    def __repr__(self) -> str:
        num_done = sum(map(self.is_done, range(self.num_layers)))
        return f"LayerSignals({num_done} of {self.num_layers} layers done, on {self.device})"

    def __tvm_ffi_object__(self) -> Any:
        return self._handle

"""GatheredWeight: a weight that was quantized shard by shard and gathered as bytes, as its layer finds it.

It stands where the parameter stands while FSDP2 has it unsharded: the layer reads its buffers, autograd gives it an
ordinary gradient of its dtype, and nothing else can be done with it. Its buffers are the same tensors from step to
step; whoever gathers takes their memory away and refills them, between forward and backward too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.tensors.quantized_tensor import QuantizedOpError, QuantizedTensor, _buffer_property
from te_dist.tensors.storage import _STORAGE_CLASSES as STORAGE_CLASSES
from te_dist.tensors.storage import QuantizedStorage

aten = torch.ops.aten


class Gathering:
    """What the gatherer and the layer tell each other about a weight.

    Attributes:
        name: of the parameter, for messages.
        recipe: under which it was quantized.
        recomputed: set by the layer when it sees that backward will compute this forward again.
        amax: float32 [1], of the whole weight, or [E] of a stack: what the layer records under delayed scaling.
    """

    __slots__ = ("amax", "name", "recipe", "recomputed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.recipe: Any = None
        self.recomputed = False
        self.amax: Tensor | None = None


class GatheredWeight(QuantizedTensor):
    """All aliases of it (a Parameter is one) share the storage and the Gathering.

    It may be a part: one of several parameters that a layer joins to one weight. Then the storage is that of the whole
    weight, which the parts share, the tensor's shape is that of its own rows, and ``torch.cat`` of all of them, which
    is what the layer does, gives the whole without touching a byte.

    Or it may be a stack [E, N, K] of several weights in one parameter. Then each buffer of the storage has a leading
    dimension of E, and ``unbind``, which is what the layer does, gives the weights.
    """

    gathering: Gathering
    rows: tuple[int, int]  # of the storage: from, to
    group = 0  # of a weight of a stack

    @property
    def weight_amaxes(self) -> Tensor:
        """Of the unquantized weight, or of each weight of the stack that it is, or is one of."""
        if self.gathering.amax is None:
            raise RuntimeError(f"{self.gathering.name} was gathered without its amax")
        return self.gathering.amax

    def buffer_of(self, name: str, group: int) -> Tensor:
        """A buffer, of a stack that of one weight."""
        buffer: Tensor = getattr(self, name)
        return buffer[group] if self.is_stack else buffer

    @property
    def is_stack(self) -> bool:
        return self.dim() == 3

    @staticmethod
    def __new__(
        cls: type[GatheredWeight],
        storage: QuantizedStorage,
        gathering: Gathering,
        rows: tuple[int, int] | None = None,
        *,
        requires_grad: bool = False,
    ) -> GatheredWeight:
        first, last = rows = (0, storage.shape[0]) if rows is None else rows
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            (last - first, *storage.shape[1:]),
            dtype=storage.dtype,
            device=storage.device,
            requires_grad=requires_grad,
        )
        made.quantized_storage, made.gathering, made.rows = storage, gathering, rows
        return made

    @property
    def is_part(self) -> bool:
        return self.shape != self.quantized_storage.shape

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        if not has_memory(self.quantized_storage):
            raise RuntimeError(f"{self.gathering.name} is not unsharded; unshard() its FSDP module first")
        if self.is_stack:
            return torch.stack([unit.dequantize(dtype=dtype) for unit in unstacked(self.quantized_storage)])
        whole = super().dequantize(dtype=dtype)
        return whole[slice(*self.rows)] if self.is_part else whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without values: whoever prints it, a debugger perhaps, need not know whether it has memory now."""
        state = "unsharded" if has_memory(self.quantized_storage) else "without memory"
        layout = self.quantized_storage.quantizer.describe()
        return f"GatheredWeight({self.gathering.name!r}, {list(self.shape)}, {self.dtype}, {layout}, {state})"

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names, metadata = super().__tensor_flatten__()
        return names, metadata | {"rows": self.rows}

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> GatheredWeight:
        storage = QuantizedStorage.__tensor_unflatten__(inner, metadata)
        # Inside a graph: what is said through the Gathering is said before it runs.
        return GatheredWeight(storage, Gathering(""), metadata["rows"], requires_grad=metadata["requires_grad"])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise QuantizedOpError(f"{self.gathering.name} is unsharded and cannot be copied; reshard() the model first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuantizedOpError(f"{self.gathering.name} is unsharded and cannot be saved; reshard() the model first")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        own = args[0] if args else None
        if isinstance(own, GatheredWeight):
            same_shape = func in (aten.view.default, aten.as_strided.default) and list(args[1]) == list(own.shape)
            if same_shape or func in (aten.detach.default, aten.alias.default):
                return GatheredWeight(own.quantized_storage, own.gathering, own.rows)
            if func in (aten.zeros_like.default, aten.empty_like.default):  # a gradient, or an optimizer's state
                like = torch.empty(own.shape, dtype=own.dtype, device="meta")
                return func(like, **{"device": own.device, **(kwargs or {})})
            if func is aten.unbind.int and own.is_stack and args[1:] in ((), (0,)):
                units = [GatheredWeight(unit, own.gathering) for unit in unstacked(own.quantized_storage)]
                for group, unit in enumerate(units):
                    unit.group = group
                return units
        elif func is aten.cat.default and not kwargs and args[1:] in ((), (0,)) and _is_whole(own):
            return GatheredWeight(own[0].quantized_storage, own[0].gathering)  # type: ignore[index]
        return super().__torch_dispatch__(func, types, args, kwargs)


def unstacked(storage: QuantizedStorage) -> list[QuantizedStorage]:
    """The weights of a stack, as views."""
    count, shape = storage.shape[0], storage.shape[1:]
    names, buffers = storage.inner_names(), storage.inner_tensors()
    return [
        type(storage)(
            {name: buffer[group] for name, buffer in zip(names, buffers, strict=True)},
            shape=shape,
            dtype=storage.dtype,
            quantizer=storage.quantizer,
        )
        for group in range(count)
    ]


def _is_whole(parts: Any) -> bool:
    """Whether these are all parts of one weight, in order."""
    at = 0
    for part in parts:
        if not isinstance(part, GatheredWeight) or part.rows[0] != at:
            return False
        at = part.rows[1]
    return at == parts[0].quantized_storage.shape[0]


# Dynamo and AOTAutograd reach the buffers as attributes of the tensor.
for _storage_class in STORAGE_CLASSES.values():
    for _name in _storage_class.BUFFERS:
        setattr(GatheredWeight, _name, _buffer_property(_name))


def has_memory(storage: QuantizedStorage) -> bool:
    """Whether the first plane that a storage holds has its bytes. Kernels read bare memory: ask before they do."""
    first = getattr(storage, storage.inner_names()[0])
    return first.numel() == 0 or first.untyped_storage().size() > 0


def stand_in(param: Tensor | None) -> Tensor | None:
    """What a compiled graph's ops get for a parameter: for a gathered weight, something of its shape and dtype."""
    if not isinstance(param, GatheredWeight):
        return param
    return torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)

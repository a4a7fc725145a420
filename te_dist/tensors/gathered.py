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
        amax: float32 [1], of the whole weight: what the layer records under delayed scaling.
    """

    __slots__ = ("amax", "name", "recipe", "recomputed")

    def __init__(self, name: str) -> None:
        self.name = name
        self.recipe: Any = None
        self.recomputed = False
        self.amax: Tensor | None = None


class GatheredWeight(QuantizedTensor):
    """All aliases of it (a Parameter is one) share the storage and the Gathering."""

    gathering: Gathering

    @property
    def weight_amax(self) -> Tensor:
        """Of the unquantized weight."""
        if self.gathering.amax is None:
            raise RuntimeError(f"{self.gathering.name} was gathered without its amax")
        return self.gathering.amax

    @staticmethod
    def __new__(
        cls: type[GatheredWeight],
        storage: QuantizedStorage,
        gathering: Gathering,
        *,
        requires_grad: bool = False,
    ) -> GatheredWeight:
        made = QuantizedTensor.__new__(cls, storage, requires_grad=requires_grad)
        assert isinstance(made, GatheredWeight)
        made.gathering = gathering
        return made

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> GatheredWeight:
        storage = QuantizedStorage.__tensor_unflatten__(inner, metadata, outer_size, outer_stride)
        # Inside a graph: what is said through the Gathering is said before it runs.
        return GatheredWeight(storage, Gathering(""), requires_grad=metadata["requires_grad"])

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
                return GatheredWeight(own.quantized_storage, own.gathering)
            if func in (aten.zeros_like.default, aten.empty_like.default):  # a gradient, or an optimizer's state
                like = torch.empty(own.shape, dtype=own.dtype, device="meta")
                return func(like, **{"device": own.device, **(kwargs or {})})
        return super().__torch_dispatch__(func, types, args, kwargs)


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

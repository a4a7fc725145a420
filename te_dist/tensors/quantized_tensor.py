"""QuantizedTensor: a storage that PyTorch sees as a tensor.

Used where PyTorch must hold one (parameters, user code), never on a hot path. It supports what keeps the quantized
bytes: detach, clone, copy_, views that keep the last dimension, moving, saving. Any other operation raises and names
itself, instead of dequantizing in silence; ``implicit_dequantization()`` allows and counts it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from te_dist.tensors.blockwise import Float8BlockwiseQTensorStorage
from te_dist.tensors.float8 import Float8TensorStorage
from te_dist.tensors.identity import IdentityTensorStorage
from te_dist.tensors.mxfp8 import MXFP8TensorStorage
from te_dist.tensors.nvfp4 import NVFP4TensorStorage
from te_dist.tensors.storage import QuantizedStorage

aten = torch.ops.aten


class QuantizedOpError(RuntimeError):
    """An operation that a QuantizedTensor has no quantized form for.

    Not a TypeError: Python's operators turn that into "unsupported operand", which names no operation.
    """


# ------------------------------------------------------------------------------------------------- counting
class _ImplicitDequantizations:
    """How often a quantized tensor was turned into a plain one without ``dequantize()`` being called."""

    def __init__(self) -> None:
        self.allowed = 0
        self.by_op: dict[str, int] = {}

    def record(self, op: str) -> None:
        self.by_op[op] = self.by_op.get(op, 0) + 1


_implicit = _ImplicitDequantizations()


def implicit_dequantizations() -> dict[str, int]:
    """Number of implicit dequantizations in this process, by operation."""
    return dict(_implicit.by_op)


def reset_implicit_dequantizations() -> None:
    _implicit.by_op.clear()


@contextlib.contextmanager
def implicit_dequantization() -> Iterator[None]:
    """Inside this block an operation that has no quantized form runs on dequantized operands, and is counted."""
    _implicit.allowed += 1
    try:
        yield
    finally:
        _implicit.allowed -= 1


# ------------------------------------------------------------------------------------------------- the tensor
class QuantizedTensor(Tensor):
    """A tensor whose data is a QuantizedStorage, reachable as ``quantized_storage``."""

    _storage_cls: ClassVar[type[QuantizedStorage] | None] = None
    quantized_storage: QuantizedStorage

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls._storage_cls is not None:
            _WRAPPERS[cls._storage_cls] = cls
            for name in cls._storage_cls.BUFFERS:
                setattr(cls, name, _buffer_property(name))

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor], storage: QuantizedStorage, *, requires_grad: bool = False
    ) -> QuantizedTensor:
        if not isinstance(storage, QuantizedStorage):
            raise TypeError(f"{cls.__name__} expects a QuantizedStorage but got {type(storage).__name__}")
        tensor: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls,
            storage.shape,
            dtype=storage.dtype,
            device=storage.device,
            requires_grad=requires_grad,
        )
        tensor.quantized_storage = storage
        return tensor

    @property
    def quantizer(self) -> Any:
        return self.quantized_storage.quantizer

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values as a plain tensor; gradients pass straight through."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Dequantize.apply(self, dtype)
        return self.quantized_storage.dequantize(dtype=dtype)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise QuantizedOpError(f"{type(self).__name__}.data cannot be replaced; copy_() takes over a tensor's values")

    # ---------------------------------------------------------------------------------------- flattening, copies
    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        names, metadata = self.quantized_storage.__tensor_flatten__()
        # The layout as a value: torch.compile guards on it, and delayed scaling's quantizer compares by identity.
        quantizer = metadata["quantizer"].layout_quantizer()
        return names, metadata | {"requires_grad": self.requires_grad, "quantizer": quantizer}

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> QuantizedTensor:
        storage = QuantizedStorage.__tensor_unflatten__(inner, metadata, outer_size, outer_stride)
        return wrap(storage, requires_grad=metadata["requires_grad"])

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if id(self) not in memo:
            storage = self.quantized_storage.clone()
            storage.quantizer = copy.deepcopy(storage.quantizer, memo)
            copied = wrap(storage, requires_grad=self.requires_grad)
            if getattr(self, "_is_param", False):  # how nn.Parameter marks a tensor subclass
                copied._is_param = True
            if self.grad is not None:
                copied.grad = self.grad.clone()
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A file holds the layout, not delayed scaling's live state: what is loaded has a current-scaling quantizer.
        storage = self.quantized_storage
        quantizer = storage.quantizer.layout_quantizer()
        inner = dict(zip(storage.inner_names(), storage.inner_tensors(), strict=True))
        return _rebuild_tensor, (
            type(storage).__name__,
            inner,
            tuple(storage.shape),
            storage.dtype,
            type(quantizer).__name__,
            quantizer._value_items(),
            self.requires_grad,
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        storage = self.quantized_storage
        values = "..."
        if not self.is_meta and storage.numel() and not _is_fake(storage.inner_tensors()[0]):
            first = storage.dequantize(dtype=torch.float32).flatten()[:4].tolist()
            values = ", ".join(f"{value:.4g}" for value in first)
            values += ", ..." if storage.numel() > 4 else ""
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}([{values}], {storage.summary()}{grad})"

    # ---------------------------------------------------------------------------------------- dispatch
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if not _implicit.allowed:
            raise QuantizedOpError(
                f"{func} is not supported on {cls.__name__}; call .dequantize() first, or allow it with "
                f"te_dist.implicit_dequantization()"
            )
        for argument, value in _written(func, args, kwargs):
            if isinstance(value, QuantizedTensor):
                raise QuantizedOpError(f"{func} would write {argument} into a {cls.__name__}; quantize a new value")
        _implicit.record(str(func))
        plain = tree_map(_dequantized, (tuple(args), kwargs))
        return func(*plain[0], **plain[1])


_WRAPPERS: dict[type[QuantizedStorage], type[QuantizedTensor]] = {}


def _buffer_property(name: str) -> property:
    return property(lambda self: getattr(self.quantized_storage, name))


class Float8Tensor(QuantizedTensor):
    _storage_cls = Float8TensorStorage


class Float8BlockwiseQTensor(QuantizedTensor):
    _storage_cls = Float8BlockwiseQTensorStorage


class MXFP8Tensor(QuantizedTensor):
    _storage_cls = MXFP8TensorStorage


class NVFP4Tensor(QuantizedTensor):
    _storage_cls = NVFP4TensorStorage


class IdentityTensor(QuantizedTensor):
    _storage_cls = IdentityTensorStorage


def wrap(storage: QuantizedStorage, *, requires_grad: bool = False) -> QuantizedTensor:
    """The QuantizedTensor around a storage; it shares the buffers."""
    cls = _WRAPPERS.get(type(storage), QuantizedTensor)
    return cls(storage, requires_grad=requires_grad)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of every argument that an op writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name, args[position] if position < len(args) else kwargs.get(argument.name)


def _is_fake(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor


def _dequantized(value: Any) -> Any:
    return value.quantized_storage.dequantize() if isinstance(value, QuantizedTensor) else value


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype = tensor.dtype
        return tensor.quantized_storage.dequantize(dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


# ------------------------------------------------------------------------------------------------- supported ops
def _detach(tensor: QuantizedTensor) -> QuantizedTensor:
    return wrap(tensor.quantized_storage.detach())


def _clone(tensor: QuantizedTensor, *, memory_format: torch.memory_format | None = None) -> QuantizedTensor:
    return wrap(tensor.quantized_storage.clone())


def _view(tensor: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    sizes = list(shape)
    if -1 in sizes:
        known = -torch.Size(sizes).numel()
        if known <= 0 or tensor.numel() % known:
            raise ValueError(f"view: {list(shape)} does not fit a tensor of shape {list(tensor.shape)}")
        sizes[sizes.index(-1)] = tensor.numel() // known
    return wrap(tensor.quantized_storage.view(sizes))


def _to_copy(
    tensor: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    layout: torch.layout | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> QuantizedTensor:
    """Another nominal dtype or device, as ``nn.Module.to`` asks; the quantized bytes stay."""
    storage = tensor.quantized_storage.to(device=device, dtype=dtype, non_blocking=non_blocking)
    same = device is None or torch.device(device) == tensor.device
    return wrap(storage.clone() if same else storage)


def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(destination, QuantizedTensor):
        assert isinstance(source, QuantizedTensor)
        _implicit.record("aten.copy_ into a plain tensor")
        return destination.copy_(source.quantized_storage.dequantize())
    storage = destination.quantized_storage
    if isinstance(source, QuantizedTensor):
        storage.copy_(source.quantized_storage)
    else:
        if source.shape != storage.shape:
            raise ValueError(
                f"copy_ into {type(destination).__name__} expects shape {list(storage.shape)} but got "
                f"{list(source.shape)}"
            )
        storage.quantizer.quantize(source.to(storage.device), out=storage)
    return destination


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
    aten._has_compatible_shallow_copy_type.default: lambda *_: False,
}


# ------------------------------------------------------------------------------------------------- serialization
_QUANTIZER_CLASSES: dict[str, type] = {}


def register_loadable_quantizer(cls: type) -> None:
    """Let ``torch.load(weights_only=True)`` rebuild tensors of this quantizer: files name it, never import it."""
    _QUANTIZER_CLASSES[cls.__name__] = cls


def _rebuild_tensor(
    storage_name: str,
    inner: dict[str, Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantizer_name: str,
    quantizer_items: tuple[tuple[str, Any], ...],
    requires_grad: bool,
) -> QuantizedTensor:
    from te_dist.tensors.storage import storage_class

    if quantizer_name not in _QUANTIZER_CLASSES:
        raise ValueError(
            f"the file holds a tensor of quantizer {quantizer_name!r}; known: {sorted(_QUANTIZER_CLASSES)}"
        )
    quantizer = _QUANTIZER_CLASSES[quantizer_name](**dict(quantizer_items))
    cls = storage_class(storage_name)
    storage = cls(inner, shape=shape, dtype=dtype, quantizer=quantizer)
    storage.check_buffers()  # a file is not to be trusted with sizes that kernels will rely on
    return wrap(storage, requires_grad=requires_grad)


torch.serialization.add_safe_globals([_rebuild_tensor])

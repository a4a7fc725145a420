"""Quantizer: how a tensor is quantized, as an immutable value.

Two quantizers with equal fields are equal, hash alike and quantize bit-identically, which is what lets torch.compile
bake one into a graph as a constant. A quantizer holds no tensor, no device and above all no process group: an amax
reduction group is an argument of each ``quantize`` call.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import INPUT_DTYPES, DType, short_name
from te_dist.groups import GroupLike, group_name, holds_group
from te_dist.producers import Producer
from te_dist.quantizers.checks import check_has_dimensions, check_small_tensor, group_refused
from te_dist.tensors.quantized_tensor import QuantizedTensor, register_loadable_quantizer, wrap
from te_dist.tensors.storage import QuantizedStorage
from te_dist.torch_compat import OpaqueBase, register_value_type

BufferSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
Q = TypeVar("Q", bound="Quantizer")

_PLAIN = (bool, int, float, str, enum.Enum, type(None))
# Where an instance remembers the buffers it has described; no part of its value.
_LAYOUTS = "_layouts"


class Quantizer(OpaqueBase):
    """Base of all quantizers.

    A subclass declares its fields in ``_value_fields``, assigns each of them once in ``__init__``, and says which
    buffers it fills. ``register_value_quantizer`` gives it value semantics; without that it compares by identity.
    """

    _value_fields: ClassVar[tuple[str, ...]] = ("rowwise", "columnwise")
    _value_opaque: ClassVar[bool] = False
    storage_cls: ClassVar[type[QuantizedStorage]]

    rowwise: bool
    columnwise: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Not inherited: a subclass may hold what its parent's value key does not know of.
        cls._value_opaque = False

    # ---------------------------------------------------------------------------------------- value semantics
    def __setattr__(self, name: str, value: Any) -> None:
        if holds_group(value):
            raise TypeError(group_refused(type(self).__name__, name))
        if name not in type(self)._value_fields:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        if name in self.__dict__:
            raise AttributeError(f"{type(self).__name__} is immutable; with_usage() and replace() return another one")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable")

    def _value_key(self) -> tuple[Any, ...]:
        """The one way to a quantizer's value: equality, hash, graph constants and copies all pass here.

        That makes it the place to refuse a process group, however it got in.
        """
        for name, value in self.__dict__.items():
            if name != _LAYOUTS and holds_group(value):
                raise TypeError(group_refused(type(self).__name__, name))
        if not type(self)._value_opaque:
            return (type(self), id(self))
        values = tuple(getattr(self, name) for name in type(self)._value_fields)
        for name, value in zip(type(self)._value_fields, values, strict=True):
            if not isinstance(value, _PLAIN):
                raise TypeError(
                    f"{type(self).__name__}.{name} expects a number, a string, an enum or None but holds "
                    f"{type(value).__name__}"
                )
        return (type(self), *values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quantizer):
            return NotImplemented
        return self._value_key() == other._value_key()

    def __hash__(self) -> int:
        return hash(self._value_key())

    def _value_items(self) -> tuple[tuple[str, Any], ...]:
        _, *values = self._value_key()
        plain = (v.value if isinstance(v, enum.Enum) else v for v in values)
        return tuple(zip(type(self)._value_fields, plain, strict=True))

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that rebuilds this value inside generated code, and the names it uses."""
        if not type(self)._value_opaque:
            self._value_key()
            raise TypeError(
                f"{type(self).__name__} compares by identity and cannot be a constant of a compiled graph; "
                f"register it with te_dist.register_value_quantizer"
            )
        cls = type(self)
        name = f"{cls.__module__}.{cls.__qualname__}".replace(".", "_").replace("<locals>", "")
        return f"_rebuild_quantizer({name}, {self._value_items()!r})", {
            name: cls,
            "_rebuild_quantizer": _rebuild_quantizer,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        if type(self)._value_opaque:
            return _rebuild_quantizer, (type(self), self._value_items())
        self._value_key()
        return _rebuild_state, (type(self), {n: v for n, v in self.__dict__.items() if n != _LAYOUTS})

    def __copy__(self: Q) -> Q:
        return self.__deepcopy__({})

    def __deepcopy__(self: Q, memo: dict[int, Any]) -> Q:
        self._value_key()
        return self  # nothing in it can change

    def copy(self: Q) -> Q:
        return self.__copy__()

    def describe(self) -> str:
        """The format in a few words, for tables and tensor reprs."""
        return type(self).__name__

    def __repr__(self) -> str:
        fields = (f"{name}={_shown(self.__dict__.get(name))}" for name in type(self)._value_fields)
        return f"{type(self).__name__}({', '.join(fields)})"

    # ---------------------------------------------------------------------------------------- other values
    def replace(self: Q, **changes: Any) -> Q:
        """The same quantizer with some fields changed; the original stays as it is."""
        cls = type(self)
        for name in changes:
            if name not in cls._value_fields:
                raise TypeError(f"{cls.__name__}.replace got {name!r}; its fields are {cls._value_fields}")
        values = {name: getattr(self, name) for name in cls._value_fields} | changes
        return cls(**values)

    def with_usage(self: Q, *, rowwise: bool | None = None, columnwise: bool | None = None) -> Q:
        """Another value that produces the given planes; None keeps the flag."""
        rowwise = self.rowwise if rowwise is None else rowwise
        columnwise = self.columnwise if columnwise is None else columnwise
        if rowwise == self.rowwise and columnwise == self.columnwise:
            return self
        return self.replace(rowwise=rowwise, columnwise=columnwise)

    @property
    def rowwise_usage(self) -> bool:
        return self.rowwise

    @property
    def columnwise_usage(self) -> bool:
        return self.columnwise

    def _check_usage(self) -> None:
        if not (self.rowwise or self.columnwise):
            raise ValueError(f"{type(self).__name__} expects rowwise or columnwise to be True")

    def layout_quantizer(self) -> Quantizer:
        """The value quantizer whose storages have this one's layout (itself, unless it has live state)."""
        return self

    def layout_key(self) -> tuple[Any, ...]:
        """What must agree for one storage to take over another's bytes."""
        return self.layout_quantizer()._value_key()

    # ---------------------------------------------------------------------------------------- allocation
    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        """Shape and dtype of every buffer for a tensor of that logical shape and dtype, in the storage's order."""
        raise NotImplementedError(f"{type(self).__name__} must define _describe_buffers")

    def _storage_metadata(self, dtype: torch.dtype) -> dict[str, Any]:
        """What a storage needs besides buffers and shape."""
        return {"dtype": dtype, "quantizer": self}

    def alloc_tensors(
        self,
        shape: Sequence[int],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> dict[str, Tensor]:
        """Uninitialised buffers, the same ones that quantize() fills."""
        self._check_shape(shape)
        return {
            name: torch.empty(size, dtype=buffer_dtype, device=device)
            for name, (size, buffer_dtype) in self._describe_buffers(shape, dtype).items()
        }

    def create_metadata(
        self, shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """The context from which ``__tensor_unflatten__`` rebuilds a storage around its buffers."""
        return {
            "cls": self.storage_cls.__name__,
            "shape": torch.Size(shape),
            "requires_grad": requires_grad,
            **self._storage_metadata(dtype),
        }

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> QuantizedStorage:
        """A storage with uninitialised buffers, for ``quantize(out=...)``."""
        buffers = self.alloc_tensors(shape, device=device, dtype=dtype)
        return self.storage_cls(buffers, shape=shape, dtype=dtype, quantizer=self)

    def _new_storage(self, x: Tensor) -> QuantizedStorage:
        """Where quantize() writes if the caller gives no `out`."""
        buffers = self.alloc_tensors(x.shape, device=x.device, dtype=x.dtype)
        return self.storage_cls(buffers, shape=x.shape, dtype=x.dtype, quantizer=self)

    # ---------------------------------------------------------------------------------------- quantize
    def quantize(
        self,
        x: Tensor,
        *,
        amax_reduction_group: GroupLike | None = None,
        out: QuantizedStorage | None = None,
        noop: Tensor | None = None,
        rng_state: Tensor | None = None,
    ) -> QuantizedStorage:
        """Quantize `x` [..., K] (float32, float16 or bfloat16).

        Args:
            amax_reduction_group: ProcessGroup, one-dimensional DeviceMesh or group name. Scales that depend on the
                whole tensor then come from the maximum over the group, so a shard is quantized like the slice of the
                unsharded tensor. Every member must call, also with an empty shard. Formats whose scales are local to
                a block need no reduction and only check the group. Blocks that span rows (128, 32 or 16 of them)
                must not straddle two shards, and stochastic rounding draws by position in the shard.
            out: a storage of the same format, shape, planes and device to write into.
            noop: float32 [1] on x's device; if it is not 0, `out` stays untouched. Read on the device.
            rng_state: int64 [2] (seed, offset) for stochastic rounding; drawn from torch's generator if omitted.

        Example:
            >>> import torch, te_dist
            >>> quantizer = te_dist.Float8CurrentScalingQuantizer("e4m3")
            >>> storage = quantizer.quantize(torch.ones(4, 32))
            >>> storage.dequantize().sum().item()
            128.0
        """
        if noop is not None and out is None:
            raise ValueError(f"{type(self).__name__}.quantize: noop needs out=, without it there is nothing to keep")
        if torch.compiler.is_compiling():
            # The op has no gradient: quantization ends the graph, as it does in eager.
            return self._quantize_compiled(x.detach(), group_name(amax_reduction_group), out, noop, rng_state)
        self._check_input(x)
        if out is not None:
            self._check_out(x, out)
        if noop is not None:
            check_small_tensor("noop", noop, torch.float32, 1, x.device)
        rng_state = self._check_rng(x, rng_state)
        if out is None:
            out = self._new_storage(x)
        self._quantize_into(kernels.as_rows(x.detach()), out, amax_reduction_group, noop, rng_state)
        return out

    def quantize_produced(
        self,
        producer: Producer,
        shape: Sequence[int],
        *,
        amax_reduction_group: GroupLike | None = None,
        rng_state: Tensor | None = None,
    ) -> QuantizedStorage:
        """Quantize what a producer describes, as a tensor of `shape` [..., K]: same bits as quantizing the matrix.

        For use inside ops, whose arguments are checked already. Where the format rounds stochastically, the state
        is drawn from torch's generator if it is not given.
        """
        out = self.new_matrix(shape, producer.dtype, producer.device)
        if rng_state is None:
            rng_state = self._draw_rng(producer.x, None)
        self._quantize_into(producer, out, amax_reduction_group, None, rng_state)
        return out

    # What a stack of M rows is padded to before it is quantized: a class whose column plane needs more overrides it.
    row_multiple = 1

    # Whether the column plane holds the same numbers as the row plane, and can be made from it exactly.
    column_from_row = False

    # Over how many rows a block of the planes extends: shards of whole blocks are quantized like slices of the whole.
    block_rows = 1

    def new_matrix(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> QuantizedStorage:
        """``make_empty`` for hot paths: what a shape's buffers look like is remembered."""
        layout = self._layout(shape, dtype)
        empty = torch.empty
        buffers = {name: empty(size, dtype=kind, device=device) for name, size, kind in layout}
        return self.storage_cls._around(buffers, torch.Size(shape), dtype, self)

    def _layout(self, shape: Sequence[int], dtype: torch.dtype) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        key = (*shape, dtype)
        layouts = self.__dict__.get(_LAYOUTS)
        if layouts is None:
            layouts = {}
            object.__setattr__(self, _LAYOUTS, layouts)
        remembers = not kernels.is_shapes_only()  # sizes are symbols then
        found = layouts.get(key) if remembers else None
        if found is None:
            self._check_shape(shape)
            found = [(name, size, kind) for name, (size, kind) in self._describe_buffers(shape, dtype).items()]
            if remembers:
                if len(layouts) > 64:  # batches of many sizes: start over rather than grow
                    layouts.clear()
                layouts[key] = found
        return found

    # No __call__: torch 2.11 takes a callable argument of a mutating op for a subgraph.
    def make_tensor(self, x: Tensor, **kwargs: Any) -> QuantizedTensor:
        """Quantize to a QuantizedTensor, a tensor that PyTorch knows. Gradients pass straight through."""
        if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
            return _StraightThroughQuantize.apply(x, self, kwargs)
        return wrap(self.quantize(x, **kwargs))

    def _quantize_into(
        self,
        x: Tensor | Producer,
        out: QuantizedStorage,
        group: GroupLike | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> None:
        """Fill `out` from the matrix `x` [M, K], or from what makes it; everything has been checked."""
        raise NotImplementedError(f"{type(self).__name__} must define _quantize_into")

    def _quantize_compiled(
        self,
        x: Tensor,
        group: str,
        out: QuantizedStorage | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> QuantizedStorage:
        """The same as ops that torch.compile keeps whole."""
        rng_state = self._draw_rng(x, rng_state)
        if out is not None and not group:
            made_by = out.quantizer.layout_quantizer()
            torch.ops.te_dist.quantize_out(x, out.inner_tensors(), self, made_by, noop, rng_state)
            return out
        if group:
            inner = torch.ops.te_dist.quantize_reduced(x, self, group, rng_state)
        else:
            inner = torch.ops.te_dist.quantize(x, self, rng_state)
        names = list(self._describe_buffers(x.shape, x.dtype))
        # Unflattening finds the class in a module's dictionary, which Dynamo can guard on; it cannot call a class
        # that it reached through a quantizer made inside the graph.
        fresh = QuantizedStorage.__tensor_unflatten__(
            dict(zip(names, inner, strict=True)), self.create_metadata(x.shape, dtype=x.dtype)
        )
        if out is None:
            return fresh
        # An op that only mutates would be dead code where nobody reads `out`, and a collective must not be: reduce
        # and quantize in an op with a side effect, then copy.
        for mine, new in zip(out.inner_tensors(), fresh.inner_tensors(), strict=True):
            mine.copy_(new if noop is None else torch.where(noop != 0, mine, new))
        return out

    # ---------------------------------------------------------------------------------------- checks
    def _check_input(self, x: Tensor) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}.quantize expects a tensor but got {type(x).__name__}")
        if isinstance(x, QuantizedTensor):
            raise TypeError(f"{name}.quantize got a tensor that is quantized already: {x!r}")
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            raise TypeError(
                f"{name}.quantize expects a plain tensor but got a {type(x).__name__}; pass its local data "
                f"(x.to_local() of a DTensor, with amax_reduction_group), waited for if it is asynchronous"
            )
        if x.layout != torch.strided:
            raise TypeError(f"{name}.quantize expects a strided tensor but got layout {x.layout}")
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{name}.quantize expects float32, float16 or bfloat16 but got {str(x.dtype).removeprefix('torch.')}"
            )
        if x.dim() == 0:
            raise ValueError(f"{name}.quantize expects at least one dimension but got a 0-d tensor")
        if x.is_meta:
            raise ValueError(
                f"{name}.quantize needs data but x is on the meta device; TensorProto describes the result without data"
            )
        self._check_shape(x.shape)

    def _check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the format cannot hold a tensor of that shape."""
        check_has_dimensions(shape, type(self).__name__)

    def _check_out(self, x: Tensor, out: QuantizedStorage) -> None:
        name = type(self).__name__
        if isinstance(out, QuantizedTensor):
            raise TypeError(f"{name}.quantize: out expects a storage; pass out.quantized_storage")
        if type(out) is not self.storage_cls:
            raise TypeError(f"{name}.quantize: out expects a {self.storage_cls.__name__} but got {type(out).__name__}")
        if out.shape != x.shape:
            raise ValueError(f"{name}.quantize: out expects shape {list(x.shape)} but has {list(out.shape)}")
        if out.device != x.device:
            raise ValueError(f"{name}.quantize: out expects device {x.device} but is on {out.device}")
        if out.quantizer.layout_key() != self.layout_key():
            raise ValueError(
                f"{name}.quantize: out was made by another quantizer: expects {self!r} but has {out.quantizer!r}"
            )
        out.check_buffers()

    def _draw_rng(self, x: Tensor, rng_state: Tensor | None) -> Tensor | None:
        """The random state to use: the given one, or one from torch's generator if the format needs any."""
        return rng_state

    def _check_rng(self, x: Tensor, rng_state: Tensor | None) -> Tensor | None:
        if rng_state is not None:
            raise ValueError(f"{type(self).__name__}.quantize: rng_state has no effect without stochastic rounding")
        return None


class _StraightThroughQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, quantizer: Quantizer, kwargs: dict[str, Any]) -> Tensor:
        return wrap(quantizer.quantize(x, **kwargs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


# ------------------------------------------------------------------------------------------------- registration
def register_value_quantizer(cls: type[Q]) -> type[Q]:
    """Give a quantizer class value semantics and make it a constant that torch.compile can carry.

    Usable as a decorator. Where torch has no such types the class still compares by value; only compilation with
    it is not possible, and ``is_value_opaque_quantizer`` says so.
    """
    if not isinstance(cls, type) or not issubclass(cls, Quantizer):
        raise TypeError(f"register_value_quantizer expects a subclass of Quantizer but got {cls!r}")
    cls._value_opaque = True
    register_loadable_quantizer(cls)
    register_value_type(cls, cls._value_fields)
    return cls


def is_value_opaque_quantizer(quantizer: object) -> bool:
    """Whether a quantizer has value semantics; can be asked inside a compiled graph."""
    return getattr(quantizer, "_value_opaque", False)


def _rebuild_quantizer(cls: type[Q], items: Sequence[tuple[str, Any]]) -> Q:
    return cls(**dict(items))


def _rebuild_state(cls: type[Q], state: dict[str, Any]) -> Q:
    quantizer = cls.__new__(cls)
    for name, value in state.items():
        object.__setattr__(quantizer, name, value)
    return quantizer


register_value_type(Quantizer)


def _shown(value: Any) -> str:
    return short_name(value) if isinstance(value, DType) else repr(value)

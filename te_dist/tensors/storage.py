"""QuantizedStorage: the plain object that quantized data lives in between a quantize and a GEMM.

A storage class declares its buffers once, in ``BUFFERS``; flattening, saving for backward, moving and pickling all
follow from that declaration. Letters: M rows, K columns of the logical tensor seen as a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from te_dist.formats import INPUT_DTYPES, matrix_size

if TYPE_CHECKING:
    from te_dist.quantizers.base import Quantizer

S = TypeVar("S", bound="QuantizedStorage")

_STORAGE_CLASSES: dict[str, type[QuantizedStorage]] = {}


def storage_class(name: str) -> type[QuantizedStorage]:
    """The storage class of that name; compiled graphs and checkpoints carry the name."""
    try:
        return _STORAGE_CLASSES[name]
    except KeyError:
        raise ValueError(f"no quantized storage class is named {name!r}; known: {sorted(_STORAGE_CLASSES)}") from None


class QuantizedStorage:
    """Quantized data of one logical tensor: named buffers, logical shape and dtype, and the quantizer that made it.

    Not a tensor and not known to autograd, hence cheap. A buffer that is not there is None.
    """

    BUFFERS: ClassVar[tuple[str, ...]] = ()
    # Buffers that exist only when the row / the column plane does.
    ROW_BUFFERS: ClassVar[tuple[str, ...]] = ()
    COLUMN_BUFFERS: ClassVar[tuple[str, ...]] = ()
    FORMAT: ClassVar[str] = ""

    __slots__ = ("dtype", "quantizer", "shape")

    dtype: torch.dtype  # what dequantize() returns
    quantizer: Quantizer
    shape: torch.Size

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = _STORAGE_CLASSES.setdefault(cls.__name__, cls)
        if known.__module__ != cls.__module__:
            raise TypeError(f"a quantized storage class named {cls.__name__} exists in {known.__module__}")

    def __init__(
        self,
        buffers: Mapping[str, Tensor | None],
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantizer: Quantizer,
    ) -> None:
        for name in buffers:
            if name not in self.BUFFERS:
                raise ValueError(f"{type(self).__name__} has no buffer {name!r}; it declares {self.BUFFERS}")
        for name in self.BUFFERS:
            setattr(self, name, buffers.get(name))
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.quantizer = quantizer

    @classmethod
    def _around(
        cls: type[S],
        buffers: Mapping[str, Tensor],
        shape: torch.Size,
        dtype: torch.dtype,
        quantizer: Quantizer,
    ) -> S:
        """The constructor without its checks, for buffers that a quantizer's own description was followed for."""
        self = cls.__new__(cls)
        for name in cls.BUFFERS:
            setattr(self, name, buffers.get(name))
        self.shape, self.dtype, self.quantizer = shape, dtype, quantizer
        return self

    def _planes_of(self: S, quantizer: Quantizer) -> S:
        """This storage with the planes of `quantizer` only, which has its format and no plane that is missing here."""
        cls = type(self)
        made = cls.__new__(cls)
        dropped = (() if quantizer.rowwise else cls.ROW_BUFFERS) + (() if quantizer.columnwise else cls.COLUMN_BUFFERS)
        for name in cls.BUFFERS:
            setattr(made, name, None if name in dropped else getattr(self, name))
        made.shape, made.dtype, made.quantizer = self.shape, self.dtype, quantizer
        return made

    # ---------------------------------------------------------------------------------------- shape and planes
    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(M, K): all leading dimensions flattened into rows."""
        return matrix_size(self.shape)

    @property
    def device(self) -> torch.device:
        for name in self.BUFFERS:
            tensor = getattr(self, name)
            if tensor is not None:
                return tensor.device
        raise ValueError(f"{type(self).__name__} holds no buffer")

    @property
    def has_rowwise(self) -> bool:
        return getattr(self, self.ROW_BUFFERS[0]) is not None

    @property
    def has_columnwise(self) -> bool:
        return getattr(self, self.COLUMN_BUFFERS[0]) is not None

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def nbytes(self) -> int:
        """Bytes of all buffers, scales and padding included."""
        return sum(t.numel() * t.element_size() for t in self.inner_tensors())

    # ---------------------------------------------------------------------------------------- flattening
    def inner_names(self) -> list[str]:
        """Names of the buffers that are there, in the declared order."""
        return [name for name in self.BUFFERS if getattr(self, name) is not None]

    def inner_tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.inner_names()]

    def metadata(self) -> dict[str, Any]:
        """Everything but the buffers; the second half of ``__tensor_flatten__``."""
        return self.quantizer.create_metadata(self.shape, dtype=self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return self.inner_names(), self.metadata()

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
    ) -> QuantizedStorage:
        cls = storage_class(metadata["cls"])
        shape = metadata["shape"] if outer_size is None else outer_size
        return cls(inner, shape=shape, dtype=metadata["dtype"], quantizer=metadata["quantizer"])

    def _rebuilt(
        self,
        tensors: Sequence[Tensor | None],
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedStorage:
        """The same storage around other buffers (one per name of ``inner_names()``)."""
        return type(self)(
            dict(zip(self.inner_names(), tensors, strict=True)),
            shape=self.shape if shape is None else shape,
            dtype=dtype or self.dtype,
            quantizer=self.quantizer,
        )

    def check_buffers(self) -> None:
        """Raise ValueError unless every buffer has the layout that the quantizer describes: kernels trust it."""
        specs = self.quantizer._describe_buffers(self.shape, self.dtype)
        if list(specs) != self.inner_names():
            raise ValueError(
                f"{type(self).__name__} of {self.quantizer} expects the buffers {list(specs)} but has "
                f"{self.inner_names()}"
            )
        device = self.device
        for name, (shape, dtype) in specs.items():
            tensor = getattr(self, name)
            good = tensor.shape == shape and tensor.dtype == dtype and tensor.device == device
            if not good or not tensor.is_contiguous():
                raise ValueError(
                    f"{type(self).__name__}.{name} expects a contiguous {dtype} tensor of shape {list(shape)} on "
                    f"{device} but has {tensor.dtype}, {list(tensor.shape)}, strides {tensor.stride()}, {tensor.device}"
                )

    # ---------------------------------------------------------------------------------------- copies
    def detach(self) -> QuantizedStorage:
        return self._rebuilt([t.detach() for t in self.inner_tensors()])

    def clone(self) -> QuantizedStorage:
        return self._rebuilt([t.clone() for t in self.inner_tensors()])

    def to(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> QuantizedStorage:
        """Another device, or another nominal dtype: the quantized bytes stay the same."""
        dtype = self.dtype if dtype is None else check_nominal_dtype(dtype, type(self).__name__)
        tensors = [t.to(device=device, non_blocking=non_blocking) for t in self.inner_tensors()]
        return self._rebuilt(tensors, dtype=dtype)

    def view(self, shape: Sequence[int]) -> QuantizedStorage:
        """The same data under another shape. Legal as long as the last dimension stays: blocks depend on (M, K)."""
        shape = torch.Size(shape)
        if shape.numel() != self.shape.numel() or not shape or shape[-1] != self.shape[-1]:
            raise ValueError(
                f"{type(self).__name__} of shape {list(self.shape)} cannot be viewed as {list(shape)}: "
                f"quantization blocks tie the last dimension down; dequantize() first, or keep it {self.shape[-1]}"
            )
        specs = self.quantizer._describe_buffers(shape, self.dtype)
        tensors = [getattr(self, name).view(specs[name][0]) for name in self.inner_names()]
        return self._rebuilt(tensors, shape=shape)

    def copy_(self, source: QuantizedStorage) -> QuantizedStorage:
        """Take over another storage's bytes; it must have the same format, shape and planes."""
        if type(source) is not type(self) or source.shape != self.shape:
            raise ValueError(
                f"copy_ into {type(self).__name__} of shape {list(self.shape)} expects the same but got "
                f"{type(source).__name__} of shape {list(source.shape)}"
            )
        if source.inner_names() != self.inner_names():
            raise ValueError(
                f"copy_ expects the buffers {self.inner_names()} but the source has {source.inner_names()}"
            )
        if source.quantizer.layout_key() != self.quantizer.layout_key():
            raise ValueError(f"copy_ between tensors of different quantizers: {source.quantizer} into {self.quantizer}")
        for mine, theirs in zip(self.inner_tensors(), source.inner_tensors(), strict=True):
            mine.copy_(theirs)
        return self

    def with_usage(self, *, rowwise: bool, columnwise: bool) -> QuantizedStorage:
        """A storage with just these planes: others are dropped, missing ones derived where that is exact."""
        buffers = {name: getattr(self, name) for name in self.BUFFERS}
        if rowwise and not self.has_rowwise:
            buffers |= self._derive_rowwise()
        if columnwise and not self.has_columnwise:
            buffers |= self._derive_columnwise()
        dropped = (() if rowwise else self.ROW_BUFFERS) + (() if columnwise else self.COLUMN_BUFFERS)
        quantizer = self.quantizer.with_usage(rowwise=rowwise, columnwise=columnwise)
        return type(self)(
            {name: t for name, t in buffers.items() if name not in dropped},
            shape=self.shape,
            dtype=self.dtype,
            quantizer=quantizer,
        )

    def _derive_rowwise(self) -> dict[str, Tensor]:
        raise ValueError(self._cannot_derive("row", "column"))

    def _derive_columnwise(self) -> dict[str, Tensor]:
        raise ValueError(self._cannot_derive("column", "row"))

    def _cannot_derive(self, wanted: str, held: str) -> str:
        return (
            f"the {wanted} plane of {type(self).__name__} ({self.quantizer}) cannot be made from its {held} plane: "
            f"the two are scaled independently; quantize with both usages instead"
        )

    # ---------------------------------------------------------------------------------------- dequantize
    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in `dtype` (the storage's own by default), from the row plane if it is there."""
        dtype = self.dtype if dtype is None else check_nominal_dtype(dtype, type(self).__name__)
        if torch.compiler.is_compiling():
            return torch.ops.te_dist.dequantize(
                self.inner_tensors(), self.quantizer.layout_quantizer(), list(self.shape), dtype
            )
        return self._dequantize(dtype)

    def _dequantize(self, dtype: torch.dtype) -> Tensor:
        self.check_buffers()
        out = torch.empty(self.matrix_shape, dtype=dtype, device=self.device)
        self._dequantize_into(out)
        return out.view(self.shape)

    def _dequantize_into(self, out: Tensor) -> None:
        """Write the values into `out` [M, K]."""
        raise NotImplementedError(f"{type(self).__name__} must define _dequantize_into")

    def summary(self) -> str:
        """Shape, dtype, format, planes, device and size, for reprs."""
        planes = "+".join(name for name, there in (("row", self.has_rowwise), ("column", self.has_columnwise)) if there)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"shape={list(self.shape)}, dtype={dtype}, format={self.quantizer.describe()!r}, planes={planes}, "
            f"device={self.device}, bytes={self.nbytes()}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"


def check_nominal_dtype(dtype: torch.dtype, what: str) -> torch.dtype:
    if dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{what} expects a dtype of {[str(d).removeprefix('torch.') for d in INPUT_DTYPES]} but got {dtype}"
        )
    return dtype


# ------------------------------------------------------------------------------------------------- saving for backward
def prepare_for_saving(
    *values: Tensor | QuantizedStorage | None,
) -> tuple[list[Tensor], list[dict[str, Any] | None]]:
    """Flatten tensors and storages for ``ctx.save_for_backward``; the second result rebuilds them.

    Nothing is emptied: the graph may be walked again with ``retain_graph=True``.
    """
    tensors: list[Tensor] = []
    specs: list[dict[str, Any] | None] = []
    for value in values:
        if value is None:
            specs.append({"kind": "none"})
        elif isinstance(value, QuantizedStorage):
            names, metadata = value.__tensor_flatten__()
            tensors.extend(getattr(value, name) for name in names)
            specs.append({"kind": "storage", "names": names, "metadata": metadata})
        else:
            tensors.append(value)
            specs.append({"kind": "tensor"})
    return tensors, specs


def restore_from_saved(
    specs: Sequence[Mapping[str, Any] | None], tensors: Sequence[Tensor]
) -> list[Tensor | QuantizedStorage | None]:
    """The inverse of prepare_for_saving, given ``ctx.saved_tensors``."""
    values: list[Tensor | QuantizedStorage | None] = []
    position = 0
    for spec in specs:
        if spec is None or spec["kind"] == "none":
            values.append(None)
        elif spec["kind"] == "tensor":
            values.append(tensors[position])
            position += 1
        else:
            names = spec["names"]
            inner = dict(zip(names, tensors[position : position + len(names)], strict=True))
            values.append(QuantizedStorage.__tensor_unflatten__(inner, spec["metadata"]))
            position += len(names)
    if position != len(tensors):
        raise ValueError(f"restore_from_saved expects {position} tensors but got {len(tensors)}")
    return values

"""Per-tensor FP8: current scaling as a value, delayed scaling with live state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import DType, matrix_size, short_name
from te_dist.groups import GroupLike, all_reduce_amax, holds_group
from te_dist.producers import Producer
from te_dist.quantizers.base import BufferSpecs, Quantizer, register_value_quantizer
from te_dist.quantizers.checks import (
    check_eps,
    check_fp8_dtype,
    check_small_tensor,
    group_refused,
)
from te_dist.tensors.float8 import Float8TensorStorage
from te_dist.tensors.storage import QuantizedStorage


class Float8QuantizerBase(Quantizer):
    """What delayed and current scaling share: the layout."""

    storage_cls = Float8TensorStorage
    column_from_row = True

    fp8_dtype: DType

    def describe(self) -> str:
        return f"{short_name(self.fp8_dtype)} per tensor"

    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        rows, cols = matrix_size(shape)
        specs: BufferSpecs = {}
        if self.rowwise:
            specs["_data"] = (tuple(shape), torch.uint8)
        if self.columnwise:
            specs["_transpose"] = ((cols, rows), torch.uint8)
        specs["_scale_inv"] = ((1,), torch.float32)
        return specs


@register_value_quantizer
class Float8CurrentScalingQuantizer(Float8QuantizerBase):
    """One scale from the tensor's own amax.

    Args:
        fp8_dtype: ``"e4m3"``, ``"e5m2"``, a ``DType`` or a torch float8 dtype.
        rowwise, columnwise: which planes to produce; the column plane is the transpose.
        force_pow_2_scales: round the scale down to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    _value_fields = ("fp8_dtype", "rowwise", "columnwise", "force_pow_2_scales", "amax_epsilon")

    force_pow_2_scales: bool
    amax_epsilon: float

    def __init__(
        self,
        fp8_dtype: DType | torch.dtype | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        self.fp8_dtype = check_fp8_dtype(fp8_dtype, type(self).__name__)
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = check_eps(amax_epsilon, type(self).__name__)
        self._check_usage()

    def _quantize_into(
        self,
        x: Tensor | Producer,
        out: QuantizedStorage,
        group: GroupLike | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> None:
        out = cast(Float8TensorStorage, out)
        # What a producer makes besides its matrix is there even where nothing is quantized.
        if group is None and (noop is None or isinstance(x, Tensor)):
            kernels.quantize_current(
                x,
                out._data,
                out._transpose,
                out._scale_inv,
                fp8=self.fp8_dtype,
                eps=self.amax_epsilon,
                power_of_2=self.force_pow_2_scales,
                noop=noop,
            )
            return
        amax = torch.empty(1, dtype=torch.float32, device=x.device)
        kernels.amax(x, amax)
        if group is not None:
            all_reduce_amax([amax], group)
        kernels.cast_current(
            x,
            amax,
            out._data,
            out._transpose,
            out._scale_inv,
            fp8=self.fp8_dtype,
            eps=self.amax_epsilon,
            power_of_2=self.force_pow_2_scales,
            noop=noop,
        )


class Float8Quantizer(Float8QuantizerBase):
    """Delayed scaling: casts with `scale` and records the tensor's amax into `amax`.

    The two tensors are live state that ``te_dist.delayed_scaling.update_scale`` advances between steps, so this
    quantizer is not a value: it compares by identity.

    Args:
        scale: float32 [1], read at each quantize.
        amax: float32 [1]; becomes the maximum of itself and each tensor's amax.
    """

    _value_fields = ("fp8_dtype", "rowwise", "columnwise", "scale", "amax")

    scale: Tensor
    amax: Tensor

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: DType | torch.dtype | str,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        self.scale = scale
        self.amax = amax
        self.fp8_dtype = check_fp8_dtype(fp8_dtype, type(self).__name__)
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self._check_usage()

    @classmethod
    def around(cls, scale: Tensor, amax: Tensor, layout: Quantizer) -> Float8Quantizer:
        """A quantizer with the planes and the format of `layout`, without checks: for one call inside an op."""
        self = cls.__new__(cls)
        self.__dict__.update(
            scale=scale,
            amax=amax,
            fp8_dtype=layout.fp8_dtype,
            rowwise=layout.rowwise,
            columnwise=layout.columnwise,
        )
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Unlike a value quantizer this one may be pointed at other state; a group is still refused."""
        if holds_group(value):
            raise TypeError(group_refused(type(self).__name__, name))
        if name not in self._value_fields:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}")
        if name in ("scale", "amax"):
            device = value.device if isinstance(value, Tensor) else torch.device("cpu")
            check_small_tensor(f"{type(self).__name__}: {name}", value, torch.float32, 1, device)
        object.__setattr__(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Quantizer:
        self._value_key()
        return self.replace(scale=self.scale.clone(), amax=self.amax.clone())

    def layout_quantizer(self) -> Float8CurrentScalingQuantizer:
        return Float8CurrentScalingQuantizer(self.fp8_dtype, rowwise=self.rowwise, columnwise=self.columnwise)

    def _quantize_into(
        self,
        x: Tensor | Producer,
        out: QuantizedStorage,
        group: GroupLike | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> None:
        if self.scale.device != x.device or self.amax.device != x.device:
            raise ValueError(
                f"{type(self).__name__}: x is on {x.device} but scale and amax are on "
                f"{self.scale.device} and {self.amax.device}"
            )
        out = cast(Float8TensorStorage, out)
        seen: Tensor | None = self.amax
        if group is not None:
            amax, seen = torch.empty_like(self.amax), None
            kernels.amax(x, amax)
            all_reduce_amax([amax], group)
            # Through the kernel again: a one-element tensor is its own amax, and the flag is honoured.
            kernels.amax(amax.view(1, 1), self.amax, accumulate=True, noop=noop)
        kernels.cast_scaled(
            x,
            self.scale,
            out._data,
            out._transpose,
            out._scale_inv,
            fp8=self.fp8_dtype,
            amax=seen,
            noop=noop,
        )

    def _quantize_compiled(
        self,
        x: Tensor,
        group: str,
        out: QuantizedStorage | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> QuantizedStorage:
        if group or out is not None or noop is not None or rng_state is not None:
            raise ValueError(
                f"{type(self).__name__}.quantize takes only x while compiling; reduce the recorded amax outside"
            )
        torch.ops.te_dist.record_amax(x, self.amax)
        fp8 = int(self.fp8_dtype)
        inner = torch.ops.te_dist.cast_scaled(x, self.scale, fp8, self.rowwise, self.columnwise)
        names = list(self._describe_buffers(x.shape))
        return Float8TensorStorage(dict(zip(names, inner, strict=True)), shape=x.shape, dtype=x.dtype, quantizer=self)

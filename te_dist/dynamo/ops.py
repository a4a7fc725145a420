"""The custom ops that stand for quantize and dequantize inside a compiled graph.

Eager code calls the Python methods directly: a dispatcher round trip costs more than a small kernel. Each op's fake
is made from a TensorProto, the same description from which the real buffers are allocated.

The annotations here become op schemas and must be real objects when an op is defined, so this file does without
``from __future__ import annotations`` and spells Optional as torch.library reads it on every supported version.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from te_dist.formats import DType
from te_dist.kernels import amax as amax_kernel
from te_dist.kernels import as_rows
from te_dist.proto import TensorProto
from te_dist.quantizers.base import Quantizer
from te_dist.quantizers.float8 import Float8CurrentScalingQuantizer, Float8Quantizer
from te_dist.tensors.storage import QuantizedStorage


def _fake_buffers(x: Tensor, quantizer: Quantizer) -> list[Tensor]:
    quantizer._check_shape(x.shape)
    proto = TensorProto(tuple(x.shape), x.dtype, quantizer, device=x.device)
    return list(proto.create_inner_tensors().values())


@torch.library.custom_op("te_dist::quantize", mutates_args=())
def quantize(x: Tensor, quantizer: Quantizer, rng_state: Optional[Tensor]) -> list[Tensor]:
    return quantizer.quantize(x, rng_state=rng_state).inner_tensors()


@quantize.register_fake
def _(x: Tensor, quantizer: Quantizer, rng_state: Optional[Tensor]) -> list[Tensor]:
    return _fake_buffers(x, quantizer)


@torch.library.custom_op("te_dist::quantize_reduced", mutates_args=())
def quantize_reduced(x: Tensor, quantizer: Quantizer, group: str, rng_state: Optional[Tensor]) -> list[Tensor]:
    """quantize with an amax reduction over the named group."""
    storage = quantizer.quantize(x, amax_reduction_group=group, rng_state=rng_state)
    return storage.inner_tensors()


@quantize_reduced.register_fake
def _(x: Tensor, quantizer: Quantizer, group: str, rng_state: Optional[Tensor]) -> list[Tensor]:
    return _fake_buffers(x, quantizer)


def _workspace(x: Tensor, out: list[Tensor], quantizer: Quantizer, made_by: Quantizer) -> QuantizedStorage:
    """The storage around `out`, checked: its buffers were made by an equal quantizer and have its layout."""
    if made_by != quantizer:
        raise ValueError(f"quantize: out was made by another quantizer: expects {quantizer} but has {made_by}")
    proto = TensorProto(tuple(x.shape), x.dtype, quantizer, device=x.device)
    storage = proto.assemble(dict(zip(proto.inner_names(), out, strict=True)))
    storage.check_buffers()
    return storage


@torch.library.custom_op("te_dist::quantize_out", mutates_args=("out",))
def quantize_out(
    x: Tensor,
    out: list[Tensor],
    quantizer: Quantizer,
    made_by: Quantizer,
    noop: Optional[Tensor],
    rng_state: Optional[Tensor],
) -> None:
    """quantize into existing buffers, as weight workspaces are filled; `made_by` is the quantizer of those."""
    quantizer.quantize(x, out=_workspace(x, out, quantizer, made_by), noop=noop, rng_state=rng_state)


@quantize_out.register_fake
def _(
    x: Tensor,
    out: list[Tensor],
    quantizer: Quantizer,
    made_by: Quantizer,
    noop: Optional[Tensor],
    rng_state: Optional[Tensor],
) -> None:
    _workspace(x, out, quantizer, made_by)


@torch.library.custom_op("te_dist::dequantize", mutates_args=())
def dequantize(inner: list[Tensor], quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    names = quantizer._describe_buffers(shape, dtype)
    storage: QuantizedStorage = quantizer.storage_cls(
        dict(zip(names, inner, strict=True)), shape=shape, dtype=dtype, quantizer=quantizer
    )
    return storage._dequantize(dtype)


@dequantize.register_fake
def _(inner: list[Tensor], quantizer: Quantizer, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=inner[0].device)


# Delayed scaling: its state goes in and out as tensors. Recording is an op of its own, because one op cannot both
# mutate an argument and return a list.
@torch.library.custom_op("te_dist::record_amax", mutates_args=("amax",))
def record_amax(x: Tensor, amax: Tensor) -> None:
    amax_kernel(as_rows(x), amax, accumulate=True)


@record_amax.register_fake
def _(x: Tensor, amax: Tensor) -> None:
    pass


@torch.library.custom_op("te_dist::cast_scaled", mutates_args=())
def cast_scaled(x: Tensor, scale: Tensor, fp8: int, rowwise: bool, columnwise: bool) -> list[Tensor]:
    unused_amax = torch.zeros_like(scale)
    quantizer = Float8Quantizer(scale, unused_amax, DType(fp8), rowwise=rowwise, columnwise=columnwise)
    storage = quantizer._new_storage(x)
    quantizer._quantize_into(as_rows(x), storage, None, None, None)
    return storage.inner_tensors()


@cast_scaled.register_fake
def _(x: Tensor, scale: Tensor, fp8: int, rowwise: bool, columnwise: bool) -> list[Tensor]:
    layout = Float8CurrentScalingQuantizer(DType(fp8), rowwise=rowwise, columnwise=columnwise)
    return _fake_buffers(x, layout)


# A collective that one rank drops as dead code would hang the others.
torch.fx.node.has_side_effect(torch.ops.te_dist.quantize_reduced.default)

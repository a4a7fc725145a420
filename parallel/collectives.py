"""Collectives on shards, quantized or not: over the wire go quantized bytes, data and scales in one call.

All of them run under ``torch.compile(fullgraph=True)`` as ops that no graph may drop. None is recorded by autograd;
te_dist.parallel.mappings has the forms that are.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from te_dist import groups, kernels, transport
from te_dist.groups import GroupLike, resolve_group
from te_dist.parallel import wire
from te_dist.quantizers import Quantizer
from te_dist.tensors import Float8TensorStorage, QuantizedStorage, QuantizedTensor
from te_dist.torch_compat import constant_in_graphs
from te_dist.transport import Done, Pending

Operand = Tensor | QuantizedStorage


def start_gather(operands: list[Operand], group: Any) -> Pending[list[Operand]]:
    """Gather matrices (plain or quantized) along their rows, all in one call. Shapes are equal on all ranks."""
    # Of a per-tensor scaled one with both planes the row plane travels: the other is its transpose, byte for byte.
    derived = [isinstance(o, Float8TensorStorage) and o.has_rowwise and o.has_columnwise for o in operands]
    operands = [
        o.with_usage(rowwise=True, columnwise=False) if d and isinstance(o, QuantizedStorage) else o
        for o, d in zip(operands, derived, strict=True)
    ]
    sent: list[Tensor] = []
    counts: list[int] = []
    for operand in operands:
        tensors = wire.outgoing(operand) if isinstance(operand, QuantizedStorage) else [operand]
        sent += tensors
        counts.append(len(tensors))
    ranks = group.size()
    quantized = [t for o, n in zip(operands, counts, strict=True) for t in [isinstance(o, QuantizedStorage)] * n]
    # Scales in float32 travel as bytes too: one buffer, one dtype.
    as_bytes = [
        t.contiguous().view(torch.uint8) if is_quantized and t.dtype != torch.uint8 and not _is_plain(operands) else t
        for t, is_quantized in zip(sent, quantized, strict=True)
    ]
    pending = transport.all_gather(as_bytes, group, _payload(operands[0]))

    def finish() -> list[Operand]:
        gathered = [
            g.view(t.dtype) if g.numel() else t.new_empty((g.shape[0], *t.shape[1:]))  # nothing has odd strides
            for g, t in zip(pending.wait(), sent, strict=True)
        ]
        results: list[Operand] = []
        at = 0
        for operand, count, derive in zip(operands, counts, derived, strict=True):
            parts = gathered[at : at + count]
            at += count
            if not isinstance(operand, QuantizedStorage):
                results.append(parts[0])
                continue
            whole = wire.incoming(operand, parts, ranks)
            results.append(whole.with_usage(rowwise=True, columnwise=True) if derive else whole)
        return results

    return Pending(None, finish)


def _is_plain(operands: list[Operand]) -> bool:
    """Whether high precision travels: an unquantized tensor, or one that an IdentityQuantizer holds."""
    return all(isinstance(o, Tensor) or o.FORMAT == "high precision" for o in operands)


def _payload(operand: Operand) -> str:
    if isinstance(operand, Tensor):
        return "high precision" if operand.is_floating_point() else "row counts"
    planes = (("row", operand.has_rowwise), ("column", operand.has_columnwise))
    return f"{operand.quantizer.describe()}, {'+'.join(name for name, there in planes if there)}"


def start_reduce(whole: Tensor, group: Any, *, scatter: bool, wire_dtype: torch.dtype | None = None) -> Pending[Tensor]:
    """The sum over the ranks in `wire_dtype` (the tensor's own by default), or this rank's rows of it."""
    dtype = whole.dtype
    sent = whole if wire_dtype is None or wire_dtype == dtype else whole.to(wire_dtype)
    if scatter:
        pending = transport.reduce_scatter(sent, group)
    else:
        # In place on a copy: the argument may be somebody's.
        pending = transport.all_reduce(sent.clone() if sent is whole else sent, group)
    return pending if sent.dtype == dtype else Pending(None, lambda: pending.wait().to(dtype))


# ------------------------------------------------------------------------------------------------- public
def gather_along_first_dim(
    inp: Tensor | QuantizedStorage,
    group: GroupLike,
    async_op: bool = False,
    quantizer: Quantizer | None = None,
) -> tuple[Any, Pending[Any] | None]:
    """The whole tensor of which every rank of the group holds an equal share of the first dimension.

    Args:
        inp: a tensor, or a quantized one, whose planes are gathered as they are. Per-tensor scales must be the same
            on all ranks: quantize with ``amax_reduction_group=group``.
        group: ProcessGroup, one-dimensional DeviceMesh or group name.
        async_op: return (None, handle) at once; ``handle.wait()`` gives the result.
        quantizer: quantize a plain `inp` first, with the amax reduced over the group, and gather that.

    Returns:
        (the whole, None): byte for byte what one process gets by quantizing the whole, unless rounding is stochastic.

    Raises:
        ValueError: a block of the column plane would straddle two shards. Raised on all ranks, before anything is sent.

    Example:
        >>> import torch, te_dist, torch.distributed as dist
        >>> from te_dist.parallel import gather_along_first_dim
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> whole, _ = gather_along_first_dim(torch.ones(4, 32), dist.group.WORLD, quantizer=te_dist.MXFP8Quantizer("e4m3", columnwise=False))
        >>> whole.shape
        torch.Size([4, 32])
        >>> dist.destroy_process_group()
    """  # noqa: E501
    if isinstance(inp, QuantizedTensor):
        inp = inp.quantized_storage
    compiling = torch.compiler.is_compiling()  # then the op's fake checks
    if quantizer is not None and isinstance(inp, Tensor):
        if not compiling:
            wire.row_layout(quantizer)
            wire.check_shard(quantizer, inp.shape[:-1].numel(), "gather_along_first_dim")
        inp = quantizer.quantize(inp, amax_reduction_group=group)
    if inp.shape == torch.Size():
        raise ValueError("gather_along_first_dim expects a tensor with dimensions but got a 0-d one")
    if compiling:
        _no_async("gather_along_first_dim", async_op)
        return _gather_compiled(inp, groups.group_name(group)), None
    process_group = resolve_group(group, "group")
    whole = _start_whole(inp, process_group)
    return (None, whole) if async_op else (whole.wait(), None)


def _start_whole(inp: Operand, group: Any) -> Pending[Any]:
    ranks = group.size()
    shape = (inp.shape[0] * ranks, *inp.shape[1:])
    if isinstance(inp, Tensor):
        matrix = inp.detach().reshape(inp.shape[0], -1)
    else:
        wire.check_shard(inp.quantizer, inp.matrix_shape[0], "gather_along_first_dim")
        matrix = inp.view(inp.matrix_shape)  # type: ignore[assignment]
    if ranks == 1:
        return Done(inp)
    pending = start_gather([matrix], group)
    return Pending(None, lambda: pending.wait()[0].view(shape))


def reduce_scatter_along_first_dim(
    inp: Tensor, group: GroupLike, async_op: bool = False, *, wire_dtype: torch.dtype | None = None
) -> tuple[Any, Pending[Tensor] | None]:
    """This rank's share of the sum over the ranks, along the first dimension, which they divide evenly.

    Args:
        wire_dtype: in which the sums are made and sent; the input's own by default. The result has the input's dtype.
        async_op: return (None, handle); ``handle.wait()`` gives the result.
    """
    if torch.compiler.is_compiling():
        _no_async("reduce_scatter_along_first_dim", async_op)
        name = groups.group_name(group)
        return torch.ops.te_dist.reduce_scatter(inp.detach(), name, _ranks_of(name), wire_dtype), None
    process_group = resolve_group(group, "group")
    if inp.dim() == 0 or inp.shape[0] % process_group.size():
        raise ValueError(
            f"reduce_scatter_along_first_dim expects a first dimension that {process_group.size()} ranks divide evenly "
            f"but got shape {list(inp.shape)}"
        )
    pending = start_reduce(inp.detach(), process_group, scatter=True, wire_dtype=wire_dtype)
    return (None, pending) if async_op else (pending.wait(), None)


def allreduce(
    inp: Tensor, group: GroupLike, async_op: bool = False, *, wire_dtype: torch.dtype | None = None
) -> tuple[Any, Pending[Tensor] | None]:
    """The sum over the ranks, as a new tensor. Arguments as for ``reduce_scatter_along_first_dim``."""
    if torch.compiler.is_compiling():
        _no_async("allreduce", async_op)
        return torch.ops.te_dist.all_reduce(inp.detach(), groups.group_name(group), wire_dtype), None
    pending = start_reduce(inp.detach(), resolve_group(group, "group"), scatter=False, wire_dtype=wire_dtype)
    return (None, pending) if async_op else (pending.wait(), None)


def all_reduce_amax(amaxes: Tensor | list[Tensor], group: GroupLike) -> None:
    """Replace one amax, or many in one collective, by the maximum over the group, in place.

    The amaxes are float32 and not negative. Every rank of the group must call, with as many of them.
    """
    tensors = [amaxes] if isinstance(amaxes, Tensor) else list(amaxes)
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise TypeError(f"all_reduce_amax expects float32 amaxes but got {tensor.dtype}")
    if tensors:
        groups.all_reduce_amax(tensors, group)


def _no_async(name: str, async_op: bool) -> None:
    if async_op:
        raise ValueError(f"{name}: async_op is for eager code; a compiled graph schedules for itself")


# ------------------------------------------------------------------------------------------------- compiled
@constant_in_graphs
def _ranks_of(name: str) -> int:
    return int(resolve_group(name, "group").size())


def _gather_compiled(inp: Operand, name: str) -> Any:
    ranks = _ranks_of(name)
    shape = [inp.shape[0] * ranks, *inp.shape[1:]]
    if isinstance(inp, Tensor):
        return torch.ops.te_dist.all_gather(inp.detach(), name, ranks)
    quantizer = inp.quantizer.layout_quantizer()
    inner = torch.ops.te_dist.all_gather_quantized(
        inp.inner_tensors(), quantizer, list(inp.shape), inp.dtype, name, ranks
    )
    names = inp.inner_names()
    return QuantizedStorage.__tensor_unflatten__(
        dict(zip(names, inner, strict=True)), quantizer.create_metadata(shape, dtype=inp.dtype)
    )


def gather_plain(x: Tensor, name: str) -> Tensor:
    """The whole of a plain tensor, as the op does it."""
    return cast(Tensor, _start_whole(kernels.as_rows(x) if x.dim() == 2 else x, resolve_group(name, "group")).wait())

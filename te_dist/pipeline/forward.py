"""The forward pass of a chain of stages. No autograd, no module, no global state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.gemm import gemm
from te_dist.pipeline import device_groups
from te_dist.pipeline.args import FwdArgs, FwdResult, StageSaved, TensorOrQuantized
from te_dist.pipeline.config import ACTIVATION, NORM, StageConfig
from te_dist.pipeline.operands import first_rows, quantize_operand, split_rows
from te_dist.plan import Move
from te_dist.producers import ActivationOutput, NormOutput, Plain, Producer
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage


def layer_forward(args: FwdArgs) -> FwdResult:
    x = args.x
    norm_output: Tensor | None = None
    saved: list[StageSaved] = []
    for index, stage in enumerate(args.config.stages):
        kept = StageSaved()
        operands: Sequence[TensorOrQuantized]
        if isinstance(x, QuantizedStorage):
            operands = [x]
            if stage.needs_wgrad and stage.x_saved is not None and not args.config.spec.save_original_input:
                kept.x = [x.with_usage(rowwise=stage.x_saved.rowwise, columnwise=stage.x_saved.columnwise)]
        else:
            source = _produce(args, stage, x, kept, first=index == 0)
            if stage.spec.produce == NORM and args.config.spec.return_norm_output:
                norm_output = kernels.materialize(source)
            operands = _operands(args, stage, source, kept, first=index == 0)
        x = _multiply(args, stage, operands, args.weights[index], x.shape[0])
        saved.append(kept)
    assert isinstance(x, Tensor)
    return FwdResult(x, norm_output, saved)


def _produce(args: FwdArgs, stage: StageConfig, x: Tensor, kept: StageSaved, first: bool) -> Producer:
    """What the stage's GEMM will consume, not yet made."""
    spec = stage.spec
    if spec.produce == NORM:
        weight, bias = args.params[stage.first_param], args.params[stage.first_param + 1]
        assert weight is not None
        rstd = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if spec.layer_norm else None
        if stage.needs_dgrad:
            kept.produced_from, kept.mean, kept.rstd = (None if first else x), mean, rstd
        return NormOutput(x, weight, bias, mean, rstd, eps=spec.eps, zero_centered=spec.zero_centered)
    if spec.produce == ACTIVATION:
        if stage.needs_dgrad and not first:
            kept.produced_from = x
        return ActivationOutput(x, spec.activation)
    return Plain(x)


def _operands(
    args: FwdArgs, stage: StageConfig, source: Producer, kept: StageSaved, first: bool
) -> list[TensorOrQuantized]:
    """fprop's operand of every group; what wgrad will need of them goes to `kept`."""
    is_input = first and isinstance(source, Plain)
    keep_original = args.config.spec.save_original_input and is_input
    quantizer = stage.x
    if quantizer is not None and quantizer.columnwise and keep_original:  # backward quantizes again
        quantizer = quantizer.with_usage(rowwise=True, columnwise=False) if stage.fprop else None
    sources = split_rows(source, args.splits) if stage.spec.groups and args.offsets is None else [source]
    quantized: list[QuantizedStorage] = []
    if quantizer is not None:
        quantized = [
            quantize_operand(args.config, stage, "input", quantizer, part, args.scales, args.amaxes, group=group)
            for group, part in enumerate(sources)
        ]
    if stage.needs_wgrad and not keep_original:
        if quantized and stage.x_saved is not None:
            saved_plane = stage.x_saved
            kept.x = [operand._planes_of(saved_plane) for operand in quantized]
        elif not is_input:
            kept.x = [kernels.materialize(source)]
    if stage.fprop and quantized:
        return list(quantized)
    return [kernels.materialize(part) for part in sources]


def _unquantized(param: Tensor | None, weight: QuantizedStorage, dtype: torch.dtype) -> TensorOrQuantized:
    """The weight as it was before it was quantized, where the parameter is not quantized itself."""
    if param is None or isinstance(param, QuantizedTensor):
        return weight
    return param.detach().to(dtype)


def _multiply(
    args: FwdArgs,
    stage: StageConfig,
    operands: Sequence[TensorOrQuantized],
    weights: list[TensorOrQuantized],
    rows: int,
) -> Tensor:
    if args.offsets is not None:
        return device_groups.fprop(args, stage, operands[0], weights)
    comm, plan, spec = stage.spec.comm, stage.spec.comm.plan, stage.spec
    after = plan.y is not Move.NONE  # a bias is added once, not by every rank
    sizes = args.splits if spec.groups and args.splits is not None else [rows]
    results = []
    for group, (operand, weight, size) in enumerate(zip(operands, weights, sizes, strict=True)):
        bias = args.params[stage.bias_slot + group] if spec.has_bias and not after else None
        if not stage.fprop and isinstance(weight, QuantizedStorage):  # quantized for dgrad alone
            weight = _unquantized(args.params[stage.weight_slot + group], weight, args.out_dtype)
        elif isinstance(weight, Tensor):
            weight = weight.detach().to(args.out_dtype)
        gathered = comm.gather(plan.x, operand)
        y = gemm(
            gathered,
            weight,
            kind="fprop",
            out_dtype=args.out_dtype,
            bias=bias,
            use_split_accumulator=stage.split_accumulator[0],
        )
        size = size * comm.size if plan.x is Move.ALL_GATHER else size
        results.append(first_rows(y, size))
    y = comm.reduce(plan.y, results[0] if len(results) == 1 else torch.cat(results))
    bias = args.params[stage.bias_slot] if spec.has_bias and after else None
    return y if bias is None else y + bias.to(y.dtype)

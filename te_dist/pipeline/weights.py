"""Quantized weights, and the workspaces that keep them over microbatches."""

from __future__ import annotations

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.pipeline.args import TensorOrQuantized
from te_dist.pipeline.config import LayerConfig, StageConfig
from te_dist.producers import Plain
from te_dist.quantizers import Float8Quantizer, Quantizer
from te_dist.quantizers.checks import check_small_tensor
from te_dist.tensors.gathered import has_memory
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.tensors.storage import QuantizedStorage


def quantize_weight(
    tensor: Tensor | QuantizedStorage,
    quantizer: Quantizer | None,
    workspace: QuantizedStorage | None = None,
    update_workspace: bool = True,
    skip_update_flag: Tensor | None = None,
    cache: bool = False,
) -> tuple[TensorOrQuantized, QuantizedStorage | None]:
    """The weight that a GEMM reads, and the new workspace if one was made to be kept.

    Args:
        tensor: the weight; one that is quantized already passes through.
        quantizer: None leaves the weight as it is.
        workspace: what an earlier call returned. It is used if it has the quantizer's format and planes.
        update_workspace: quantize into the workspace again; False reuses what it holds.
        skip_update_flag: float32 [1] on the device. Given, the workspace is always written, by a kernel that leaves
            it alone where the flag is not 0: so a CUDA graph can decide at replay.
        cache: return a newly quantized weight as a workspace too.
    """
    return quantize_weight_part(tensor, quantizer, workspace, update_workspace, skip_update_flag, cache, None)


def quantize_weight_part(
    tensor: Tensor | QuantizedStorage,
    quantizer: Quantizer | None,
    workspace: QuantizedStorage | None,
    update_workspace: bool,
    skip_update_flag: Tensor | None,
    cache: bool,
    group: str | None,
) -> tuple[TensorOrQuantized, QuantizedStorage | None]:
    """``quantize_weight`` of a rank's part of a weight: a per-tensor amax is reduced over the named process group."""
    if isinstance(tensor, QuantizedTensor):
        return tensor.quantized_storage, None
    if isinstance(tensor, QuantizedStorage) or quantizer is None:
        return tensor, None
    if skip_update_flag is not None:
        check_small_tensor("skip_update_flag", skip_update_flag, torch.float32, 1, tensor.device)
    if workspace is not None and serves(workspace, quantizer, tensor):
        if update_workspace or skip_update_flag is not None:
            writer = quantizer.with_usage(rowwise=workspace.has_rowwise, columnwise=workspace.has_columnwise)
            writer._quantize_into(kernels.as_rows(tensor.detach()), workspace, group, skip_update_flag, None)
        return workspace, None
    source = Plain(kernels.as_rows(tensor.detach()))
    made = quantizer.quantize_produced(source, tensor.shape, amax_reduction_group=group)
    return made, made if cache else None


def serves(workspace: QuantizedStorage, quantizer: Quantizer, tensor: Tensor) -> bool:
    """Whether a workspace has the format, the planes and the place that a quantizer would give this weight."""
    both = {"rowwise": True, "columnwise": True}
    mine, theirs = workspace.quantizer.layout_quantizer(), quantizer.layout_quantizer()
    return (
        type(workspace) is quantizer.storage_cls
        and workspace.shape == tensor.shape
        and workspace.dtype == tensor.dtype
        and workspace.device == tensor.device
        and (workspace.has_rowwise or not quantizer.rowwise)
        and (workspace.has_columnwise or not quantizer.columnwise)
        and mine.with_usage(**both) == theirs.with_usage(**both)
    )


def weight_quantizer(
    config: LayerConfig, stage: StageConfig, scales: Tensor | None, amaxes: Tensor | None, group: int = 0
) -> Quantizer | None:
    """The quantizer of a stage's weight; under delayed scaling one around the call's own scale."""
    quantizer = stage.weight
    if quantizer is None or not config.delayed:
        return quantizer
    assert scales is not None and amaxes is not None
    index = stage.scale_index("weight", group)
    return Float8Quantizer.around(scales[index : index + 1], amaxes[index : index + 1], quantizer)


def column_of_weight(stage: StageConfig, weight: TensorOrQuantized) -> TensorOrQuantized:
    """What dgrad reads of what was kept of a weight. A gathered one is kept as it was gathered: its column plane, where
    it follows from the row plane, exists for the time of the product."""
    if not isinstance(weight, QuantizedStorage):
        return weight
    if not kernels.is_shapes_only() and not has_memory(weight):
        raise RuntimeError(
            f"backward reads {weight.inner_names()[0]} of a gathered weight {list(weight.shape)}, which has no memory: "
            f"its FSDP module is not unsharded, or was for another plane"
        )
    if stage.derives_column:
        return weight.with_usage(rowwise=False, columnwise=True)
    return weight


def dgrad_operand(stage: StageConfig, weight: TensorOrQuantized, param: Tensor | None) -> TensorOrQuantized | None:
    """What backward keeps of a weight: the plane that dgrad reads, or the parameter itself."""
    if not stage.needs_dgrad:
        return None
    if isinstance(weight, QuantizedStorage) and (stage.dgrad_plane is not None or isinstance(param, QuantizedTensor)):
        plane = stage.dgrad_plane
        if plane is None:
            return weight
        if (plane.rowwise and not weight.has_rowwise) or (plane.columnwise and not weight.has_columnwise):
            return weight.with_usage(rowwise=plane.rowwise, columnwise=plane.columnwise)
        return weight._planes_of(plane)
    return param

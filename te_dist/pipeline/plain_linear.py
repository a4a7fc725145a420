"""Which layers are a plain linear one that takes a short way: lean.py in eager code, dynamo/linear.py in a graph."""

from __future__ import annotations

from te_dist.formats import DType
from te_dist.gemm_direct import fast_accumulation
from te_dist.pipeline.config import IDENTITY, LayerConfig, StageConfig
from te_dist.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer


def is_plain(config: LayerConfig) -> bool:
    """One product of the input itself with one weight, in this process, quantized wherever it is needed."""
    spec, stage = config.spec, config.stages[0]
    special = spec.save_original_input or spec.return_norm_output or config.recipe is None
    if len(config.stages) != 1 or special or stage.spec.produce != IDENTITY or stage.spec.groups:
        return False
    wanted = ((True, stage.fprop), (stage.needs_dgrad, stage.dgrad), (stage.needs_wgrad, stage.wgrad))
    return stage.spec.comm.is_local and all(quantized for needed, quantized in wanted if needed)


def block_dims(stage: StageConfig) -> tuple[int, int, int] | None:
    """Dimensions of the blocks of x, the weight and dy, 0 where the tensor has one scale; None if some product of them
    has no kernel. Without a backward, dy counts as x."""
    dims, e5m2 = [], 0
    for quantizer in (stage.x, stage.weight, stage.dy if stage.dy is not None else stage.x):
        if type(quantizer) is Float8CurrentScalingQuantizer:
            dims.append(0)
        elif type(quantizer) is Float8BlockQuantizer:
            dims.append(quantizer.block_scaling_dim)
        else:
            return None
        e5m2 += quantizer.fp8_dtype == DType.kFloat8E5M2
    per_tensor = dims == [0, 0, 0] and e5m2 <= 1  # no kernel multiplies two of them
    in_blocks = dims[0] == dims[2] == 1 and dims[1] > 0 and e5m2 == 0
    return (dims[0], dims[1], dims[2]) if per_tensor or in_blocks else None


def native_rule(dims: tuple[int, int, int]) -> str:
    """The rule of te_dist.capability that says where such products run."""
    return "Float8BlockScaling" if dims[0] else "Float8CurrentScaling"


def accumulators(stage: StageConfig) -> tuple[bool, bool, bool]:
    """Whether fprop, dgrad and wgrad keep their sums in the short accumulator."""
    fprop, dgrad, wgrad = stage.split_accumulator
    return fast_accumulation("fprop", fprop), fast_accumulation("dgrad", dgrad), fast_accumulation("wgrad", wgrad)

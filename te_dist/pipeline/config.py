"""What a layer is, what a call asks of it, and what a recipe makes of both: frozen values, derived once.

LayerSpec (from the constructor) + Recipe + CallFlags -> LayerConfig. The first three are arguments of the compiled
ops; the last is computed from them inside, so that tracing never builds a quantizer.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from te_dist.comm import LOCAL, Comm
from te_dist.plan import Move
from te_dist.quantizers import Float8CurrentScalingQuantizer, IdentityQuantizer, Quantizer
from te_dist.recipe import DelayedScaling, QuantizerRole, Recipe
from te_dist.values import Value, value_type

IDENTITY, NORM, ACTIVATION = "identity", "norm", "activation"
# The operands of a stage that have a scale of their own under delayed scaling.
OPERANDS = ("input", "weight", "grad_output")


@value_type
@dataclasses.dataclass(frozen=True)
class StageSpec(Value):
    """One stage as its module was constructed.

    Attributes:
        name: of the GEMM within the layer ("" for the only one), for roles and messages.
        produce: what makes the operand: "identity", "norm" or "activation".
        layer_norm: LayerNorm if True, RMSNorm if False.
        groups: number of weights that share the rows of the input, 0 for a plain GEMM.
    """

    name: str = ""
    produce: str = IDENTITY
    layer_norm: bool = False
    eps: float = 1e-5
    zero_centered: bool = False
    activation: str = "gelu"
    has_bias: bool = False
    comm: Comm = LOCAL
    groups: int = 0

    @property
    def weights(self) -> int:
        return self.groups or 1

    @property
    def param_count(self) -> int:
        """Slots in the parameter list: the norm's weight and bias, the weights, the biases."""
        return (2 if self.produce == NORM else 0) + 2 * self.weights


@value_type
@dataclasses.dataclass(frozen=True)
class LayerSpec(Value):
    """A layer as it was constructed.

    Attributes:
        name: what error messages call it.
        return_norm_output: return what the first stage's norm makes as well.
        norm_output_gathered: all ranks' rows of it, where the first stage gathers them.
    """

    stages: tuple[StageSpec, ...]
    module_type: str = "linear"
    name: str = ""
    return_norm_output: bool = False
    save_original_input: bool = False
    norm_output_gathered: bool = False

    @property
    def param_count(self) -> int:
        return sum(stage.param_count for stage in self.stages)

    @property
    def communicates(self) -> bool:
        """Whether other ranks take part in this layer."""
        return not all(stage.comm.is_local for stage in self.stages)

    @property
    def shards_rows(self) -> bool:
        """Whether rows are spread over the ranks on one side of some stage."""
        return any(stage.comm.shards_rows for stage in self.stages)

    @property
    def gathers_norm(self) -> bool:
        """Whether the norm's output is returned with all ranks' rows, of which this rank has made its own."""
        return self.return_norm_output and self.norm_output_gathered and self.stages[0].comm.plan.x is Move.ALL_GATHER

    @property
    def group_name(self) -> str:
        return next((stage.comm.group_name for stage in self.stages if not stage.comm.is_local), "")

    @property
    def fused_op(self) -> str:
        """What a compiled graph calls a single product with its collective; "" if there is none."""
        if len(self.stages) != 1:
            return ""
        plan = self.stages[0].comm.plan
        gathers, scatters = plan.x is Move.ALL_GATHER, plan.y is Move.REDUCE_SCATTER
        if gathers == scatters:
            return ""
        return "all_gather_linear" if gathers else "linear_reduce_scatter"

    @property
    def seed_count(self) -> int:
        """How many seeds stochastic rounding draws: one per weight, so that groups are rounded independently."""
        return sum(stage.weights for stage in self.stages)

    @property
    def scale_count(self) -> int:
        """How many scales delayed scaling keeps for this layer."""
        return sum(len(OPERANDS) * stage.weights for stage in self.stages)


@value_type
@dataclasses.dataclass(frozen=True)
class CallFlags(Value):
    """What one call needs.

    Attributes:
        input_grad: the gradient with respect to the layer's input.
        param_grads: for each slot of the parameter list.
        keep_planes: quantize weights with both planes whatever this call needs, because they are kept for later ones.
        weight_grad_dtype: of the weights' gradients; None is each weight's own.
        device_splits: the rows of each group are known on the device only, see pipeline/device_groups.py.
        gathered: the weights come quantized, with the planes that had to be gathered (tensors/gathered.py).
        shards: under sequence parallelism the entries of the first dimension that each rank has, or those of each of
            its groups; () if all ranks have as many.
        given: what the layer's input was quantized by before the call, in a compiled graph; None: it is not quantized.
    """

    input_grad: bool
    param_grads: tuple[bool, ...]
    keep_planes: bool = False
    weight_grad_dtype: torch.dtype | None = None
    device_splits: bool = False
    gathered: bool = False
    shards: tuple[int | tuple[int, ...], ...] = ()
    given: Quantizer | None = None

    @property
    def any_grad(self) -> bool:
        return self.input_grad or any(self.param_grads)


@dataclasses.dataclass(frozen=True, slots=True)
class StageConfig:
    """A stage under a recipe. Quantizers hold the planes that are really read; None is high precision.

    Attributes:
        x, weight, dy: quantizers of the operands.
        dy_column: quantizer of the plane of dy that wgrad reads.
        dgrad_plane: quantizer of what is kept of the weight for dgrad; None if that is the weight itself, or nothing.
        x_saved: quantizer of what is kept of x for wgrad: one plane; None if x itself is kept, or nothing.
        derives_column: dgrad_plane is the row plane, from which backward makes the column plane.
        fprop, dgrad, wgrad: whether each product runs on quantized operands.
        needs_dgrad, needs_wgrad, needs_bias_grad, needs_norm_grad: what backward computes.
        first_scale: index of this stage's first scale under delayed scaling.
        x_row: quantizer of the plane of x that fprop reads, and that is gathered for it.
        shard_block: rows that a shard is padded to a multiple of, where rows are spread over ranks.
    """

    spec: StageSpec
    x: Quantizer | None
    x_saved: Quantizer | None
    weight: Quantizer | None
    dgrad_plane: Quantizer | None
    derives_column: bool
    dy: Quantizer | None
    dy_column: Quantizer | None
    fprop: bool
    dgrad: bool
    wgrad: bool
    dequantized_backward: bool
    needs_dgrad: bool
    needs_wgrad: bool
    needs_bias_grad: bool
    needs_norm_grad: bool
    split_accumulator: tuple[bool | None, bool | None, bool | None]
    first_scale: int
    first_param: int
    x_row: Quantizer | None = None
    shard_block: int = 1

    @property
    def weight_slot(self) -> int:
        """Where the weights start in the layer's parameter list."""
        return self.first_param + (2 if self.spec.produce == NORM else 0)

    @property
    def bias_slot(self) -> int:
        return self.weight_slot + self.spec.weights

    def seed_index(self, group: int = 0) -> int:
        return self.first_scale // len(OPERANDS) + group

    def scale_index(self, operand: str, group: int = 0) -> int:
        return self.first_scale + OPERANDS.index(operand) * self.spec.weights + group


@dataclasses.dataclass(frozen=True, slots=True)
class LayerConfig:
    spec: LayerSpec
    flags: CallFlags
    recipe: Recipe | None
    stages: tuple[StageConfig, ...]
    delayed: bool
    communicates: bool = False

    @property
    def draws_seed(self) -> bool:
        """Whether gradients are rounded stochastically, and backward needs a seed that forward has drawn."""
        return any(getattr(stage.dy, "stochastic_rounding", False) for stage in self.stages)


def role_of(layer: LayerSpec, stage: StageSpec, operand: str) -> QuantizerRole:
    name = ".".join(part for part in (layer.name, stage.name) if part)
    return QuantizerRole(layer.module_type, operand, name)


@functools.lru_cache(maxsize=4096)
def resolve(spec: LayerSpec, recipe: Recipe | None, flags: CallFlags) -> LayerConfig:
    """The configuration of a call. Equal arguments give the same object."""
    stages: list[StageConfig] = []
    scale = param = 0
    # Gradients flow from the last stage down to the first one that anybody wants something of.
    for stage in spec.stages:
        below = flags.input_grad or any(flags.param_grads[:param])
        stages.append(_stage(spec, stage, recipe, flags, below, scale, param))
        scale += len(OPERANDS) * stage.weights
        param += stage.param_count
    return LayerConfig(spec, flags, recipe, tuple(stages), isinstance(recipe, DelayedScaling), spec.communicates)


def _quantizer(recipe: Recipe | None, role: QuantizerRole) -> Quantizer | None:
    if recipe is None:
        return None
    if isinstance(recipe, DelayedScaling):  # the layout; the scale is a tensor that comes with each call
        return Float8CurrentScalingQuantizer(recipe.fp8_format.dtype(role.is_gradient))
    made = recipe.quantizer_for(role)
    return None if isinstance(made, IdentityQuantizer) and made.dtype is None else made


def _planes(quantizer: Quantizer | None, row: bool, column: bool) -> Quantizer | None:
    if quantizer is None or not (row or column):
        return None
    return quantizer.with_usage(rowwise=row, columnwise=column)


def _stage(
    layer: LayerSpec,
    stage: StageSpec,
    recipe: Recipe | None,
    flags: CallFlags,
    below: bool,
    scale: int,
    param: int,
) -> StageConfig:
    grads = flags.param_grads[param : param + stage.param_count]
    norm_grads, grads = (grads[:2], grads[2:]) if stage.produce == NORM else ((), grads)
    needs_wgrad, needs_bias = any(grads[: stage.weights]), any(grads[stage.weights :])
    needs_norm = any(norm_grads)
    needs_dgrad = below or needs_norm
    x, w, dy = (_quantizer(recipe, role_of(layer, stage, operand)) for operand in OPERANDS)
    override = None if recipe is None else recipe.backward_override
    fprop = recipe is not None and recipe.fp8_gemm_fprop.quantized and not (x is None and w is None)
    backward = recipe is not None and override is None and not (dy is None and w is None and x is None)
    dgrad = backward and recipe is not None and recipe.fp8_gemm_dgrad.quantized
    wgrad = backward and recipe is not None and recipe.fp8_gemm_wgrad.quantized
    dequantized = override == "dequantized" and fprop
    # x: the row plane for fprop, the column plane for wgrad. A dequantized backward keeps fprop's own plane.
    # Groups that only the device knows cannot have a column plane each: wgrad reads the row plane of all of them.
    x_column = needs_wgrad and wgrad and not flags.device_splits
    x_row = needs_wgrad and (dequantized or (wgrad and flags.device_splits))
    saved = _planes(x, False, True) if x_column else (_planes(x, True, False) if x_row else None)
    uses_weight = fprop or (dgrad and (needs_dgrad or flags.keep_planes))
    weight = None
    if uses_weight:
        weight = _planes(w, fprop or flags.keep_planes, (needs_dgrad and dgrad) or flags.keep_planes)
    dgrad_plane = None
    if weight is not None and needs_dgrad and (dgrad or dequantized):
        dgrad_plane = _planes(weight, dequantized, not dequantized)
    derives_column = flags.gathered and w is not None and w.column_from_row
    if flags.gathered and w is not None:
        weight = _planes(w, True, not derives_column)
        if dgrad_plane is not None and derives_column:
            dgrad_plane = weight
    products = () if recipe is None else (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    splits = tuple(product.use_split_accumulator for product in products) or (None, None, None)
    x_planes = _planes(x, fprop or x_row, x_column)
    dy_planes = _planes(
        dy,
        (dgrad and needs_dgrad) or (wgrad and needs_wgrad and flags.device_splits),
        wgrad and needs_wgrad and not flags.device_splits,
    )
    block = 1
    if stage.comm.shards_rows:  # both operands of wgrad in the same rows
        block = max([1, *(max(q.block_rows, q.row_multiple) for q in (x_planes, dy_planes) if q is not None)])
    return StageConfig(
        spec=stage,
        x=x_planes,
        x_saved=saved,
        weight=weight,
        dgrad_plane=dgrad_plane,
        derives_column=derives_column and dgrad,
        dy=dy_planes,
        dy_column=_planes(dy, False, True),
        fprop=fprop,
        dgrad=dgrad,
        wgrad=wgrad,
        dequantized_backward=dequantized,
        needs_dgrad=needs_dgrad,
        needs_wgrad=needs_wgrad,
        needs_bias_grad=needs_bias,
        needs_norm_grad=needs_norm,
        split_accumulator=splits,  # type: ignore[arg-type]
        first_scale=scale,
        first_param=param,
        x_row=_planes(x_planes, True, False) if x_planes is not None and x_planes.rowwise else None,
        shard_block=block,
    )


def roles(spec: LayerSpec) -> list[QuantizerRole]:
    """One role per scale of delayed scaling, in the order of ``StageConfig.scale_index``."""
    return [
        role_of(spec, stage, operand) for stage in spec.stages for operand in OPERANDS for _ in range(stage.weights)
    ]

"""A grouped stage whose group sizes only the device knows: nothing here is read on the host.

Letters: M rows of all groups, E groups, K in, N out. `offsets` int32 [E] says where each group ends.

Without the sizes, a group cannot be quantized for itself. What is computed:

    x, dy      the rows of all groups are quantized at once, row planes only. Scales along a row (MXFP8, 1x128 blocks)
               are those that each group would get; a per-tensor scale (or NVFP4's outer one) is that of all rows
               together, and delayed scaling uses and records the scale of group 0.
    weights    as always: one quantized weight per group.
    fprop, dgrad   per-tensor E4M3 on Hopper and datacenter Blackwell: torch's scaled_grouped_mm. All else: the
               operands are dequantized, rounded to bf16, and multiplied by torch's grouped_mm.
    wgrad      grouped_mm of the dequantized row planes of dy and x: no Hadamard transform, no column plane.
    bias       added to y in bf16; its gradient sums the unquantized dy.

All products add up in float32 and return bf16, hence so do the gradients of weights and biases before they are cast to
their parameter's dtype. Below compute capability 9 torch's grouped_mm itself reads the offsets on the host.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.formats import round_up
from te_dist.gemm_grouped import grouped_gemm, has_grouped_kernel
from te_dist.gemm_native import padded
from te_dist.pipeline.args import BwdArgs, BwdResult, FwdArgs, StageSaved, TensorOrQuantized
from te_dist.pipeline.config import StageConfig
from te_dist.pipeline.device_shards import RowExchange
from te_dist.pipeline.operands import high_precision, quantize_operand
from te_dist.pipeline.shards import GroupRows
from te_dist.pipeline.weights import column_of_weight
from te_dist.plan import Move
from te_dist.producers import Plain, Producer
from te_dist.tensors.storage import QuantizedStorage
from te_dist.transport import Done, Pending

DTYPE = torch.bfloat16  # of the operands and results of grouped_mm
MULTIPLE = 16  # of the sizes that its kernels take; zeros fill up


def check_offsets(offsets: Tensor, rows: int) -> None:
    """Stop the device if the groups are not what the rows hold. The host does not wait for the answer."""
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    torch._assert_async(
        ((offsets[-1] == rows) & (sizes >= 0).all()),
        f"GroupedLinear expects m_splits that are not negative and add up to the {rows} rows of the input",
    )


def fprop(
    args: FwdArgs,
    stage: StageConfig,
    x: TensorOrQuantized,
    weights: list[TensorOrQuantized],
    offsets: Tensor,
    *,
    with_bias: bool,
) -> Tensor:
    features = weights[0].shape[0]
    if kernels.is_shapes_only():
        return torch.empty((x.shape[0], features), dtype=args.out_dtype, device=x.device)
    check_offsets(offsets, x.shape[0])
    y = _rows_product("fprop", x, weights, offsets, wants_float32=stage.split_accumulator[0] is True)
    if with_bias:
        y = _add_bias(args, stage, y, offsets)
    return y.to(args.out_dtype)


def fprop_exchanged(
    args: FwdArgs,
    stage: StageConfig,
    x: TensorOrQuantized,
    weights: list[TensorOrQuantized],
    spread: Sequence[GroupRows] | None,
    kept: StageSaved,
) -> Tensor:
    """``fprop`` with other ranks: x is gathered before, or y is reduced after the product."""
    spec, comm, plan = stage.spec, stage.spec.comm, stage.spec.comm.plan
    offsets = args.offsets
    assert offsets is not None
    exchange = None if spread is None else RowExchange(comm, spread[0], offsets)
    if exchange is not None and plan.x is Move.ALL_GATHER:
        if not kernels.is_shapes_only():
            check_offsets(offsets, exchange.rows.mine)
        gathered = exchange.start_gather([x]).wait()[0]
        if comm.keeps_gathered and kept.x is not None and stage.x_saved is not None:
            kept.x = [gathered]
        x, offsets = exchange.grouped(gathered), exchange.offsets
    reduced = plan.y is not Move.NONE  # a bias is added once, not by every rank
    y = fprop(args, stage, x, weights, offsets, with_bias=spec.has_bias and not reduced)
    if not reduced:
        return y
    y = y.to(comm.wire_dtype or y.dtype)
    if exchange is None:
        y = comm.start_reduce(plan.y, y).wait()
    else:
        y, offsets = exchange.start_scatter(y).wait(), exchange.own_offsets
    return (_add_bias(args, stage, y, offsets) if spec.has_bias else y).to(args.out_dtype)


def _add_bias(args: FwdArgs, stage: StageConfig, y: Tensor, offsets: Tensor) -> Tensor:
    """Each row plus the bias of its group."""
    if kernels.is_shapes_only():
        return y
    biases = args.params[stage.bias_slot : stage.bias_slot + stage.spec.groups]
    table = torch.stack([bias for bias in biases if bias is not None]).to(y.dtype)
    return y + table[_group_of_rows(offsets, y.shape[0])]


def backward_products(
    args: BwdArgs, index: int, stage: StageConfig, saved: StageSaved, source: Producer, result: BwdResult
) -> Tensor | None:
    """The gradients of weights and biases into `result`; returns that of x, after its move over the ranks.

    In time, with other ranks: the gather of x runs while dy is quantized and dgrad is computed, the reduction of dx
    while wgrad is.
    """
    comm, plan, offsets = stage.spec.comm, stage.spec.comm.plan, args.offsets
    assert offsets is not None
    spread = None if args.rows is None else args.rows[index]
    exchange = None if spread is None else RowExchange(comm, spread[0], offsets)
    pending_x = _start_input(args, stage, saved, exchange) if stage.needs_wgrad else None
    gathers = exchange is not None and plan.dy is Move.ALL_GATHER
    dy: TensorOrQuantized
    dy = plain = kernels.materialize(source)
    if stage.dy is not None:
        seed = None if args.seeds is None else args.seeds[stage.seed_index()]
        padded_to = exchange.rows.padded if exchange is not None and gathers else None
        dy = quantize_operand(
            args.config, stage, "grad_output", stage.dy, Plain(plain), args.scales, args.amaxes, seed,
            padded_to=padded_to,
        )  # fmt: skip
    if stage.needs_bias_grad:
        of_rows = offsets if exchange is None else exchange.own_offsets if gathers else exchange.offsets
        _bias_gradients(args, stage, plain, of_rows, gathers, result)
    for_dgrad, for_wgrad = (dy if stage.dgrad else plain), (dy if stage.wgrad else plain)
    if exchange is not None:
        offsets = exchange.offsets
        if gathers:
            for_dgrad, for_wgrad = _gathered_gradients(stage, exchange, for_dgrad, for_wgrad)
    pending_dx: Pending[Tensor] | None = None
    if stage.needs_dgrad:
        da = _dgrad(args, index, stage, for_dgrad, offsets)
        da = da.to(args.x_dtype if plan.dx is Move.NONE else comm.wire_dtype or args.x_dtype)
        scatters = exchange is not None and plan.dx is Move.REDUCE_SCATTER
        pending_dx = exchange.start_scatter(da) if exchange is not None and scatters else comm.start_reduce(plan.dx, da)
        del da
    if pending_x is not None:
        _weight_gradients(args, stage, WeightGradients(for_wgrad, pending_x.wait(), offsets), result)
    return None if pending_dx is None else pending_dx.wait().to(args.x_dtype)


def _start_input(
    args: BwdArgs, stage: StageConfig, saved: StageSaved, exchange: RowExchange | None
) -> Pending[TensorOrQuantized]:
    """x as wgrad reads it, group by group: what was kept, or all ranks' rows of it."""
    comm = stage.spec.comm
    if exchange is None or comm.plan.x is not Move.ALL_GATHER:
        return Done(_wgrad_input(args, stage, saved))
    if comm.keeps_gathered and saved.x is not None and stage.x_saved is not None:
        return Done(exchange.grouped(saved.x[0]))
    pending = exchange.start_gather([_wgrad_input(args, stage, saved, exchange.rows.padded)])
    return Pending(None, lambda: exchange.grouped(pending.wait()[0]))


def _gathered_gradients(
    stage: StageConfig, exchange: RowExchange, for_dgrad: TensorOrQuantized, for_wgrad: TensorOrQuantized
) -> tuple[TensorOrQuantized, TensorOrQuantized]:
    """All ranks' rows of dy as the products read it, which is mostly the same for both, group by group."""
    if not stage.needs_dgrad or not stage.needs_wgrad or for_dgrad is for_wgrad:
        needed = for_dgrad if stage.needs_dgrad else for_wgrad
        whole = exchange.grouped(exchange.start_gather([needed]).wait()[0])
        return whole, whole
    first, second = exchange.start_gather([for_dgrad, for_wgrad]).wait()
    return exchange.grouped(first), exchange.grouped(second)


def _dgrad(args: BwdArgs, index: int, stage: StageConfig, dy: TensorOrQuantized, offsets: Tensor) -> Tensor:
    weights = args.weights[index]
    if kernels.is_shapes_only():
        return torch.empty((dy.shape[0], weights[0].shape[1]), dtype=args.x_dtype, device=dy.device)
    if stage.dequantized_backward:  # what was kept is the row plane, which dgrad's kernel does not read
        weights = [high_precision(weight, DTYPE) for weight in weights]
    elif args.config.flags.gathered:
        weights = [column_of_weight(stage, weight) for weight in weights]
    return _rows_product("dgrad", dy, weights, offsets)


# ------------------------------------------------------------------------------------------------- fprop and dgrad
def _rows_product(
    kind: str, a: TensorOrQuantized, weights: list[TensorOrQuantized], offsets: Tensor, wants_float32: bool = False
) -> Tensor:
    """x . w^T or dy . w of every group: [M, N] or [M, K] in bf16."""
    rows, cols = weights[0].shape
    if a.shape[0] == 0:  # no kernel for nothing
        return torch.zeros((0, rows if kind == "fprop" else cols), dtype=DTYPE, device=a.device)
    # The kernel's fprop adds up in the tensor cores' short accumulator: not for a recipe that asks for float32.
    if not wants_float32 and not isinstance(a, Tensor) and _has_kernel(kind, a, weights):
        return grouped_gemm(a, weights, kind=kind, out_dtype=DTYPE, offsets=offsets)
    _announce_emulation(kind, a, weights[0])
    values = torch.stack([_fitted(_weight_values(kind, weight), round_up(rows, MULTIPLE)) for weight in weights])
    product = grouped_gemm(_fitted(_values(a)), values, kind=kind, out_dtype=DTYPE, offsets=offsets)
    return product[:, : rows if kind == "fprop" else cols].contiguous()


def _announce_emulation(kind: str, a: TensorOrQuantized, b: TensorOrQuantized) -> None:
    formats = tuple(t.FORMAT for t in (a, b) if isinstance(t, QuantizedStorage))
    if formats and a.device.type != "cpu":  # as te_dist.gemm: on a CPU nothing is native, and nobody asks
        _announce_once(kind, " x ".join(dict.fromkeys(formats)))


@functools.cache
def _announce_once(kind: str, formats: str) -> None:
    warnings.warn(
        f"te_dist: GroupedLinear's {kind} of {formats} with m_splits on the device is emulated (dequantize, then "
        f"grouped_mm in bfloat16); m_splits as a list uses the kernels of single products",
        stacklevel=2,
    )


def _has_kernel(kind: str, a: TensorOrQuantized, weights: list[TensorOrQuantized]) -> bool:
    return has_grouped_kernel(a, weights, kind=kind, out_dtype=DTYPE)


def _weight_values(kind: str, weight: TensorOrQuantized) -> Tensor:
    """The values of the plane that the product reads: dgrad's are those of the column plane."""
    if isinstance(weight, QuantizedStorage) and kind == "dgrad" and weight.has_columnwise:
        weight = weight.with_usage(rowwise=False, columnwise=True)
    return _values(weight)


def _values(operand: TensorOrQuantized) -> Tensor:
    return high_precision(operand, DTYPE).detach().to(DTYPE)


def _fitted(matrix: Tensor, rows: int | None = None) -> Tensor:
    """A matrix with zeros up to a width that the kernels take, and up to `rows`; the number of tokens is free."""
    return padded(matrix, rows or matrix.shape[0], round_up(matrix.shape[1], MULTIPLE)).contiguous()


def _group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """int64 [M]: which group each row belongs to."""
    return torch.searchsorted(offsets, torch.arange(rows, dtype=offsets.dtype, device=offsets.device), right=True)


# ------------------------------------------------------------------------------------------------- wgrad
class WeightGradients:
    """The products of all groups, computed once, when the first of them is asked for."""

    def __init__(self, dy: TensorOrQuantized, x: TensorOrQuantized, offsets: Tensor) -> None:
        self._operands: tuple[TensorOrQuantized, TensorOrQuantized, Tensor] | None = (dy, x, offsets)
        self._made: Tensor | None = None

    def __getitem__(self, group: int) -> Tensor:
        if self._made is None:
            assert self._operands is not None
            (dy, x, offsets), self._operands = self._operands, None
            self._made = columns_product(dy, x, offsets)
        return self._made[group]


@dataclasses.dataclass(slots=True)
class WeightGradient:
    """One group's gradient, as backward.WeightGradient: computed now or later."""

    products: WeightGradients
    group: int
    dtype: torch.dtype
    out: Tensor | None  # main_grad
    accumulate: bool

    def run(self) -> Tensor:
        gradient = self.products[self.group]
        if self.out is None:
            return gradient.to(self.dtype)
        return self.out.add_(gradient) if self.accumulate else self.out.copy_(gradient)


def columns_product(dy: TensorOrQuantized, x: TensorOrQuantized, offsets: Tensor) -> Tensor:
    """dy^T . x of every group: bf16 [E, N, K]."""
    features, depth = dy.shape[1], x.shape[1]
    if kernels.is_shapes_only():
        return torch.empty((offsets.shape[0], features, depth), dtype=DTYPE, device=dy.device)
    if dy.shape[0] == 0:
        return torch.zeros((offsets.shape[0], features, depth), dtype=DTYPE, device=dy.device)
    _announce_emulation("wgrad", dy, x)
    made = grouped_gemm(_fitted(_values(dy)), _fitted(_values(x)), kind="wgrad", out_dtype=DTYPE, offsets=offsets)
    return made[:, :features, :depth].contiguous()


def _weight_gradients(args: BwdArgs, stage: StageConfig, products: WeightGradients, result: BwdResult) -> None:
    for group in range(stage.spec.groups):
        slot = stage.weight_slot + group
        if not args.config.flags.param_grads[slot]:
            continue
        dtype = args.param_dtypes[slot]
        assert dtype is not None
        main_grad = None if args.main_grads is None else args.main_grads[slot]
        accumulate = main_grad is not None and slot not in args.overwrite_main_grads
        product = WeightGradient(products, group, dtype, main_grad, accumulate)
        if args.wgrad_store is not None:
            args.wgrad_store.append((slot, product))
        elif main_grad is not None:
            product.run()
        else:
            # Not a view of all groups' gradients: an op must not return one memory twice.
            result.dparams[slot] = product.run().clone()


def _wgrad_input(
    args: BwdArgs, stage: StageConfig, saved: StageSaved, padded_to: int | None = None
) -> TensorOrQuantized:
    """x as wgrad reads it: the row plane that was kept, or the layer's input, quantized again where wgrad is."""
    if saved.x is not None:
        return saved.x[0]
    assert args.x is not None
    if stage.x_saved is None or not isinstance(args.x, Tensor):
        return args.x
    scratch = None if args.amaxes is None else torch.zeros_like(args.amaxes)  # forward has recorded it
    return quantize_operand(
        args.config, stage, "input", stage.x_saved, Plain(args.x), args.scales, scratch, padded_to=padded_to
    )


def _bias_gradients(
    args: BwdArgs, stage: StageConfig, dy: Tensor, offsets: Tensor, of_part: bool, result: BwdResult
) -> None:
    """`of_part`: dy has this rank's rows only, and the others' sums are missing."""
    # A product with ones: the grouped kernel sums in a fixed order, index_add would not.
    ones = torch.ones((dy.shape[0], MULTIPLE), dtype=DTYPE, device=dy.device)
    sums = columns_product(dy, ones, offsets)[..., 0]
    if of_part:
        sums = stage.spec.comm.sum_gradient(sums.float())
    for group in range(stage.spec.groups):
        dtype = args.param_dtypes[stage.bias_slot + group]
        assert dtype is not None
        result.dparams[stage.bias_slot + group] = sums[group].to(dtype).clone()

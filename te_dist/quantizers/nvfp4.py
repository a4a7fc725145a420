"""NVFP4: E2M1 values, an E4M3 scale per 16 of them, an fp32 amax for the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from te_dist import kernels, reference
from te_dist.formats import HADAMARD_SIGN_MASK, NVFP4_BLOCK_SIZE, DType, ceil_div, matrix_size, round_up
from te_dist.groups import GroupLike, all_reduce_amax
from te_dist.producers import Producer
from te_dist.quantizers.base import BufferSpecs, Quantizer, register_value_quantizer
from te_dist.quantizers.checks import check_has_dimensions, check_small_tensor
from te_dist.tensors.nvfp4 import NVFP4TensorStorage
from te_dist.tensors.storage import QuantizedStorage


@register_value_quantizer
class NVFP4Quantizer(Quantizer):
    """Two-level scaled FP4.

    Args:
        with_rht: put the column plane through a 16-point Hadamard transform along M. Both operands of the weight
            gradient's GEMM have it, so it cancels there, and it spreads outliers.
        with_random_sign_mask: flip signs before the transform, by a fixed pattern that is the same on all ranks.
        with_2d_quantization: share a scale among 16x16 values (weights), so that both planes hold the same numbers.
        stochastic_rounding: round up with the probability of the remainder (gradients); see ``quantize(rng_state=)``.
    """

    _value_fields = (
        "fp4_dtype",
        "rowwise",
        "columnwise",
        "with_rht",
        "with_2d_quantization",
        "stochastic_rounding",
        "with_random_sign_mask",
    )
    storage_cls = NVFP4TensorStorage

    fp4_dtype: DType
    with_rht: bool
    with_2d_quantization: bool
    stochastic_rounding: bool
    with_random_sign_mask: bool

    def __init__(
        self,
        fp4_dtype: DType | str = DType.kFloat4E2M1,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        with_random_sign_mask: bool = True,
    ) -> None:
        self.fp4_dtype = DType.cast(fp4_dtype)
        if self.fp4_dtype != DType.kFloat4E2M1:
            raise ValueError(f"{type(self).__name__} expects fp4_dtype e2m1 but got {fp4_dtype!r}")
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)
        self.with_rht = bool(with_rht)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.with_random_sign_mask = bool(with_random_sign_mask)
        self._check_usage()
        if self.with_rht and self.with_2d_quantization:
            raise ValueError(
                f"{type(self).__name__}: with_rht transforms the column plane only, so its planes cannot share the "
                f"16x16 scales of with_2d_quantization; choose one of the two"
            )

    def describe(self) -> str:
        options = (("RHT", self.with_rht), ("stochastic", self.stochastic_rounding))
        blocks = "16x16" if self.with_2d_quantization else "1x16"
        return " ".join(["NV e2m1", blocks, "blocks", *(f"+{name}" for name, on in options if on)])

    @property
    def rht_matrix(self) -> Tensor:
        """diag(signs) . H16 . 0.25 in bf16; depends on ``with_random_sign_mask`` alone."""
        identity = torch.eye(NVFP4_BLOCK_SIZE)
        return reference.hadamard(identity, self.with_random_sign_mask).to(torch.bfloat16)

    @property
    def rht_matrix_random_sign_mask_t(self) -> int:
        """The sign pattern as an integer: bit i set means that input i is negated."""
        return HADAMARD_SIGN_MASK if self.with_random_sign_mask else 0

    @property
    def row_multiple(self) -> int:  # type: ignore[override]
        """Rows of zeros up to whole blocks change no amax and add nothing to a product."""
        return NVFP4_BLOCK_SIZE if self.columnwise else 1

    @property
    def column_from_row(self) -> bool:  # type: ignore[override]
        return self.with_2d_quantization and not self.with_rht and not self.stochastic_rounding

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return NVFP4_BLOCK_SIZE if self.columnwise or self.with_2d_quantization else 1

    def _check_shape(self, shape: Sequence[int]) -> None:
        check_has_dimensions(shape, type(self).__name__)
        rows, cols = matrix_size(shape)
        name, given = type(self).__name__, f"got shape {list(shape)}"
        if self.rowwise and cols % 2:
            raise ValueError(f"{name} packs two values a byte and expects an even last dimension but {given}")
        if self.columnwise and rows % 2:
            raise ValueError(
                f"{name} packs the column plane along M (the product of the leading dimensions) and expects it even "
                f"but M is {rows}: {given}; pad the rows or ask for rowwise only"
            )
        if self.columnwise and self.with_rht and rows % NVFP4_BLOCK_SIZE:
            raise ValueError(
                f"{name} with_rht transforms groups of 16 along M and expects M to be a multiple of 16 but M is "
                f"{rows}: {given}; pad the rows with zeros"
            )

    def _draw_rng(self, x: Tensor, rng_state: Tensor | None) -> Tensor | None:
        if rng_state is not None or not self.stochastic_rounding:
            return rng_state
        # torch.manual_seed governs it, and so does the RNG state that activation checkpointing restores.
        return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=x.device)

    def _check_rng(self, x: Tensor, rng_state: Tensor | None) -> Tensor | None:
        if not self.stochastic_rounding:
            return super()._check_rng(x, rng_state)
        if rng_state is not None:
            check_small_tensor("rng_state", rng_state, torch.int64, 2, x.device)
        return self._draw_rng(x, rng_state)

    def _describe_buffers(self, shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> BufferSpecs:
        rows, cols = matrix_size(shape)
        specs: BufferSpecs = {}
        if self.rowwise:
            specs["_rowwise_data"] = ((*shape[:-1], cols // 2), torch.uint8)
            specs["_rowwise_scale_inv"] = (_scale_shape(rows, cols), torch.uint8)
        if self.columnwise:
            specs["_columnwise_data"] = ((cols, rows // 2), torch.uint8)
            specs["_columnwise_scale_inv"] = (_scale_shape(cols, rows), torch.uint8)
        if self.rowwise:
            specs["_amax_rowwise"] = ((1,), torch.float32)
        if self.columnwise:
            specs["_amax_columnwise"] = ((1,), torch.float32)
        return specs

    def _quantize_into(
        self,
        x: Tensor | Producer,
        out: QuantizedStorage,
        group: GroupLike | None,
        noop: Tensor | None,
        rng_state: Tensor | None,
    ) -> None:
        out = cast(NVFP4TensorStorage, out)
        planes = (out._rowwise_data, out._rowwise_scale_inv, out._columnwise_data, out._columnwise_scale_inv)
        rht, signs = self.with_rht, self.with_random_sign_mask
        amaxes = (out._amax_rowwise, out._amax_columnwise)
        if group is None:
            kernels.quantize_nvfp4_current(
                x,
                *amaxes,
                *planes,
                two_d=self.with_2d_quantization,
                with_rht=rht,
                random_signs=signs,
                rng_state=rng_state,
                noop=noop,
            )
            return
        # Reduced apart from `out`, which a no-op flag on this rank must leave alone.
        amax_row, amax_col = (None if a is None else torch.empty_like(a) for a in amaxes)
        kernels.amax_nvfp4(x, amax_row, amax_col, with_rht=rht, random_signs=signs)
        all_reduce_amax([amax for amax in (amax_row, amax_col) if amax is not None], group)
        kernels.store(out._amax_rowwise, amax_row, noop)
        kernels.store(out._amax_columnwise, amax_col, noop)
        kernels.quantize_nvfp4(
            x,
            amax_row,
            amax_col,
            *planes,
            two_d=self.with_2d_quantization,
            with_rht=rht,
            random_signs=signs,
            rng_state=rng_state,
            noop=noop,
        )


def _scale_shape(rows: int, cols: int) -> tuple[int, int]:
    return round_up(rows, 128), round_up(ceil_div(cols, NVFP4_BLOCK_SIZE), 4)

"""Producers: a matrix described by what makes it, so that a quantize can make it on the fly.

A norm, an activation or an activation's gradient is usually read once, by the quantize that follows. A producer
holds the inputs of that computation; handed to ``Quantizer.quantize`` in place of a tensor, it is fused with the
quantize where a kernel exists and materialized where not. Both ways give the same bits: the produced matrix is
rounded to its dtype before it is quantized, as if it had been written to memory.

Matrices here are 2-D with unit stride along the columns (``kernels.as_rows``); callers have checked shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The codes of csrc/numerics/activation.h.
ACTIVATION_CODES = {"gelu": 0, "qgelu": 1, "relu": 2, "srelu": 3, "silu": 4}
# TE's names of the gated ones: act(x[:, :K]) * x[:, K:].
GATED_ACTIVATIONS = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
ACTIVATIONS = (*ACTIVATION_CODES, *GATED_ACTIVATIONS)

COLUMN_TILE_ROWS = 128  # rows that one partial column sum covers


def split_activation(name: str) -> tuple[str, bool]:
    """The plain activation of a name, and whether it gates: "swiglu" -> ("silu", True)."""
    if name in ACTIVATION_CODES:
        return name, False
    if name in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[name], True
    raise ValueError(f"activation expects one of {ACTIVATIONS} but got {name!r}")


class Producer:
    """Base: what every produced matrix has. `partials` receives column sums per 128 rows if it is there."""

    __slots__ = ("materialized", "partials", "partials_ready", "shape", "x")

    kind = 0  # the code of csrc/api.h

    def __init__(self, x: Tensor, shape: tuple[int, int]) -> None:
        self.x = x
        self.shape = torch.Size(shape)
        self.partials: Tensor | None = None
        self.partials_ready = False
        self.materialized: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def numel(self) -> int:
        return self.shape.numel()

    def want_column_sums(self) -> None:
        """Ask the first kernel that makes this matrix to add up its columns too."""
        tiles = -(-self.shape[0] // COLUMN_TILE_ROWS)
        self.partials = torch.empty((tiles, self.shape[1]), dtype=torch.float32, device=self.device)


class Plain(Producer):
    """A matrix that exists; useful for its column sums, which a quantize then makes while it reads it."""

    __slots__ = ()

    def __init__(self, x: Tensor) -> None:
        super().__init__(x, (x.shape[0], x.shape[1]))
        self.materialized = x


class NormOutput(Producer):
    """RMSNorm (mean is None) or LayerNorm of the rows of `x`.

    `mean` and `rstd` (float32 [M]) are results: the first kernel that makes the matrix fills them.
    """

    __slots__ = ("bias", "eps", "mean", "rstd", "stats_ready", "weight", "zero_centered")

    kind = 1

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mean: Tensor | None,
        rstd: Tensor,
        *,
        eps: float,
        zero_centered: bool = False,
    ) -> None:
        super().__init__(x, (x.shape[0], x.shape[1]))
        self.weight = weight
        self.bias = bias
        self.mean = mean
        self.rstd = rstd
        self.eps = eps
        self.zero_centered = zero_centered
        self.stats_ready = False


class ActivationOutput(Producer):
    """act(x + bias), or act(a) * b of the two halves of `x` [M, 2K] where it is gated (bias [2K]).

    x + bias is rounded to x's dtype: the result is that of the sum without a bias, bit for bit.
    """

    __slots__ = ("activation", "bias", "gated")

    kind = 2

    def __init__(self, x: Tensor, activation: str, bias: Tensor | None = None) -> None:
        self.activation, self.gated = split_activation(activation)
        super().__init__(x, (x.shape[0], x.shape[1] // 2 if self.gated else x.shape[1]))
        self.bias = bias


class ActivationGradient(Producer):
    """The gradient with respect to x of ``ActivationOutput(x, activation, bias)``, given that of its result.

    Its shape is x's; its column sums are the bias gradient.
    """

    __slots__ = ("activation", "bias", "gated", "grad")

    kind = 3

    def __init__(self, grad: Tensor, x: Tensor, activation: str, bias: Tensor | None = None) -> None:
        super().__init__(x, (x.shape[0], x.shape[1]))
        self.activation, self.gated = split_activation(activation)
        self.grad = grad
        self.bias = bias

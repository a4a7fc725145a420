"""LayerNorm and RMSNorm on te_dist's kernels: the statistics and the order of sums that LayerNormLinear uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from te_dist.dynamo import norm as ops
from te_dist.formats import INPUT_DTYPES
from te_dist.modules.parameters import make_bias
from te_dist.tensors.quantized_tensor import QuantizedTensor
from te_dist.values import interned


class _Norm(torch.nn.Module):
    """What the two share. The result has the input's dtype, or that of a surrounding torch.autocast."""

    weight: Parameter
    bias: Parameter | None
    _is_layer_norm = True

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        *,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        label = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise ValueError(
                f"{label} expects normalized_shape, or hidden_size which is another name of it, but got "
                f"{normalized_shape!r} and {hidden_size!r}"
            )
        shape = hidden_size if normalized_shape is None else normalized_shape
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(shape or ())
        if not self.normalized_shape or min(self.normalized_shape) < 1:
            raise ValueError(f"{label} expects normalized_shape to have positive sizes but got {shape!r}")
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        self.spec = interned(ops.NormSpec(self._is_layer_norm, eps, zero_centered_gamma))
        for name, size in (("weight", self._size), ("bias", self._size if self._is_layer_norm else None)):
            make_bias(self, name, size, device, dtype or params_dtype)
            made = getattr(self, name)
            if made is not None and len(self.normalized_shape) > 1:
                setattr(self, name, Parameter(made.detach().view(self.normalized_shape)))
        self.reset_parameters()

    @property
    def _size(self) -> int:
        return math.prod(self.normalized_shape)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
            if self.bias is not None:
                self.bias.zero_()

    def forward(self, inp: Tensor) -> Tensor:
        """inp: [..., *normalized_shape]."""
        self._check(inp)
        device_type = inp.device.type
        if torch.is_autocast_enabled(device_type):
            inp = inp.to(torch.get_autocast_dtype(device_type))
        rows = inp.reshape(-1, self._size) if inp.dim() != 2 or len(self.normalized_shape) > 1 else inp
        weight, bias = self._gain_and_bias()
        grad = torch.is_grad_enabled()
        out = ops.Norm.apply(
            rows,
            weight,
            bias,
            self.spec,
            grad and weight.requires_grad,
            grad and bias is not None and bias.requires_grad,
        )
        return out.view(inp.shape)

    def _gain_and_bias(self) -> tuple[Tensor, Tensor | None]:
        return self.weight.view(-1), None if self.bias is None else self.bias.view(-1)

    def _check(self, inp: Tensor) -> None:
        label = type(self).__name__
        if isinstance(inp, QuantizedTensor) or not isinstance(inp, Tensor):
            raise TypeError(f"{label} expects an unquantized tensor but got {type(inp).__name__}")
        if inp.dtype not in INPUT_DTYPES:
            raise TypeError(
                f"{label} expects an input of float32, float16 or bfloat16 but got "
                f"{str(inp.dtype).removeprefix('torch.')}"
            )
        dims = len(self.normalized_shape)
        if inp.dim() < dims or tuple(inp.shape[-dims:]) != self.normalized_shape:
            raise ValueError(
                f"{label} expects the input's last dimensions to be {list(self.normalized_shape)} but got shape "
                f"{list(inp.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions.

    Args:
        normalized_shape: a size, or the sizes of the last dimensions. hidden_size is another name of it.
        eps: added to the variance.
        zero_centered_gamma: the gain is 1 + weight, and weight starts at 0: so that weight decay pulls it to 1.
        params_dtype, dtype, device: of the parameters.

    Example:
        >>> import torch, te_dist
        >>> norm = te_dist.LayerNorm(4)
        >>> norm(torch.tensor([[1.0, 1.0, 3.0, 3.0]])).round()
        tensor([[-1., -1.,  1.,  1.]], grad_fn=<RoundBackward0>)
    """


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimensions. Arguments as for ``te_dist.LayerNorm``.

    Example:
        >>> import torch, te_dist
        >>> norm = te_dist.RMSNorm(4, eps=0.0)
        >>> norm(torch.full((1, 4), 3.0)).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
    """

    _is_layer_norm = False

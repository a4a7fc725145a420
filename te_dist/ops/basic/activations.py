"""Activations: GELU, quick GELU, ReLU, squared ReLU, SiLU, and the gated forms of each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from te_dist import kernels
from te_dist.dynamo import operations
from te_dist.ops.basic.producing import quantized_output
from te_dist.ops.context import OperationContext
from te_dist.ops.op import BasicOperation, Gradients, Saved
from te_dist.producers import ActivationOutput, split_activation
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Float8CurrentScalingQuantizer, Quantizer
from te_dist.tensors.storage import QuantizedStorage

# Both planes would be twice the memory; backward reads one.
_CACHE = Float8CurrentScalingQuantizer("e4m3", rowwise=True, columnwise=False)


class Activation(BasicOperation):
    """y = act(x), or act(a) * b of the halves a and b of x's last dimension where the activation gates.

    Args:
        cache_quantized_input: keep x for backward in FP8: half the memory, at FP8's precision.
    """

    activation: ClassVar[str] = ""

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        try:
            _, self.gated = split_activation(self.activation)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__}: {error}") from None
        self.cache_quantized_input = cache_quantized_input

    def width_after(self, width: int | None, before: str) -> int | None:
        if width is None or not self.gated:
            return width
        if width % 2:
            raise ValueError(
                f"{self.label()} gates one half of its input with the other and expects an even last dimension but "
                f"{before} gives {width}"
            )
        return width // 2

    def op_forward_compute(
        self,
        input_: Tensor,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, Saved]:
        width = self.width_after(input_.shape[-1], "the input")
        out: TensorOrQuantized | None = None
        if torch.compiler.is_compiling():
            out = torch.ops.te_dist.activation_forward(input_, self.activation)
        elif next_op_input_quantizer is not None:
            source = ActivationOutput(kernels.as_rows(input_), self.activation)
            out = quantized_output(source, next_op_input_quantizer, (*input_.shape[:-1], int(width or 0)))
        if out is None:
            out = operations.activation_forward(input_, self.activation)
        if not requires_grad:
            return out, ()
        return out, (_CACHE.quantize(input_.detach()) if self.cache_quantized_input else input_,)

    def op_forward_save_ctx(self, ctx: OperationContext, input_: Tensor, tensors_to_save: Saved, **kwargs: Any) -> None:
        ctx.save_for_backward(*tensors_to_save)

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        compute = (
            torch.ops.te_dist.activation_backward if torch.compiler.is_compiling() else operations.activation_backward
        )
        return compute(grad_output, self.saved_input(ctx), self.activation), ()

    @staticmethod
    def saved_input(ctx: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.dequantize() if isinstance(x, QuantizedStorage) else x


class GELU(Activation):
    """tanh-approximated GELU."""

    activation = "gelu"


class GEGLU(Activation):
    """GELU(a) * b."""

    activation = "geglu"


class QGELU(Activation):
    """Quick GELU: x * sigmoid(1.702 x)."""

    activation = "qgelu"


class QGEGLU(Activation):
    """QGELU(a) * b."""

    activation = "qgeglu"


class ReLU(Activation):
    """max(x, 0)."""

    activation = "relu"


class ReGLU(Activation):
    """ReLU(a) * b."""

    activation = "reglu"


class SReLU(Activation):
    """Squared ReLU: max(x, 0)^2."""

    activation = "srelu"


class SReGLU(Activation):
    """SReLU(a) * b."""

    activation = "sreglu"


class SiLU(Activation):
    """x * sigmoid(x)."""

    activation = "silu"


class SwiGLU(Activation):
    """SiLU(a) * b.

    Example:
        >>> import torch, te_dist
        >>> te_dist.ops.SwiGLU()(torch.tensor([[0.0, 100.0, 3.0, 0.5]]))
        tensor([[ 0., 50.]])
    """

    activation = "swiglu"


def activation(name: str, **options: Any) -> Activation:
    """The operation of an activation's name, as ``te_dist.LayerNormMLP`` knows them: "gelu", "swiglu", ..."""
    classes: dict[str, type[Activation]] = {cls.activation: cls for cls in Activation.__subclasses__()}
    try:
        split_activation(name)
    except ValueError as error:
        raise ValueError(f"te_dist.ops.activation: {error}") from None
    return classes[name](**options)

"""Fused operations around a linear one: what comes right after it in the forward, or right before it.

`linear` is a BasicLinear or a LinearChain in each of them. The sums and factors of residual branches are written into
the product's own result, which nobody else holds: no memory of their own, and the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.dynamo import operations
from te_dist.ops.basic import Activation, AddExtraInput, BasicLinear, Bias, ConstantScale, MakeExtraOutput, RMSNorm
from te_dist.ops.context import OperationContext
from te_dist.ops.fused.linear_chain import LinearChain
from te_dist.ops.fused_op import FusedOperation
from te_dist.ops.fusions import windows
from te_dist.ops.op import BasicOperation, FusibleOperation, Gradients, Saved
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer

LinearLike = BasicLinear | LinearChain


def _added(own: Tensor, other: Tensor) -> Tensor:
    """The sum, in the memory of `own`, which is ours. Not while tracing: a graph decides about memory by itself, and
    torch 2.11 loses the gradient of an autograd.Function's result that was written in place."""
    other = other.to(own.dtype)
    return own + other if torch.compiler.is_compiling() else own.add_(other)


def _scaled(own: Tensor, scale: float) -> Tensor:
    return own * scale if torch.compiler.is_compiling() else own.mul_(scale)


def is_linear(op: FusibleOperation) -> bool:
    return isinstance(op, BasicLinear | LinearChain)


def _with_bias(linear: LinearLike, bias: Bias | None) -> LinearLike:
    return linear if bias is None else LinearChain([*linear.basic_operations, bias])


class _AfterLinear(FusedOperation):
    """A forward: the linear operation, then something on its result."""

    prepares = True

    def __init__(self, linear: LinearLike, *others: BasicOperation) -> None:
        super().__init__([*linear.basic_operations, *others])
        object.__setattr__(self, "inner", linear)
        self.inner_count = len(linear.basic_operations)

    inner: LinearLike

    @property
    def takes_quantized(self) -> bool:  # type: ignore[override]
        return self.inner.takes_quantized

    def prepare(self, input_requires_grad: bool, extra_inputs: Sequence[tuple[Tensor, ...]]) -> Any:
        return self.inner.prepare(input_requires_grad, extra_inputs[: self.inner_count])

    def input_quantizer_of(self, call: Any) -> Quantizer | None:
        return self.inner.input_quantizer_of(call)

    def _of_inner(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        lists = ("requires_grad", "basic_op_extra_inputs", "basic_op_kwargs")
        inner = {name: kwargs[name][: self.inner_count] for name in lists}
        return {**inner, "prev_op_grad_output_quantizer": None, "next_op_input_quantizer": None}

    def fuser_forward_compute(
        self, input_: TensorOrQuantized, **kwargs: Any
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]], list[Saved]]:
        product, extra, saved = self.inner.fuser_forward_compute(input_, **self._of_inner(kwargs))
        assert isinstance(product, Tensor)
        out, others = self.finish(product, kwargs)
        return out, [*extra, *[() for _ in others]], [*saved, *others]

    def finish(self, product: Tensor, kwargs: dict[str, Any]) -> tuple[TensorOrQuantized, list[Saved]]:
        """The output, and what each of the other operations saves. May write into `product`."""
        raise NotImplementedError(f"{type(self).__name__} must define finish")

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[Saved],
        **kwargs: Any,
    ) -> None:
        count = self.inner_count
        inner_kwargs = self._of_inner(kwargs)
        self.inner.fuser_forward_save_ctx(basic_op_ctxs[:count], input_, tensors_to_save[:count], **inner_kwargs)
        # The others' notes do not depend on their input, which was never a tensor of its own.
        for i, op in enumerate(self.basic_operations[count:], count):
            own = {
                name: kwargs[name][i : i + 1] for name in ("requires_grad", "basic_op_extra_inputs", "basic_op_kwargs")
            }
            op.fuser_forward_save_ctx(
                basic_op_ctxs[i : i + 1], input_, tensors_to_save[i : i + 1],
                prev_op_grad_output_quantizer=None, next_op_input_quantizer=None, **own,
            )  # fmt: skip


class ForwardLinearBiasAdd(_AfterLinear):
    """Linear, [Bias,] AddExtraInput. Bit-equal to the linear operation with its bias, and the sum apart."""

    def __init__(self, *, linear: LinearLike, bias: Bias | None = None, add: AddExtraInput) -> None:
        super().__init__(_with_bias(linear, bias), add)
        self.add_op = [add]

    def finish(self, product: Tensor, kwargs: dict[str, Any]) -> tuple[TensorOrQuantized, list[Saved]]:
        extra = kwargs["basic_op_extra_inputs"][-1][0]
        self.add_op[0].check(product, extra)
        return _added(product, extra), [()]

    @staticmethod
    def fuse_forward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and is_linear(ops[0]) and isinstance(ops[1], AddExtraInput):
                return 2, ForwardLinearBiasAdd(linear=ops[0], add=ops[1])
            return None

        return windows(ops, match)


class ForwardLinearScaleAdd(_AfterLinear):
    """Linear, ConstantScale, AddExtraInput. Bit-equal to the three apart."""

    def __init__(self, *, linear: LinearLike, scale: ConstantScale, add: AddExtraInput) -> None:
        super().__init__(linear, scale, add)
        self.scale, self.add_op = scale.scale, [add]

    def finish(self, product: Tensor, kwargs: dict[str, Any]) -> tuple[TensorOrQuantized, list[Saved]]:
        extra = kwargs["basic_op_extra_inputs"][-1][0]
        self.add_op[0].check(product, extra)
        # Not torch.add with an alpha: some devices round that factor to the tensors' type.
        return _added(_scaled(product, self.scale), extra), [(), ()]

    @staticmethod
    def fuse_forward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) < 3 or not is_linear(ops[0]):
                return None
            if isinstance(ops[1], ConstantScale) and isinstance(ops[2], AddExtraInput):
                return 3, ForwardLinearScaleAdd(linear=ops[0], scale=ops[1], add=ops[2])
            return None

        return windows(ops, match)


class ForwardLinearBiasActivation(_AfterLinear):
    """Linear, [Bias,] activation, where no other linear operation takes the activation in. Bit-equal to them apart."""

    def __init__(self, *, linear: LinearLike, bias: Bias | None = None, activation: Activation) -> None:
        super().__init__(_with_bias(linear, bias), activation)
        self.activation = [activation]

    def finish(self, product: Tensor, kwargs: dict[str, Any]) -> tuple[TensorOrQuantized, list[Saved]]:
        out, saved = self.activation[0].op_forward_compute(
            product,
            requires_grad=kwargs["requires_grad"][-1],
            next_op_input_quantizer=kwargs["next_op_input_quantizer"],
        )
        return out, [saved]

    @staticmethod
    def fuse_forward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and is_linear(ops[0]) and isinstance(ops[1], Activation):
                return 2, ForwardLinearBiasActivation(linear=ops[0], activation=ops[1])
            return None

        return windows(ops, match)


# ------------------------------------------------------------------------------------------------- backward
class _Backward(FusedOperation):
    """Replaces the backward of its operations alone."""

    def __init__(self, *ops: FusibleOperation) -> None:
        super().__init__([basic for op in ops for basic in op.basic_operations])
        object.__setattr__(self, "parts", ops)

    parts: tuple[Any, ...]


class _BeforeLinear(_Backward):
    """MakeExtraOutput or ConstantScale, and after it something whose dx takes up the sum or the factor."""

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        dx, params, inputs = self.parts[1].fuser_backward(
            basic_op_ctxs[1:], grad_output, basic_op_grad_extra_outputs=basic_op_grad_extra_outputs[1:]
        )
        if dx is not None:
            dx = self.finish(dx, basic_op_grad_extra_outputs[0])
        return dx, [(), *params], [(), *inputs]

    def finish(self, dx: Tensor, grad_extra: tuple[Tensor, ...]) -> Tensor:
        """May write into `dx`."""
        raise NotImplementedError(f"{type(self).__name__} must define finish")


class BackwardLinearAdd(_BeforeLinear):
    """MakeExtraOutput, Linear: the branch's gradient is added into dx. Bit-equal to the two apart."""

    def __init__(self, *, backward_add: MakeExtraOutput, linear: LinearLike) -> None:
        super().__init__(backward_add, linear)

    def finish(self, dx: Tensor, grad_extra: tuple[Tensor, ...]) -> Tensor:
        return _added(dx, grad_extra[0])

    @staticmethod
    def fuse_backward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and isinstance(ops[0], MakeExtraOutput) and is_linear(ops[1]) and not _norm_first(ops[1]):
                return 2, BackwardLinearAdd(backward_add=ops[0], linear=ops[1])
            return None

        return windows(ops, match)


class BackwardAddRMSNorm(_BeforeLinear):
    """MakeExtraOutput, RMSNorm (or a chain that starts with one): the branch's gradient is added into the norm's dx.
    Bit-equal to the two apart."""

    def __init__(self, *, add: MakeExtraOutput, rmsnorm: RMSNorm | LinearChain) -> None:
        super().__init__(add, rmsnorm)

    def finish(self, dx: Tensor, grad_extra: tuple[Tensor, ...]) -> Tensor:
        return _added(dx, grad_extra[0])

    @staticmethod
    def fuse_backward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and isinstance(ops[0], MakeExtraOutput) and _norm_first(ops[1]):
                return 2, BackwardAddRMSNorm(add=ops[0], rmsnorm=ops[1])
            return None

        return windows(ops, match)


def _norm_first(op: FusibleOperation) -> bool:
    return isinstance(op.basic_operations[0], RMSNorm) and (isinstance(op, LinearChain) or not op.is_fused_op)


class BackwardLinearScale(_BeforeLinear):
    """ConstantScale, Linear: dx is scaled where it lies. Bit-equal to the two apart."""

    def __init__(self, *, scale: ConstantScale, linear: LinearLike) -> None:
        super().__init__(scale, linear)
        self.scale = scale.scale

    def finish(self, dx: Tensor, grad_extra: tuple[Tensor, ...]) -> Tensor:
        return _scaled(dx, self.scale)

    @staticmethod
    def fuse_backward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and isinstance(ops[0], ConstantScale) and is_linear(ops[1]):
                return 2, BackwardLinearScale(scale=ops[0], linear=ops[1])
            return None

        return windows(ops, match)


class BackwardActivationBias(_Backward):
    """Bias, activation: the activation's gradient and the bias' gradient, its column sums, in one pass over memory.

    `bias` is a Bias, or a LinearChain whose last stage has one or not: then the gradient is moreover quantized as it is
    made, for the products that read it. Bit-equal to them apart.
    """

    def __init__(self, *, bias: Bias | LinearLike, activation: Activation) -> None:
        super().__init__(bias, activation)

    def fuser_backward(
        self, basic_op_ctxs: list[Any], grad_output: Tensor, *, basic_op_grad_extra_outputs: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        bias, activation = self.parts
        x = activation.saved_input(basic_op_ctxs[-1])
        if not isinstance(bias, Bias):
            return self._into_linear(basic_op_ctxs, grad_output, x, basic_op_grad_extra_outputs)
        if not basic_op_ctxs[0].bias_grad:
            dx, _ = activation.op_backward(basic_op_ctxs[-1], grad_output)
            return dx, [(None,), ()], [(), ()]
        compute = (
            torch.ops.te_dist.activation_bias_backward
            if torch.compiler.is_compiling()
            else operations.activation_bias_backward
        )
        dx, dbias = compute(grad_output, x, activation.activation, basic_op_ctxs[0].bias_dtype)
        return dx, [(dbias,), ()], [(), ()]

    def _into_linear(
        self, ctxs: list[Any], grad_output: Tensor, x: Tensor, grad_extra: list[tuple[Tensor, ...]]
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        linear, activation = self.parts
        grad: Any
        if torch.compiler.is_compiling():
            grad = torch.ops.te_dist.activation_backward(grad_output, x, activation.activation)
        else:
            grad = operations.activation_gradient(grad_output, x, activation.activation)
        dx, params, inputs = linear.fuser_backward(ctxs[:-1], grad, basic_op_grad_extra_outputs=grad_extra[:-1])
        return dx, [*params, ()], [*inputs, ()]

    @staticmethod
    def fuse_backward_ops(ops: Sequence[FusibleOperation], **unused: Any) -> list[FusibleOperation]:
        def match(ops: list[Any]) -> tuple[int, FusibleOperation] | None:
            if len(ops) > 1 and isinstance(ops[1], Activation) and (isinstance(ops[0], Bias) or is_linear(ops[0])):
                return 2, BackwardActivationBias(bias=ops[0], activation=ops[1])
            return None

        return windows(ops, match)

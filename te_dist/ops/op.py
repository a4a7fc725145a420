"""Operations, and the rules that hold when a class of them is defined.

A BasicOperation is one step of computation with its parameters. A FusedOperation (fused_op.py) computes what several
basic ones would, in one go. The fuser runs either through their fuser_* methods; a basic operation without extra inputs
and outputs writes the shorter op_* methods instead.

    split API   op_forward_compute, op_forward_save_ctx      pure computation, and notes for backward
    legacy API  op_forward                                   both in one; cannot be compiled

and in the same way fuser_forward_compute, fuser_forward_save_ctx and fuser_forward. A class defines one API or the
other; backward (op_backward, fuser_backward) is common to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from te_dist.ops.context import OperationContext
from te_dist.proto import TensorOrQuantized
from te_dist.quantizers import Quantizer
from te_dist.recipe import Recipe
from te_dist.torch_compat import constant_in_graphs

if TYPE_CHECKING:
    from te_dist.ops.fuser import OperationFuser

Saved = tuple[TensorOrQuantized | None, ...]
Gradients = Sequence[Tensor | None]


def _check_api(cls: type, prefix: str) -> bool | None:
    """Whether `cls` itself defines the split API (True), the legacy one (False) or neither (None)."""
    legacy, compute, save = f"{prefix}_forward", f"{prefix}_forward_compute", f"{prefix}_forward_save_ctx"
    has_legacy, has_compute, has_save = (name in cls.__dict__ for name in (legacy, compute, save))
    if has_compute != has_save:
        given, missing = (compute, save) if has_compute else (save, compute)
        raise TypeError(f"{cls.__name__} defines {given} without {missing}: the two are one API and come together")
    if has_legacy and has_compute:
        raise TypeError(
            f"{cls.__name__} defines {legacy} and {compute}: choose the split API ({compute} and {save}), which "
            f"compiles, or the legacy one ({legacy}), not both"
        )
    return True if has_compute else False if has_legacy else None


class FusibleOperation(torch.nn.Module):
    """What the fuser can run."""

    # Which API the fuser calls. A class that defines one resets what it inherits.
    _split_forward: ClassVar[bool] = True
    _fuser: OperationFuser | None = None  # that runs it alone

    def __init_subclass__(cls, *, checked: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        split = _check_api(cls, "fuser") if checked else None
        if split is not None:
            cls._split_forward = split

    @property
    def is_fused_op(self) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define is_fused_op")

    @property
    def basic_operations(self) -> list[BasicOperation]:
        """The basic operations that this one stands for, in order."""
        raise NotImplementedError(f"{type(self).__name__} must define basic_operations")

    def label(self) -> str:
        """What messages call the operation."""
        name = getattr(self, "name", "")
        return f"{type(self).__name__} {name!r}" if name else type(self).__name__

    # ---------------------------------------------------------------------------------------- before a call
    def prepare(self, input_requires_grad: bool, extra_inputs: Sequence[tuple[Tensor, ...]]) -> Any:
        """Hook before forward, outside of autograd: what the computation needs and a pure function cannot do, such
        as weights quantized into a workspace. What it returns goes to the first basic operation's kwargs as `call`."""
        return None

    prepares: ClassVar[bool] = False  # whether prepare() does anything
    takes_quantized: ClassVar[bool] = False  # whether the input may be a storage
    returns_storage: ClassVar[bool] = False  # whether the output is one, whoever follows

    def input_quantizer_of(self, call: Any) -> Quantizer | None:
        """The quantizer that this operation's input may come quantized by, in a call that ``prepare`` has begun."""
        return None

    # ---------------------------------------------------------------------------------------- forward
    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]], list[Saved]]:
        """Pure: the output, then for each basic operation its extra outputs and what to save for backward.

        Args:
            input_: a tensor, or a storage where the operation has announced a quantizer for its input.
            requires_grad: for each basic operation, whether backward will reach it.
            basic_op_extra_inputs: for each basic operation.
            prev_op_grad_output_quantizer: None; gradients travel in high precision between operations.
            next_op_input_quantizer: given, the output may be a storage quantized by it.
            basic_op_kwargs: for each basic operation what the caller passed for it.
        """
        raise NotImplementedError(f"{self.label()} defines neither fuser_forward_compute nor fuser_forward")

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[Saved],
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        """Notes for backward, from the arguments and `tensors_to_save` alone. In compiled code it runs once, while
        tracing, on fake tensors: what is not a tensor must follow from shapes, dtypes and the operation itself."""
        raise NotImplementedError(f"{self.label()} does not define fuser_forward_save_ctx")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]]]:
        """Legacy: the computation and the notes in one. By default compute, then save."""
        if self.prepares and "call" not in basic_op_kwargs[0]:
            call = self.prepare(basic_op_ctxs[0].input_requires_grad, basic_op_extra_inputs)
            basic_op_kwargs = [{**basic_op_kwargs[0], "call": call}, *basic_op_kwargs[1:]]
        kwargs: dict[str, Any] = {
            "requires_grad": [ctx.requires_grad for ctx in basic_op_ctxs],
            "basic_op_extra_inputs": basic_op_extra_inputs,
            "prev_op_grad_output_quantizer": prev_op_grad_output_quantizer,
            "next_op_input_quantizer": next_op_input_quantizer,
            "basic_op_kwargs": basic_op_kwargs,
        }
        output, extra_outputs, saved = self.fuser_forward_compute(input_, **kwargs)
        self.fuser_forward_save_ctx(basic_op_ctxs, input_, saved, **kwargs)
        return output, extra_outputs

    # ---------------------------------------------------------------------------------------- backward
    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor, ...]],
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        """The gradient of the input, then for each basic operation those of its parameters and extra inputs."""
        raise NotImplementedError(f"{self.label()} does not define fuser_backward")

    # ---------------------------------------------------------------------------------------- alone
    def _own_fuser(self) -> OperationFuser:
        from te_dist.ops.fuser import OperationFuser

        if torch.compiler.is_compiling() or self._fuser is None:  # in this order: a graph must not depend on it
            self._make_fuser(OperationFuser)
        assert self._fuser is not None
        return self._fuser

    @constant_in_graphs
    def _make_fuser(self, cls: type[OperationFuser]) -> None:
        if self._fuser is None:
            object.__setattr__(self, "_fuser", cls([self]))


class BasicOperation(FusibleOperation, checked=False):
    """A step of computation, for use in ``te_dist.ops.Sequential`` or alone.

    A subclass without extra inputs and outputs defines op_backward and either

        op_forward_compute and op_forward_save_ctx   (split API: compiles with fullgraph=True)
        op_forward                                   (legacy API: runs outside of compiled graphs)

    One with extra inputs or outputs sets num_extra_inputs and num_extra_outputs and defines the fuser_* methods.

    Example:
        >>> import torch, te_dist
        >>> class Double(te_dist.ops.BasicOperation):
        ...     def op_forward_compute(self, input_, *, requires_grad, **unused):
        ...         return input_ * 2, ()
        ...     def op_forward_save_ctx(self, ctx, input_, tensors_to_save, **unused):
        ...         pass
        ...     def op_backward(self, ctx, grad_output):
        ...         return grad_output * 2, ()
        >>> x = torch.ones(2, requires_grad=True)
        >>> Double()(x).sum().backward()
        >>> x.grad
        tensor([2., 2.])
    """

    num_extra_inputs: int = 0
    num_extra_outputs: int = 0
    recipe: Recipe | None = None
    _is_base: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        split = _check_api(cls, "op")
        fuser = _check_api(cls, "fuser")
        if split is not None and fuser is not None and split != fuser:
            raise TypeError(
                f"{cls.__name__} defines op_forward{'_compute' if split else ''} and "
                f"fuser_forward{'_compute' if fuser else ''}: one is the split API and one the legacy one; choose one"
            )
        defined = split if split is not None else fuser
        if defined is not None:
            cls._split_forward, cls._is_base = defined, False

    def __init__(self) -> None:
        super().__init__()
        self._init_operation()

    def _init_operation(self) -> None:
        if self._is_base:
            raise TypeError(
                f"{type(self).__name__} defines no forward: define op_forward_compute and op_forward_save_ctx, or "
                f"op_forward"
            )
        self._extra_input_channels: dict[int, str] = {}
        self._extra_output_channels: dict[int, tuple[str, bool]] = {}
        self._channels_locked = False

    @property
    def is_fused_op(self) -> bool:
        return False

    @property
    def basic_operations(self) -> list[BasicOperation]:
        return [self]

    # ---------------------------------------------------------------------------------------- extra tensors
    def set_extra_input_channel(self, index: int, channel: str) -> BasicOperation:
        """Take extra input `index` from the extra output of that name further up, not from the caller."""
        self._check_channel(index, channel, self.num_extra_inputs, "input")
        self._extra_input_channels[index] = channel
        return self

    def set_extra_output_channel(self, index: int, channel: str, *, output_to_caller: bool = True) -> BasicOperation:
        """Name extra output `index` for operations further down; False hides it from the caller."""
        self._check_channel(index, channel, self.num_extra_outputs, "output")
        self._extra_output_channels[index] = (channel, output_to_caller)
        return self

    def _check_channel(self, index: int, channel: str, count: int, what: str) -> None:
        if self._channels_locked:
            raise RuntimeError(f"{self.label()}: its channels are fixed, because a Sequential has used them")
        if not isinstance(channel, str) or not channel:
            raise ValueError(f"{self.label()} expects the name of a channel but got {channel!r}")
        if not 0 <= index < count:
            raise ValueError(f"{self.label()} has {count} extra {what}s and no extra {what} {index}")

    def _check_no_extra(self, extra_inputs: Sequence[Any]) -> None:
        """The op_* methods know nothing of extra inputs and outputs."""
        if self.num_extra_inputs or self.num_extra_outputs:
            raise RuntimeError(
                f"{self.label()} has {self.num_extra_inputs} extra inputs and {self.num_extra_outputs} extra outputs, "
                f"which op_forward and op_backward do not pass on; define the fuser_* methods"
            )
        if extra_inputs:
            raise ValueError(f"{self.label()} takes no extra inputs but got {len(extra_inputs)}")

    # ---------------------------------------------------------------------------------------- quantizers
    def num_quantizers(self, mode: str) -> int:
        """How many quantizers the operation has in "forward" or "backward"."""
        return 0

    def get_quantizer(self, mode: str, index: int) -> Quantizer | None:
        return None

    def get_input_quantizer(self) -> Quantizer | None:
        """What the operation quantizes its input with, under the recipe in force; None if it does not."""
        return self.get_quantizer("forward", 0) if self.num_quantizers("forward") else None

    def get_grad_output_quantizer(self) -> Quantizer | None:
        return self.get_quantizer("backward", 0) if self.num_quantizers("backward") else None

    # ---------------------------------------------------------------------------------------- hooks
    def pre_first_fuser_forward(self) -> None:
        """Called once before the operation's first forward."""

    def pre_fuser_forward(self, *, requires_grad: bool) -> None:
        """Called before every forward in eager code."""

    def reset_parameters(self) -> None:
        """Fill the parameters anew, as the constructor does; after ``to_empty`` for instance."""

    def width_after(self, width: int | None, before: str) -> int | None:
        """The size of the last dimension after this operation; None where it is not known. ValueError if `width`
        cannot be; `before` names the operation it comes from."""
        return width

    def _expects(self, width: int | None, expected: int, before: str) -> None:
        if width is not None and width != expected:
            raise ValueError(
                f"{self.label()} expects an input whose last dimension is {expected} but {before} gives {width}"
            )

    # ---------------------------------------------------------------------------------------- the op_* methods
    def op_forward_compute(
        self,
        input_: Any,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> tuple[TensorOrQuantized, Saved]:
        """Pure: the output, and what to save for backward."""
        raise NotImplementedError(f"{self.label()} does not define op_forward_compute")

    def op_forward_save_ctx(
        self,
        ctx: OperationContext,
        input_: Any,
        tensors_to_save: Saved,
        *,
        requires_grad: bool,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes for backward; see ``fuser_forward_save_ctx``."""
        raise NotImplementedError(f"{self.label()} does not define op_forward_save_ctx")

    def op_forward(
        self,
        ctx: OperationContext,
        input_: Any,
        *,
        prev_op_grad_output_quantizer: Quantizer | None = None,
        next_op_input_quantizer: Quantizer | None = None,
        **kwargs: Any,
    ) -> TensorOrQuantized:
        """Legacy: the computation and the notes in one. By default compute, then save."""
        if self.prepares and "call" not in kwargs:
            kwargs["call"] = self.prepare(ctx.input_requires_grad, [()])
        kwargs.update(
            requires_grad=ctx.requires_grad,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
        )
        output, saved = self.op_forward_compute(input_, **kwargs)
        self.op_forward_save_ctx(ctx, input_, saved, **kwargs)
        return output

    def op_backward(self, ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Gradients]:
        """The gradients of the input and of the parameters, the latter in the order of ``parameters()``."""
        raise NotImplementedError(f"{self.label()} does not define op_backward")

    # ---------------------------------------------------------------------------------------- for the fuser
    def fuser_forward_compute(
        self,
        input_: TensorOrQuantized,
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]], list[Saved]]:
        self._check_no_extra(basic_op_extra_inputs[0])
        made = self.op_forward_compute(
            input_,
            requires_grad=requires_grad[0],
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{self.label()}: op_forward_compute must return (output, tensors_to_save)")
        return made[0], [()], [made[1]]

    def fuser_forward_save_ctx(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        tensors_to_save: list[Saved],
        *,
        requires_grad: list[bool],
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> None:
        self.op_forward_save_ctx(
            basic_op_ctxs[0],
            input_,
            tensors_to_save[0],
            requires_grad=requires_grad[0],
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: TensorOrQuantized,
        *,
        basic_op_extra_inputs: list[tuple[Tensor, ...]],
        prev_op_grad_output_quantizer: Quantizer | None,
        next_op_input_quantizer: Quantizer | None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[TensorOrQuantized, list[tuple[Tensor, ...]]]:
        self._check_no_extra(basic_op_extra_inputs[0])
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[Any],
        grad_output: Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[Tensor, ...]],
    ) -> tuple[Tensor | None, list[Gradients], list[Gradients]]:
        self._check_no_extra(basic_op_grad_extra_outputs[0])
        made = self.op_backward(basic_op_ctxs[0], grad_output)
        if not isinstance(made, tuple) or len(made) != 2:
            raise TypeError(f"{self.label()}: op_backward must return (gradient of the input, those of the parameters)")
        return made[0], [made[1]], [()]

    # ---------------------------------------------------------------------------------------- alone
    def forward(self, input: Tensor, *extra_inputs: Tensor, **kwargs: Any) -> Any:
        """The operation alone: the output, or a tuple of it and the extra outputs."""
        return self._own_fuser()(input, *extra_inputs, op_kwargs={self: kwargs} if kwargs else None)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("_fuser", None)
        state["_channels_locked"] = False
        return state

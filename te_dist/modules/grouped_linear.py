"""GroupedLinear: one linear layer per group of rows, as the experts of a mixture have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from te_dist.modules.base import QuantizedLayer
from te_dist.modules.linear import InitMethod
from te_dist.modules.parameters import local_part, reset_linear
from te_dist.pipeline.config import LayerSpec, StageSpec
from te_dist.pipeline.function import LayerCall
from te_dist.recipe import Recipe
from te_dist.tensors.quantized_tensor import QuantizedTensor

INTEGERS = (torch.int32, torch.int64)


class GroupedLinear(QuantizedLayer):
    """y_i = x_i W_i^T + b_i for the groups of rows x_0, x_1, ... of one input.

    Each group's rows are quantized for themselves, so the result equals that of separate ``te_dist.Linear`` layers.

    Args:
        num_gemms: number of groups.
        in_features, out_features, bias, device: as for nn.Linear; device may be "meta".
        single_grouped_weight, single_grouped_bias: one parameter ``weight`` [num_gemms, out_features, in_features] and
            ``bias`` [num_gemms, out_features], in place of weight0, weight1, ... and bias0, bias1, ... A state dict of
            either form loads into either.
        init_method: fills each group's weight in place.
        return_bias: do not add the biases; return (y, list of biases), or (y, bias) with single_grouped_bias.
        recipe, params_dtype, dtype, fuse_wgrad_accumulation, delay_wgrad_compute, save_original_input, name: as for
            ``te_dist.Linear``.

    Example:
        >>> import torch, te_dist
        >>> experts = te_dist.GroupedLinear(3, 64, 32, recipe=te_dist.recipe.MXFP8BlockScaling())
        >>> experts(torch.ones(10, 64), [4, 0, 6]).shape
        torch.Size([10, 32])
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        recipe: Recipe | None = None,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: InitMethod | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(num_gemms, int) or num_gemms < 1:
            raise ValueError(f"GroupedLinear expects num_gemms to be a positive number but got {num_gemms!r}")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self._init_method = init_method
        # For tests on machines without a GPU: treat a CPU tensor of m_splits like one on a device.
        self._keep_splits_on_device = False
        dtype = dtype or params_dtype
        self._make("weight", single_grouped_weight, (out_features, in_features), device, dtype)
        if bias:
            self._make("bias", single_grouped_bias, (out_features,), device, dtype)
        self.reset_parameters()
        if single_grouped_weight:
            self._first_parts = tuple((group, "weight") for group in range(num_gemms))
        stage = StageSpec(has_bias=bias and not return_bias, groups=num_gemms)
        spec = LayerSpec((stage,), "grouped_linear", name or "", save_original_input=save_original_input)
        self._init_layer(
            spec,
            recipe,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
        )

    def _make(
        self,
        name: str,
        single: bool,
        shape: tuple[int, ...],
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        names = [name] if single else [f"{name}{i}" for i in range(self.num_gemms)]
        shape = (self.num_gemms, *shape) if single else shape
        for each in names:
            self.register_parameter(each, torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    def _per_group(self, name: str, single: bool) -> list[Tensor]:
        if single:
            return list(local_part(getattr(self, name)).unbind(0))
        return [getattr(self, f"{name}{i}") for i in range(self.num_gemms)]

    def _weights(self) -> list[Tensor]:
        return self._per_group("weight", self.single_grouped_weight)

    def _biases(self) -> list[Tensor | None]:
        return [*self._per_group("bias", self.single_grouped_bias)] if self.use_bias else [None] * self.num_gemms

    def _slots(self) -> list[Tensor | None]:
        return [*self._weights(), *([None] * self.num_gemms if self.return_bias else self._biases())]

    def _weight_names(self) -> list[list[str]]:
        return [["weight" if self.single_grouped_weight else f"weight{i}"] for i in range(self.num_gemms)]

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for weight, bias in zip(self._weights(), self._biases(), strict=True):
                reset_linear(weight, bias)
                if self._init_method is not None and weight.device.type != "meta":
                    self._init_method(weight)

    # ---------------------------------------------------------------------------------------- forward
    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        skip_weight_update: Tensor | None = None,
    ) -> Any:
        """
        Args:
            inp: [..., in_features]; with its leading dimensions folded, the rows of group 0, then of group 1, ...
            m_splits: rows of each group, any of them 0. A list or tuple of numbers; or an integer tensor
                [num_gemms]: on the CPU it is read like a list, on a GPU the host never waits for it, and the rows of
                all groups are quantized at once (``te_dist/pipeline/device_groups.py`` says what that changes).
                In a compiled graph: numbers, or a tensor on the GPU.
            is_first_microbatch, skip_weight_update: as for ``te_dist.Linear``.
        """
        if isinstance(inp, QuantizedTensor):
            raise TypeError(
                f"{self._label()} expects an unquantized input, because each group is quantized for itself, but got "
                f"one quantized by {inp.quantized_storage.quantizer!r}; dequantize() it"
            )
        self._check_input(inp, local_part(next(self.parameters())))  # a weight comes first
        splits = self._splits(m_splits, inp)
        out = self._run(inp, is_first_microbatch, skip_weight_update, splits)
        if not self.return_bias:
            return out
        if not self.use_bias:
            return out, None
        if self.single_grouped_bias:
            return out, local_part(self.get_parameter("bias"))
        return out, [local_part(bias) for bias in self._biases()]

    def _splits(self, m_splits: Sequence[int] | Tensor, inp: Tensor) -> list[int] | Tensor:
        """Sizes, or offsets on the device."""
        if isinstance(m_splits, Tensor):
            if m_splits.dtype not in INTEGERS or m_splits.shape != (self.num_gemms,):
                raise ValueError(
                    f"{self._label()} expects m_splits to be an int32 or int64 tensor of shape [{self.num_gemms}] "
                    f"but got {m_splits.dtype} {list(m_splits.shape)}"
                )
            if m_splits.device.type != "cpu" or self._keep_splits_on_device:
                return self._offsets(m_splits, inp)
            m_splits = m_splits.tolist()
        elif not isinstance(m_splits, list | tuple) or not all(isinstance(size, int) for size in m_splits):
            raise TypeError(
                f"{self._label()} expects m_splits to be a list of numbers or an integer tensor but got {m_splits!r}"
            )
        sizes = list(m_splits)
        if len(sizes) != self.num_gemms:
            raise ValueError(
                f"{self._label()} expects m_splits with a number for each of its {self.num_gemms} groups but got "
                f"{len(sizes)}: {sizes}"
            )
        rows = inp.shape[:-1].numel()
        if any(size < 0 for size in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"{self._label()} expects m_splits that are not negative and add up to the {rows} rows of the input "
                f"but got {sizes}, which add up to {sum(sizes)}"
            )
        return sizes

    def _offsets(self, m_splits: Tensor, inp: Tensor) -> Tensor:
        """int32 [num_gemms]: where each group ends. The host looks at types and places only."""
        device_type = inp.device.type
        if m_splits.device != inp.device:
            raise ValueError(
                f"{self._label()} expects m_splits on the CPU or on the input's {inp.device} but got it on "
                f"{m_splits.device}"
            )
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else inp.dtype
        if dtype != torch.bfloat16:
            raise ValueError(
                f"{self._label()} expects a bfloat16 input where m_splits is on the device, because grouped products "
                f"have no other kernels, but got {dtype}; pass m_splits as a list"
            )
        return m_splits.cumsum(0, dtype=torch.int32)

    # ---------------------------------------------------------------------------------------- wgrad scheduling
    def _main_grads(self, call: LayerCall, params: Sequence[Tensor | None], first: bool) -> None:
        if not self.single_grouped_weight:
            super()._main_grads(call, params, first)
            return
        # The groups' weights are views made for this call: they get their part of the parameter's main_grad.
        getter = getattr(self.weight, "get_main_grad", None)
        main_grad = local_part(getter() if getter is not None else getattr(self.weight, "main_grad", None))
        for group, view in enumerate(params[: self.num_gemms]):
            view.main_grad = None if main_grad is None else main_grad[group]  # type: ignore[union-attr]
            view.overwrite_main_grad = getattr(self.weight, "overwrite_main_grad", False)  # type: ignore[union-attr]
        super()._main_grads(call, params, first)
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True

    def _add_gradient(self, param: Tensor, slot: int, gradient: Tensor) -> None:
        if not self.single_grouped_weight:
            super()._add_gradient(param, slot, gradient)
            return
        whole: Tensor = self.get_parameter("weight")
        if whole.grad is None:
            whole.grad = torch.zeros_like(whole)
        local_part(whole.grad)[slot] += gradient

    # ---------------------------------------------------------------------------------------- state
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, single in (("weight", self.single_grouped_weight), ("bias", self.single_grouped_bias)):
            whole, parts = prefix + name, [f"{prefix}{name}{i}" for i in range(self.num_gemms)]
            if single and whole not in state_dict and all(part in state_dict for part in parts):
                state_dict[whole] = torch.stack([state_dict.pop(part) for part in parts])
            elif not single and whole in state_dict and state_dict[whole].shape[:1] == (self.num_gemms,):
                for part, value in zip(parts, state_dict.pop(whole).unbind(0), strict=True):
                    state_dict[part] = value
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.use_bias}, recipe={self.recipe!r}"
        )

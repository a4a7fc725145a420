"""Weight gradients that do not go to ``.grad`` in backward: into main_grad, or later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from te_dist.modules.parameters import like_parameter, local_part
from te_dist.modules.state import LayerState
from te_dist.pipeline.backward import run_delayed
from te_dist.pipeline.function import LayerCall


class WeightGradients(LayerState):
    """The part of a layer behind ``fuse_wgrad_accumulation`` and ``delay_wgrad_compute``."""

    fuse_wgrad_accumulation: bool
    wgrad_store: list[object] | None

    def _main_grads(self, call: LayerCall, params: Sequence[Tensor | None], first: bool) -> None:
        """Where the weights' gradients accumulate; see ``fuse_wgrad_accumulation``. The first microbatch overwrites."""
        targets: list[Tensor | None] = [None] * len(params)
        for stage in call.config.stages:
            for slot in range(stage.weight_slot, stage.bias_slot):
                param = params[slot]
                if param is None or not param.requires_grad:
                    continue
                getter = getattr(param, "get_main_grad", None)
                main_grad = getter() if getter is not None else getattr(param, "main_grad", None)
                if self._is_parallel:
                    main_grad = local_part(main_grad)
                if main_grad is None:
                    raise ValueError(
                        f"{self._label()}: fuse_wgrad_accumulation expects main_grad on each weight; set "
                        f"weight.main_grad = torch.zeros_like(weight, dtype=torch.float32) first"
                    )
                targets[slot] = main_grad
                if first or getattr(param, "overwrite_main_grad", False):
                    call.overwrite_main_grads |= {slot}
                if hasattr(param, "grad_added_to_main_grad"):
                    param.grad_added_to_main_grad = True
                    # Megatron's hooks on the parameter run only if autograd has a gradient for it. Not before
                    # backward_dw() though, where main_grad is made there.
                    if self.wgrad_store is None:
                        call.placeholder_grads |= {slot}
        call.main_grads = targets

    def need_backward_dw(self) -> bool:
        """Whether weight gradients are waiting for ``backward_dw``."""
        return bool(self.wgrad_store)

    def backward_dw(self) -> None:
        """Compute the weight gradients that ``delay_wgrad_compute`` has put off, into ``.grad`` or ``main_grad``."""
        if self.wgrad_store is None:
            return
        products, self.wgrad_store[:] = list(self.wgrad_store), []
        params = self._slots()
        with torch.no_grad():
            for slot, gradient in run_delayed(products).items():
                param = params[slot]
                assert param is not None
                self._add_gradient(param, slot, gradient)

    def _add_gradient(self, param: Tensor, slot: int, gradient: Tensor) -> None:
        """Where a delayed gradient goes; another place if the slot is only a part of a parameter."""
        if self._is_parallel:
            gradient = like_parameter(gradient, param)
        param.grad = gradient if param.grad is None else param.grad + gradient

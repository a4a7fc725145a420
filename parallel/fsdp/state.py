"""QuantizedFSDPState: an FSDP2 state that reduces the weights' amaxes when a forward begins."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_dist.parallel.fsdp import amaxes
from te_dist.parallel.fsdp.layer import ShardedLayer
from te_dist.parallel.fsdp.torch_fsdp import FSDPState, groups_of, states_under
from te_dist.parallel.fsdp.weight import QuantizedFSDPParam

_LAYERS = "_te_dist_layers"


def sharded_layers(root: nn.Module) -> list[ShardedLayer]:
    """The layers under a module whose weights may be gathered quantized, in the order of the modules."""
    found: dict[int, ShardedLayer] = {}
    for state in states_under(root):
        for group in groups_of(state):
            for param in group.fsdp_params:
                if isinstance(param, QuantizedFSDPParam):
                    owner = param.te_dist_weight.owner
                    found[id(owner)] = owner
    return list(found.values())


class QuantizedFSDPState(FSDPState):
    """Made by assigning ``__class__``. Where a forward begins is FSDP2's knowledge: any of its modules may be the one
    that is called, and compiled blocks do not trace its hooks."""

    def _root_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._lazy_init()
        root = self._state_ctx.iter_forward_root
        if root is None:
            layers = self.__dict__.get(_LAYERS)
            if layers is None:
                layers = [layer for module in self._modules for layer in sharded_layers(module)]
                self.__dict__[_LAYERS] = layers
            amaxes.before_forward(layers)
            # FSDP2 has its gathers wait for this stream too, unless the user gave it an event of the optimizer's.
            copy_in = getattr(self._comm_ctx, "all_gather_copy_in_stream", None)
            if layers and copy_in is not None:
                copy_in.wait_stream(self._device_handle.current_stream())
        elif type(root) is FSDPState:
            # torch's own fully_shard was called on the root: this time each group reduces for itself.
            root.__class__ = QuantizedFSDPState
        return super()._root_pre_forward(module, args, kwargs)

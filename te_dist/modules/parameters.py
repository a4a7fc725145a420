"""Making and initialising parameters, for the modules that are not nn.Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from te_dist import torch_compat

# DTensor, once te_dist.parallel has been imported: one process needs no torch.distributed.tensor.
spread_types: tuple[type, ...] = ()


def local_part(param: Any) -> Any:
    """This rank's part of a parameter that may be a DTensor."""
    return torch_compat.local_part(param) if is_spread(param) else param


def is_spread(param: Any) -> bool:
    return isinstance(param, spread_types)


def like_parameter(gradient: Tensor, param: Any) -> Tensor:
    """A rank's part of a gradient as what its parameter is: a DTensor has a DTensor's."""
    return torch_compat.spread_like(gradient, param) if is_spread(param) else gradient


def spread_state(module: Module, state_dict: Any, prefix: str) -> None:
    """Whole tensors of a state dict, as one process saves them, become what the module's parameters are."""
    param: Any
    for name, param in module._parameters.items():
        given = state_dict.get(prefix + name)
        if given is None or not is_spread(param) or is_spread(given):
            continue
        if given.shape == param.shape:  # else torch says what does not fit
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = param.device_mesh, param.placements
            given = given.to(device=param.device, dtype=param.dtype)
            state_dict[prefix + name] = distribute_tensor(given, mesh, placements, src_data_rank=None)


NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def check_normalization(module: str, normalization: str) -> None:
    if normalization not in NORMALIZATIONS:
        raise ValueError(f"{module} expects normalization in {NORMALIZATIONS} but got {normalization!r}")


def make_weight(
    module: Module, name: str, rows: int, cols: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    module.register_parameter(name, Parameter(torch.empty(rows, cols, device=device, dtype=dtype)))


def make_bias(
    module: Module, name: str, size: int | None, device: torch.device | str | None, dtype: torch.dtype | None
) -> None:
    """None registers no bias, as nn.Linear does."""
    made = None if size is None else Parameter(torch.empty(size, device=device, dtype=dtype))
    module.register_parameter(name, made)


def make_norm(
    module: Module,
    prefix: str,
    size: int,
    with_bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    make_bias(module, f"{prefix}_weight", size, device, dtype)
    make_bias(module, f"{prefix}_bias", size if with_bias else None, device, dtype)


def reset_norm(module: Module, prefix: str, zero_centered: bool) -> None:
    weight, bias = getattr(module, f"{prefix}_weight"), getattr(module, f"{prefix}_bias")
    with torch.no_grad():
        weight.fill_(0.0 if zero_centered else 1.0)
        if bias is not None:
            bias.zero_()


def reset_linear(weight: Tensor, bias: Tensor | None) -> None:
    """nn.Linear's own initialisation."""
    torch.nn.init.kaiming_uniform_(weight, a=5**0.5)
    if bias is not None:
        bound = weight.shape[1] ** -0.5 if weight.shape[1] > 0 else 0
        torch.nn.init.uniform_(bias, -bound, bound)

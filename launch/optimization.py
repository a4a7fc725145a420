"""Optimizer, learning rate and the norm of the gradient, for plain tensors and DTensors on any mesh."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from te_dist.launch.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Matrices decay; norms, biases and embeddings do not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.dim() > 1 and id(p) not in embeddings]
    others = [p for p in trained if not (p.dim() > 1 and id(p) not in embeddings)]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.beta1)
    cls = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.adam_eps}
    on_gpu = any(p.device.type == "cuda" for p in trained)
    return cls(groups, **options, fused=True if on_gpu else None, foreach=None if on_gpu else True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Of a step from 1 on: a function of the step alone, so that resuming needs no scheduler state."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    part = (step - config.warmup) / max(1, config.steps - config.warmup)
    least = config.min_lr
    if config.schedule == "constant":
        factor = 1.0
    elif config.schedule == "linear":
        factor = 1.0 - part * (1.0 - least)
    elif config.schedule == "wsd":  # stable, then a linear end over the last fifth
        factor = 1.0 if part < 0.8 else 1.0 - (part - 0.8) / 0.2 * (1.0 - least)
    else:
        factor = least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * part))
    return config.lr * factor


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def _local(grad: Tensor, world: int) -> tuple[Tensor, int]:
    """This rank's part of a gradient, and how many ranks hold the same part."""
    if not isinstance(grad, DTensor):
        return grad, world
    if any(p.is_partial() for p in grad.placements):
        from torch.distributed.tensor import Replicate

        grad = grad.redistribute(placements=[Replicate() if p.is_partial() else p for p in grad.placements])
    shards = 1
    for axis, placement in enumerate(grad.placements):
        if not placement.is_replicate():
            shards *= grad.device_mesh.size(axis)
    return grad.to_local(), world // shards


@torch.no_grad()
def gradient_norm(params: list[nn.Parameter]) -> Tensor:
    """Over all ranks: shards are summed, copies counted once, however the parameters are laid out."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    by_copies: dict[int, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            local, copies = _local(param.grad, world)
            if local.numel():
                by_copies.setdefault(copies, []).append(local)
    device = params[0].device if params else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float32, device=device)
    for copies, grads in sorted(by_copies.items()):
        norms = torch._foreach_norm(grads, 2.0, dtype=torch.float32)
        total += torch.stack(list(norms)).square().sum() / copies
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def clip_gradients(params: list[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale all gradients so that their norm is at most `largest`; decided on the device, without waiting for it."""
    if largest <= 0:
        return
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params if p.grad is not None]
    torch._foreach_mul_(grads, (largest / (norm + 1e-6)).clamp(max=1.0))

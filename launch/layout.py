"""From (tp, sp, dp_shard, dp_replicate) to a model that is laid out over the ranks."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import nn

import te_dist.parallel
from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.llama import Llama
from te_dist.launch.runtime import World


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh of a run, and this rank's place on it."""

    dp_rank: int
    dp_size: int
    tp: int
    shard: int
    replicate: int
    mesh: Any = None  # DeviceMesh ("dp_replicate", "dp_shard", "tp"), None for one process

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 holds the parameters."""
        return self.dp_size > 1

    def __str__(self) -> str:
        if self.mesh is None:
            return "1 process"
        parts = [("dp_replicate", self.replicate), ("dp_shard", self.shard), ("tp", self.tp)]
        return " x ".join(f"{name}={size}" for name, size in parts if size > 1) or "1 rank"


def make_layout(config: TrainConfig, world: World) -> Layout:
    replicate, shard = config.data_parallel(world.size)
    if not world.is_distributed:
        return Layout(0, 1, 1, 1, 1)
    from torch.distributed.device_mesh import init_device_mesh

    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(world.device.type, (replicate, shard, config.tp), mesh_dim_names=names)
    dp_rank = world.rank // config.tp
    return Layout(dp_rank, replicate * shard, config.tp, shard, replicate, mesh)


def check_available(config: TrainConfig) -> None:
    """Raise now, not after the model was built, for what this te_dist does not have."""
    if config.overlap != "off" and not hasattr(te_dist.parallel, "userbuffers"):
        raise ConfigError(f"overlap {config.overlap!r} is not available in this te_dist: set it to off")


def shard_model(model: nn.Module, blocks: list[nn.Module], layout: Layout, config: TrainConfig) -> None:
    """FSDP2 over the data-parallel axes; blocks are gathered one by one."""
    if not layout.is_sharded:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = layout.mesh["dp_replicate", "dp_shard"] if layout.replicate > 1 else layout.mesh["dp_shard"]
    compute = getattr(torch, config.compute_dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": policy,
        "quantized_all_gather": config.quantized_all_gather,
    }
    for block in blocks:
        te_dist.parallel.fully_shard(block, **options)
    te_dist.parallel.fully_shard(model, **options)


def apply_tensor_parallel(model: nn.Module, layout: Layout, config: TrainConfig) -> None:
    """Split a Llama over the tp axis: blocks, vocabulary, and between them, with sp, the sequence."""
    if layout.tp == 1:
        return
    if not isinstance(model, Llama):
        raise ConfigError(f"tp above 1 expects a preset's Llama but the model is a {type(model).__name__}")
    mesh = layout.mesh["tp"]
    plan = {f"layers.{index}": "column" for index in range(len(model.layers))}
    plan |= {"embed": "row", "norm": "sequence" if config.sp else "replicate", "head": "column"}
    te_dist.parallel.parallelize(model, mesh, plan, sequence_parallel=config.sp, overlap=config.overlap)
    model.tie()
    model.loss = functools.partial(
        te_dist.parallel.vocab_parallel_cross_entropy, group=mesh.get_group(), vocab_size=model.size.vocab_size
    )

"""te_dist.ops under FSDP2: linear operations take gathered, quantized weights as the modules do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from fsdp_cases import MAIN, RECIPES, assert_same, batches, full, mesh_of, train
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_dist import ops
from te_dist.parallel import TensorParallel, all_gather_report, comm_report, fully_shard

Pools = Callable[[int], RankPool]


class Block(nn.Module):
    """A fused chain of two linear operations, and one that runs by itself."""

    def __init__(self, recipe: Any, device: str, remat: bool = False) -> None:
        super().__init__()
        options = {"device": device, "recipe": recipe}
        up, down = ops.Linear(96, 160, **options), ops.Linear(160, 96, **options)
        self.chain = ops.Sequential(ops.LayerNorm(96, device=device), up, ops.SReLU(), down)
        self.alone = ops.BasicLinear(96, 96, **options)
        self.remat = remat

    def inner(self, x: Tensor) -> Tensor:
        return x + self.alone(self.chain(x))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.remat else self.inner(x)


def make(recipe: str, device: str, remat: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block(RECIPES[recipe], device, remat) for _ in range(2)])


def check_operations(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(3, world, device)
    ways: dict[str, dict[str, Any]] = {
        "eager": {}, "no reshard": {"reshard": False}, "checkpointing": {"remat": True},
        "compiled": {"backend": "aot_eager"}, "compiled, checkpointing": {"backend": "aot_eager", "remat": True},
    }  # fmt: skip
    compiled = {("current", "compiled"), ("mxfp8", "compiled, checkpointing")}
    for recipe in (*MAIN, "block_1d", "nvfp4_1d"):
        reference = make(recipe, device)
        train(reference, data, None)
        for way, chosen in ways.items():
            if "compiled" in way and not cases.FULL_MATRIX and (recipe, way) not in compiled:
                continue
            torch._dynamo.reset()
            model = make(recipe, device, chosen.get("remat", False))
            for block in model:
                if "backend" in chosen:
                    block.compile(fullgraph=True, backend=chosen["backend"])
                fully_shard(block, mesh=mesh, reshard_after_forward=chosen.get("reshard", True))
            fully_shard(model, mesh=mesh)
            assert len(all_gather_report(model).quantized) == 6 and not all_gather_report(model).others
            with comm_report() as report:
                train(model, data, rank)
            gathers = report.select(kind="all_gather")
            assert {c.dtype for c in gathers} == {"uint8"} and len({c.layer for c in gathers}) == 6, (recipe, way)
            assert len(report.select(kind="all_reduce", payload="amax")) <= len(data), (recipe, way)
            if recipe != "delayed":  # one process sees other histories
                assert_same(reference, model, what=f"{recipe}, {way}")


def test_operations_take_gathered_weights(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_operations, device)


def check_grouped(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    for recipe, single in (("current", False), ("mxfp8", False), ("nvfp4", True), ("delayed", True), ("mxfp8", True)):
        made = []
        for _ in range(2):
            torch.manual_seed(1)
            options = {"recipe": RECIPES[recipe], "device": device, "dtype": torch.bfloat16}
            options["single_grouped_weight"] = single
            made.append(ops.GroupedLinear(3, 64, 96, **options))
        fully_shard(made[1], mesh=mesh)
        # fully_shard moves a CPU tensor among the arguments to the GPU, where grouped products are of bfloat16.
        x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
        sizes = torch.tensor([10, 0, 22], device=device)
        results = []
        for op in made:
            leaf = x.clone().requires_grad_()
            torch.manual_seed(2)
            y = op(leaf, sizes)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *[full(p.grad) for p in op.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), recipe
        assert len(all_gather_report(made[1]).quantized) == (1 if single else 3)


def test_grouped_operation(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_grouped, device)


def check_tensor_parallel(rank: int, world: int, device: str) -> None:
    """Beside tensor parallelism by a Comm, whose weights are no DTensors: scales still span the ranks."""
    mesh = mesh_of(device, 2, 2, names=("dp", "tp"))
    comm = TensorParallel.of(mesh["tp"].get_group(), None)
    for recipe in ("current", "mxfp8"):
        made = []
        for mode in ("off", "auto"):
            options = {"device": device, "recipe": RECIPES[recipe], "tensor_parallel_group": comm}
            torch.manual_seed(rank % 2)  # each rank of tensor parallelism has weights of its own
            model = ops.Sequential(
                ops.BasicLinear(64, 256, tensor_parallel_mode="column", **options),
                ops.SReLU(),
                ops.BasicLinear(256, 64, tensor_parallel_mode="row", **options),
            )
            fully_shard(model, mesh=mesh["dp"], quantized_all_gather=mode)
            torch.manual_seed(3)
            leaf = torch.randn(32, 64, device=device).requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            made.append([y.detach(), leaf.grad, *[full(p.grad) for p in model.parameters()]])
        assert all_gather_report(model).quantized and not all_gather_report(model).others
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True)), recipe


def test_operations_beside_tensor_parallelism(rank_pools: Pools, device: str) -> None:
    rank_pools(4).run(check_tensor_parallel, device)


def check_mixed_chain(rank: int, world: int) -> None:
    """A fused chain of which one weight is gathered in high precision says so, instead of reading what is not there."""
    mesh = mesh_of("cpu", world)
    first = ops.BasicLinear(32, 64, recipe=RECIPES["mxfp8"])
    tied = nn.Linear(64, 32, bias=False)
    second = ops.BasicLinear(64, 32, recipe=RECIPES["mxfp8"])
    second.weight = tied.weight  # read in high precision elsewhere
    model = nn.Sequential(ops.Sequential(first, ops.SReLU(), second), tied)
    fully_shard(model, mesh=mesh)
    assert len(all_gather_report(model).quantized) == 1
    model.unshard()
    with pytest.raises(RuntimeError, match="weight of BasicLinear in high precision"):
        model[0](torch.randn(4, 32))


def test_mixed_chain(rank_pools: Pools) -> None:
    rank_pools(2).run(check_mixed_chain)

"""What FSDP2 gathers of te_dist's weights: the right bytes, once, no more of them than needed, and gone afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from fsdp_cases import MAIN, ONE_PLANE, RECIPES, assert_storage_equals, build, full, gathered, mesh_of, whole_weight
from ranks import RankPool
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import te_dist
from te_dist import kernels
from te_dist.parallel import all_gather_report, comm_report, enable_quantized_all_gather, fully_shard, parallelize
from te_dist.parallel.fsdp.planes import planes_of
from te_dist.tensors.gathered import GatheredWeight

Pools = Callable[[int], RankPool]


# ------------------------------------------------------------------------------------------------- bytes
def sharded_linear(recipe: str, rows: int, cols: int, device: str, mesh: Any) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(te_dist.Linear(cols, rows, bias=False, recipe=RECIPES[recipe], device=device))
    weight = cases.weight_of(rows, cols, device, seed=rows)
    with torch.no_grad():
        model[0].weight.copy_(weight)
    return fully_shard(model, mesh=mesh), weight


def check_bytes(rank: int, world: int, device: str, shape: tuple[int, ...]) -> None:
    mesh = mesh_of(device, *shape)
    ranks = shape[-1]
    for recipe in RECIPES:
        for rows in (160, 128 * world, 254, 130, 2, 1):
            if rows == 1 and "nvfp4" in recipe:  # which packs two of them
                continue
            model, weight = sharded_linear(recipe, rows, 66, device, mesh)
            layer, scale = model[0], None
            if recipe == "delayed":
                layer.fp8_scale[1], scale = 3.0, torch.full((1,), 3.0, device=device)
            odd = recipe == "nvfp4_1d" and -(-rows // ranks) % 2 and ranks > 1
            assert all_gather_report(model).quantized == ([] if odd else ["0.weight"]), (recipe, rows)
            seen = []
            for _ in range(3):  # the first builds the parameter, the others refill it
                model.unshard()
                storage = gathered(layer)
                seen.append((layer.weight, [t.untyped_storage()._cdata for t in storage.inner_tensors()]))
                assert_storage_equals(storage, whole_weight(storage, weight, scale), f"{recipe} {rows}")
                if rows == 254 and recipe != "delayed":  # the planes that are made from it are right too
                    both = storage.with_usage(rowwise=True, columnwise=True)
                    assert_storage_equals(both, both.quantizer.quantize(weight), f"{recipe}, both planes")
                model.reshard()
                assert not any(cases.has_memory(t) for t in cases.plane_buffers(storage)), "not freed"
            assert all(entry[0] is seen[0][0] and entry[1] == seen[0][1] for entry in seen), "buffers are not reused"


MESHES = [(2, (2,)), (4, (4,)), (4, (2, 2)), (2, (1, 2)), (2, (2, 1)), (4, (1, 4))]


@pytest.mark.parametrize(("world", "shape"), MESHES, ids=str)
def test_unsharded_weight_equals_single_process(
    rank_pools: Pools, device: str, world: int, shape: tuple[int, ...]
) -> None:
    """FSDP, HSDP, and meshes with a side of one rank; even, uneven, empty and unaligned shards."""
    rank_pools(world).run(check_bytes, device, shape)


def check_bytes_2d(rank: int, world: int, device: str) -> None:
    """Beside tensor parallelism: FSDP2 cuts what a rank has of a weight, wherever that ends. Expected is what tensor
    parallelism alone quantizes, which tests of its own compare with one process."""
    mesh = mesh_of(device, 2, 2, names=("dp", "tp"))
    group, at = mesh["tp"].get_group(), mesh["tp"].get_local_rank()
    for recipe in RECIPES:
        for mode, rows in (("column", 160), ("column", 256), ("column", 254), ("column", 2), ("row", 130), ("row", 1)):
            whole = cases.weight_of(2 * rows if mode == "column" else rows, 132, device, seed=rows)
            mine = whole.chunk(2, 0 if mode == "column" else 1)[at].contiguous()
            if "nvfp4" in recipe and rows % 2:
                continue
            model = nn.Sequential(te_dist.Linear(132, len(whole), bias=False, recipe=RECIPES[recipe], device=device))
            with torch.no_grad():
                model[0].weight.copy_(whole)
            parallelize(model, mesh["tp"], {"0": mode})
            fully_shard(model, mesh=mesh["dp"])
            scale = None
            if recipe == "delayed":
                model[0].fp8_scale[1], scale = 3.0, torch.full((1,), 3.0, device=device)
            for _ in range(2):
                with torch.no_grad():
                    model.eval().unshard()
                storage = gathered(model[0])
                if scale is not None:
                    expected = whole_weight(storage, mine, scale)
                else:
                    expected = storage.quantizer.quantize(mine, amax_reduction_group=group)
                assert_storage_equals(storage, expected, f"{recipe} {mode} {rows}")
                model.reshard()
                assert not any(cases.has_memory(t) for t in cases.plane_buffers(storage)), "not freed"


def test_unsharded_weight_beside_tensor_parallelism(rank_pools: Pools, device: str) -> None:
    rank_pools(4).run(check_bytes_2d, device)


def check_world_of_one(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, 2, 1)["shard"]
    for recipe in RECIPES:
        model, weight = sharded_linear(recipe, 162, 66, device, mesh)
        x = torch.ones(4, 66, device=device, requires_grad=True)
        model(x).sum().backward()
        with torch.no_grad():  # as for evaluation: a training forward would move delayed scaling's scale on
            model.eval().unshard()
        storage = gathered(model[0])
        scale = model[0].fp8_scale[1:2] if recipe == "delayed" else None
        assert_storage_equals(storage, whole_weight(storage, weight, scale), recipe)


def test_one_rank(rank_pools: Pools, device: str) -> None:
    """Nothing goes over a wire; FSDP2 takes another way there."""
    rank_pools(2).run(check_world_of_one, device)


# ------------------------------------------------------------------------------------------------- the wire
class Spy(DefaultAllGather):
    """FSDP2's own collective, watched."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.dtype, int]] = []

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.seen.append((input_tensor.dtype, input_tensor.numel()))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class BiasFree(nn.Module):
    def __init__(self, recipe: str, device: str) -> None:
        super().__init__()
        options = {"bias": False, "recipe": RECIPES[recipe], "device": device}
        self.up = te_dist.Linear(256, 512, **options)
        self.down = te_dist.Linear(512, 256, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def check_wire(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    for recipe in RECIPES:
        for policy in (None, cases.BF16):
            model = nn.Sequential(BiasFree(recipe, device), BiasFree(recipe, device))
            for block in model:
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            spy = Spy()
            for block in model:
                block.set_custom_all_gather(spy)
            x = torch.randn(32, 256, device=device, requires_grad=True)
            with comm_report() as report:
                model(x).sum().backward()
            # On FSDP2's own collective: one byte vector a block and phase, of the documented size.
            table = all_gather_report(model)
            lines = {p.name: p for p in table.parameters}
            sizes = [
                sum(getattr(lines[f"{i}.{name}.weight"], f"{phase}_bytes") for name in ("up", "down"))
                for phase, order in (("forward", (0, 1)), ("backward", (1, 0)))
                for i in order
            ]
            assert spy.seen == [(torch.uint8, size) for size in sizes], (recipe, spy.seen, sizes)
            # And in the report: uint8 for each weight, forward and backward, and nothing in high precision.
            gathers = report.select(kind="all_gather")
            assert {c.dtype for c in gathers} == {"uint8"} and len(gathers) == 8, recipe
            assert {c.layer for c in gathers} == set(lines), recipe
            assert sum(c.bytes for c in gathers) == sum(sizes) == table.bytes
            share = table.bytes / sum(p.bf16_bytes for p in table.parameters)
            low, high = {"nvfp4": (0.25, 0.26), "nvfp4_1d": (0.28, 0.285)}.get(recipe, (0.5, 0.52))
            assert low <= share <= high, (recipe, share)
            # Shards are whole blocks here, so only formats with an amax of the whole tensor reduce any.
            reductions = report.select(kind="all_reduce", payload="amax")
            expected = 1 if recipe in ("current", "current_pow2", "delayed", "nvfp4", "nvfp4_1d") else 0
            assert len(reductions) == expected, (recipe, reductions)


def test_quantized_bytes_on_the_wire(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_wire, device)


def check_one_reduction(rank: int, world: int, device: str) -> None:
    """One for all weights of a forward, whatever the blocks and however often it runs; none in backward."""
    mesh = mesh_of(device, world)
    for recipe in RECIPES:
        model = build(recipe, device, mesh)
        x = torch.randn(16, cases.WIDTH, device=device, requires_grad=True)
        model(x)
        for gradients in (True, False):
            with comm_report() as report, torch.set_grad_enabled(gradients):
                y = model(x)
                if gradients:
                    y.sum().backward()
            assert len(report.select(kind="all_reduce", payload="amax")) == 1, (recipe, str(report))


def test_one_amax_reduction_a_forward(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_one_reduction, device)


# ------------------------------------------------------------------------------------------------- the layer's side
def check_no_requantization(rank: int, world: int, device: str) -> None:
    """The layer multiplies the very buffers that FSDP2 gathered: no quantize kernel sees a weight."""
    mesh = mesh_of(device, world)
    for recipe in RECIPES:
        # No shard is the whole weight, not even when it is extended to whole blocks.
        model = build(recipe, device, mesh, width=256, hidden=(512, 384))
        seen: list[tuple[int, ...]] = []
        names = [f"quantize_{kind}" for kind in ("current", "block", "mxfp8", "nvfp4")]
        names += ["cast_current", "cast_scaled"]
        real = {name: getattr(kernels, name) for name in names}

        def watch(
            name: str, real: dict[str, Any] = real, seen: list[tuple[int, ...]] = seen
        ) -> Callable[..., None]:
            def call(x: Any, *args: Any, **kwargs: Any) -> None:
                seen.append(tuple(x.shape))
                real[name](x, *args, **kwargs)

            return call

        shapes = {tuple(p.shape) for p in model.blocks.parameters() if p.dim() == 2}
        try:
            for name in names:
                setattr(kernels, name, watch(name))
            model(torch.randn(16, 256, device=device, requires_grad=True)).sum().backward()
        finally:
            for name in names:
                setattr(kernels, name, real[name])
        assert seen and not shapes & set(seen), (recipe, shapes & set(seen))


def test_the_gathered_weight_is_the_workspace(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_no_requantization, device)


def check_planes(rank: int, world: int, device: str) -> None:
    """Which planes have memory when forward and backward of a block run."""
    mesh = mesh_of(device, world)
    for recipe in RECIPES:
        for reshard in (True, False):
            model = build(recipe, device, mesh, reshard_after_forward=reshard)
            layer = model.blocks[0].up
            seen: dict[str, list[bool]] = {}

            def note(phase: str, layer: Any = layer, seen: dict[str, list[bool]] = seen) -> None:
                storage = gathered(layer)
                buffers = {n: getattr(storage, n) for n in storage.inner_names() if n not in cases.COMMON_BUFFERS}
                seen[phase] = [cases.has_memory(t) for t in buffers.values()]

            layer.register_forward_hook(lambda *_: note("forward"))
            layer.register_full_backward_pre_hook(lambda *_: note("backward"))
            model(torch.randn(16, cases.WIDTH, device=device, requires_grad=True)).sum().backward()
            if recipe in ONE_PLANE:
                expected = {"forward": [True] * len(seen["forward"]), "backward": [True] * len(seen["forward"])}
            elif reshard:
                expected = {"forward": [True, True, False, False], "backward": [False, False, True, True]}
            else:
                expected = {"forward": [True] * 4, "backward": [True] * 4}
            assert seen == expected, (recipe, reshard, seen)


def test_only_the_planes_that_a_phase_reads(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_planes, device)


# ------------------------------------------------------------------------------------------------- freshness
def check_fresh(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    for recipe in MAIN:
        model = build(recipe, device, mesh)
        x = torch.randn(16, cases.WIDTH, device=device, requires_grad=True)
        layer = model.blocks[0].up
        seen: list[torch.Tensor] = []
        layer.register_forward_hook(lambda module, *_, seen=seen: seen.append(gathered(module).dequantize()))

        def expect_current(
            what: str, recipe: str = recipe, model: Any = model, layer: Any = layer, seen: Any = seen, x: Any = x
        ) -> None:
            weight = full(layer.weight)
            model(x).sum().backward()
            scale = layer.fp8_scale[1:2] if recipe == "delayed" else None
            storage = gathered(layer) if isinstance(layer.weight, GatheredWeight) else None
            assert storage is None, "the block is still unsharded"
            param = next(p for p in model.blocks[0]._get_fsdp_state()._fsdp_param_group.fsdp_params
                         if p._module_info.module is layer and p._module_info.param_name == "weight")  # fmt: skip
            template = param._unsharded_param.quantized_storage
            expected = whole_weight(template, weight, scale).dequantize()
            assert torch.equal(seen[-1], expected), (recipe, what)

        expect_current("first")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # counts no versions
        expect_current("no step")
        optimizer.step()
        expect_current("after a step")
        optimizer.step()
        optimizer.step()
        expect_current("after two steps")
        other = build(recipe, device, mesh, seed=7)
        model.load_state_dict(other.state_dict())
        expect_current("after loading")
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(5.0)
        if recipe != "delayed":  # by hand, outside of any forward
            model.blocks[0].unshard()
            assert torch.equal(gathered(layer).dequantize(), whole_weight(gathered(layer), 5 * full(
                other.blocks[0].up.weight)).dequantize())  # fmt: skip
            model.blocks[0].reshard()
        expect_current("after changing in place")
        model.eval()
        with torch.no_grad():
            model(x)


def test_amaxes_are_never_stale(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_fresh, device)


def check_recipe_changes(rank: int, world: int, device: str) -> None:
    """A recipe that comes from autocast, changes, or is switched off for a while: the gather follows it."""
    mesh = mesh_of(device, world)
    model, single = build(None, device, mesh), cases.make(None, device)
    x = torch.randn(16, cases.WIDTH, device=device)
    scopes = [None, "current", "mxfp8", None, "current", "nvfp4"]
    for scope in scopes:
        results = []
        for m in (single, model):
            leaf = x.clone().requires_grad_()
            with te_dist.autocast(enabled=scope is not None, recipe=RECIPES[scope] if scope else None):
                torch.manual_seed(3)
                y = m(leaf)
            y.sum().backward()  # outside of the scope
            results.append((y, leaf.grad))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs), scope
    gradients = {n: full(p.grad) for n, p in model.named_parameters()}
    for name, p in single.named_parameters():
        assert torch.allclose(gradients[name], p.grad, rtol=1e-5, atol=1e-6), name
    with te_dist.autocast(recipe=RECIPES["current"]):
        model.blocks[0].unshard()
    with pytest.raises(RuntimeError, match=r"blocks.0.up.weight|up.weight was gathered for Float8CurrentScaling"):
        model.blocks[0].up(x)
    model.blocks[0].reshard()


def test_recipes_in_scopes(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_recipe_changes, device)


# ------------------------------------------------------------------------------------------------- attaching later
def check_attach(rank: int, world: int, device: str) -> None:
    """torch's own fully_shard, some steps in high precision, then quantized gathers: as if from the start."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = mesh_of(device, world)
    data = cases.batches(4, world, device)
    for recipe in MAIN:
        early, late = build(recipe, device, mesh), cases.make(recipe, device)
        for module in (*late.blocks, late):
            torch_fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)  # gloo on a GPU may have no average
        names = {f"blocks.{i}.{n}.weight" for i in (0, 1) for n in ("up", "down")}
        assert all_gather_report(late).others == dict.fromkeys(sorted(names, key=list(
            all_gather_report(late).others).index), "quantized_all_gather is off")  # fmt: skip
        optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (early, late)]
        if recipe != "delayed":  # whose histories differ: without te_dist's hooks nobody reduces them
            cases.train(early, data[:2], rank, optimizer=optimizers[0])
            cases.train(late, data[:2], rank, optimizer=optimizers[1])
            cases.assert_same(early, late, what=recipe)
        report = enable_quantized_all_gather(late)
        assert set(report.quantized) == names
        with comm_report() as seen:
            cases.train(late, data, rank, optimizer=optimizers[1], first_step=2)
        assert {c.dtype for c in seen.select(kind="all_gather")} == {"uint8"}
        cases.train(early, data, rank, optimizer=optimizers[0], first_step=2)
        cases.assert_same(early, late, what=recipe)


def test_enable_on_a_sharded_model(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_attach, device)


def test_planes_cover_every_built_in_quantizer() -> None:
    for recipe in RECIPES.values():
        role = te_dist.QuantizerRole("linear", "weight")
        if not isinstance(recipe, te_dist.recipe.DelayedScaling):
            assert planes_of(recipe.quantizer_for(role)) is not None

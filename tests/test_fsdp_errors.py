"""What cannot work under FSDP2 is said at once, on every rank, before a byte has been sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from fsdp_cases import RECIPES, build, make, mesh_of
from ranks import RankPool
from torch import nn
from torch.distributed.tensor import Shard

import te_dist
from te_dist.parallel import all_gather_report, comm_report, enable_quantized_all_gather, fully_shard

Pools = Callable[[int], RankPool]


def raises(call: Callable[[], Any], *parts: str, error: type[Exception] = ValueError) -> None:
    """The error names all parts, and nobody has communicated."""
    with comm_report() as report, pytest.raises(error) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), (part, str(caught.value))
    assert not report.collectives


def linear(recipe: str | None, rows: int = 64, cols: int = 32, **options: Any) -> te_dist.Linear:
    return te_dist.Linear(cols, rows, recipe=RECIPES[recipe] if recipe else None, **options)


def check_errors(rank: int, world: int) -> None:
    mesh = mesh_of("cpu", world)
    raises(lambda: fully_shard(make("current"), quantized_all_gather="yes"), "quantized_all_gather", "'yes'")
    raises(lambda: fully_shard("model"), "expects a module but got str", error=TypeError)  # type: ignore[type-var]

    # An unsupported layout under "on": structure, recipe, placement, sharding.
    on = {"mesh": mesh, "quantized_all_gather": "on"}
    split = nn.Sequential(linear("block", parameters_split=("q", "k")))
    raises(lambda: fully_shard(split, **on), "'0.q_weight'", "joins several parameters, at row 32", "block of 128 rows")
    high = te_dist.recipe.Float8CurrentScaling(backward_override="high_precision")
    raises(
        lambda: fully_shard(nn.Sequential(te_dist.Linear(32, 64, recipe=high)), **on),
        "'0.weight'", "dgrad in high precision",
    )  # fmt: skip
    raises(
        lambda: fully_shard(nn.Sequential(linear("mxfp8")), shard_placement_fn=lambda p: Shard(p.dim() - 1), **on),
        "'0.weight'", "dimension 1",
    )  # fmt: skip
    odd = nn.Sequential(linear("nvfp4_1d", rows=3 * world))
    raises(lambda: fully_shard(odd, **on), "'0.weight'", "two rows share a byte")

    # Mixed recipes in one parameter group, in every mode that gathers quantized.
    for mode in ("auto", "on"):
        mixed = nn.Sequential(linear("current"), linear("mxfp8", 32, 64))
        raises(
            lambda mixed=mixed, mode=mode: fully_shard(mixed, mesh=mesh, quantized_all_gather=mode),
            "'0'", "Float8CurrentScaling", "'1'", "MXFP8BlockScaling", "apart",
        )  # fmt: skip
    mixed = nn.Sequential(linear("current"), linear("mxfp8", 32, 64), linear(None, 8, 32))
    fully_shard(mixed[0], mesh=mesh)  # apart they may differ
    fully_shard(mixed, mesh=mesh)
    assert len(all_gather_report(mixed).quantized) == 2

    # Gradients that do not pass through autograd.
    for option in ("fuse_wgrad_accumulation", "delay_wgrad_compute"):
        layer = nn.Sequential(linear("current", **{option: True}))
        for mode in ("auto", "off"):
            shard = {"mesh": mesh, "quantized_all_gather": mode}
            raises(lambda layer=layer, shard=shard: fully_shard(layer, **shard), f"0 has {option}")

    # The wrong order.
    sharded = fully_shard(nn.Sequential(nn.Linear(8, 8)), mesh=mesh)
    raises(lambda: te_dist.convert(sharded, RECIPES["current"], verbose=False), "convert first", "fully_shard last")
    raises(lambda: enable_quantized_all_gather(make("current")), "expects a model that fully_shard was called on")
    raises(lambda: enable_quantized_all_gather(sharded, mode="off"), "mode", "'off'")
    model = build("current", "cpu", mesh, quantized_all_gather="off")
    model.blocks[0].unshard()
    raises(lambda: enable_quantized_all_gather(model), "unsharded", "reshard() first", error=RuntimeError)
    model.blocks[0].reshard()
    enable_quantized_all_gather(model)

    # reshard_after_forward=<number> keeps shards of shards.
    if world == 4:
        raises(
            lambda: fully_shard(nn.Sequential(linear("current")), reshard_after_forward=2, **on),
            "'0.weight'", "reshard_after_forward is a number",
        )  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_errors_before_any_communication(rank_pools: Pools, world: int) -> None:
    rank_pools(world).run(check_errors)


def check_auto(rank: int, world: int, device: str) -> None:
    """What "on" refuses, "auto" gathers in high precision, says so, and trains as one process would."""
    mesh = mesh_of(device, world)
    high = te_dist.recipe.MXFP8BlockScaling(backward_override="high_precision")
    dequantized = te_dist.recipe.MXFP8BlockScaling(backward_override="dequantized")
    cols = 64

    def grouped(**options: Any) -> nn.Module:
        return te_dist.GroupedLinear(2, cols, 64, recipe=RECIPES["mxfp8"], device=device, **options)

    layers: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
        "split": (lambda: linear("mxfp8", cols=cols, parameters_split=("q", "k"), device=device), "quantized", ""),
        "split in a block": (
            lambda: linear("mxfp8", 48, cols, parameters_split=("q", "k", "v"), device=device),
            "high precision", "joins several parameters",
        ),
        "high": (lambda: te_dist.Linear(cols, 64, recipe=high, device=device), "high precision", "dgrad"),
        "dequantized": (lambda: te_dist.Linear(cols, 64, recipe=dequantized, device=device), "quantized", ""),
        "odd": (
            lambda: linear("nvfp4_1d", rows=3 * world, cols=cols, device=device), "quantized after", "share a byte",
        ),
        "no recipe": (lambda: linear(None, cols=cols, device=device), "high precision", "no recipe"),
        "one parameter": (lambda: grouped(single_grouped_weight=True), "quantized", ""),
        "experts": (grouped, "quantized", ""),
    }  # fmt: skip
    for name, (build_layer, how, reason) in layers.items():
        models = []
        for _ in range(2):
            torch.manual_seed(4)
            models.append(nn.ModuleList([build_layer()]))
        single, model = models
        fully_shard(model[0], mesh=mesh)
        report = all_gather_report(model)
        assert report.parameters and {p.how for p in report.parameters} == {how}, (name, str(report))
        assert all(reason in p.reason for p in report.parameters), (name, str(report))
        assert str(report).count("\n") == len(report.parameters) + 1
        arguments = ([7, 9],) if "group" in type(single[0]).__name__.lower() else ()
        for _ in range(2):
            x = torch.randn(16, cols, device=device)
            outputs = []
            for m in (single, model):
                leaf = x.clone().requires_grad_()
                torch.manual_seed(5)
                y = m[0](leaf, *arguments)
                y.square().sum().backward()
                outputs.append((y.detach(), leaf.grad, [cases.full(p.grad) for p in m.parameters()]))
            assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1]), name
            for a, b in zip(outputs[0][2], outputs[1][2], strict=True):  # both ranks have the same batch
                assert torch.equal(a, b), name


class TiedInPart(nn.Module):
    """Two layers that share one of the two parameters which each of them joins."""

    def __init__(self, device: str) -> None:
        super().__init__()
        options = {"recipe": RECIPES["mxfp8"], "parameters_split": ("q", "k"), "device": device}
        self.one, self.two = te_dist.Linear(64, 64, **options), te_dist.Linear(64, 64, **options)
        self.two.q_weight = self.one.q_weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x)))


def check_tied_in_part(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    made = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = TiedInPart(device)
        if sharded:
            fully_shard(model, mesh=mesh)
            report = all_gather_report(model)
            assert not report.quantized and "tied" in report.others["one.q_weight"], str(report)
        x = torch.randn(16, 64, device=device, requires_grad=True)
        model(x).square().sum().backward()
        made.append([x.grad, *[cases.full(p.grad) for p in model.parameters()]])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_tied_in_part(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_tied_in_part, device)


def test_auto_falls_back_and_says_why(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_auto, device)


def check_layer_called_alone(rank: int, world: int) -> None:
    """A layer that is called while its FSDP module is sharded must not read memory that is not there."""
    model = build("mxfp8", "cpu", mesh_of("cpu", world))
    x = torch.randn(4, cases.WIDTH, requires_grad=True)
    y = model(x)
    gathered = model.blocks[0]._get_fsdp_state()._fsdp_param_group.fsdp_params[0]._unsharded_param
    layer = te_dist.Linear(cases.WIDTH, cases.HIDDEN[0], bias=False, recipe=RECIPES["mxfp8"])
    layer.weight = gathered
    with pytest.raises(RuntimeError, match="not unsharded"):
        layer(x)
    with pytest.raises(RuntimeError, match=r"blocks.0.up.weight is not unsharded"):
        gathered.dequantize()
    assert "without memory" in repr(gathered) and "[160, 96]" in repr(gathered)
    y.sum().backward()
    model.blocks[0].unshard()
    assert "unsharded" in repr(model.blocks[0].up.weight)


def test_missing_memory_is_an_error(rank_pools: Pools) -> None:
    rank_pools(2).run(check_layer_called_alone)


def test_convert_still_works_on_plain_models() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    assert te_dist.convert(model, RECIPES["current"], verbose=False).converted == ["0"]

"""Grouped layers, norms and whole transformer layers on a GPU: inductor, with and without CUDA graphs, equals eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from cases import varied
from layer_cases import RECIPES, assert_equal, run
from torch import Tensor, nn

import te_dist

pytestmark = pytest.mark.cuda
modes = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
recipes = pytest.mark.parametrize("name", sorted(RECIPES))
STEPS = 4  # reduce-overhead runs, records and then replays


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def check_steps(eager: nn.Module, mode: str, inputs: Callable[[int], tuple], shape: tuple[int, ...], name: str) -> None:
    """Some steps of the module and of a compiled copy; inputs(step) are the arguments, the first of them the leaf."""
    twin = copy.deepcopy(eager)
    call = torch.compile(twin, fullgraph=True, mode=mode)
    for s in range(STEPS):
        x, *rest = inputs(s)
        dy = varied(shape, torch.bfloat16, seed=20 + s).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        made = {n: t.clone() for n, t in run(twin, x, *rest, dy=dy, call=call).items()}
        expected = run(eager, x, *rest, dy=dy)
        if name == "nvfp4" and mode == "reduce-overhead":  # a graph's random state is its own
            made, expected = {"y": made["y"]}, {"y": expected["y"]}
        assert_equal(made, expected)


def leaf(*shape: int, seed: int) -> Tensor:
    return varied(shape, torch.bfloat16, seed).cuda().requires_grad_()


@recipes
@modes
@pytest.mark.parametrize("where", ["host", "device"])
def test_grouped_linear(name: str, mode: str, where: str) -> None:
    torch.manual_seed(3)
    layer = te_dist.GroupedLinear(3, 64, 96, recipe=RECIPES[name], dtype=torch.bfloat16, device="cuda")
    splits: Any = [32, 0, 64]
    if where == "device":
        splits = torch.tensor(splits, device="cuda")
    check_steps(layer, mode, lambda s: (leaf(96, 64, seed=s), splits), (96, 96), name)


@modes
@pytest.mark.parametrize("kind", [te_dist.LayerNorm, te_dist.RMSNorm])
def test_norms(kind: type[nn.Module], mode: str) -> None:
    check_steps(
        kind(160, dtype=torch.bfloat16, device="cuda"), mode, lambda s: (leaf(5, 33, 160, seed=s),), (5, 33, 160), ""
    )


@recipes
@modes
def test_transformer_layer(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to bf16 where eager code rounds: inductor by itself keeps what it fuses in float32."""
    monkeypatch.setattr(torch._inductor.config, "emulate_precision_casts", True)
    torch.manual_seed(7)
    layer = te_dist.TransformerLayer(
        128,
        192,
        4,
        recipe=RECIPES[name],
        num_gqa_groups=2,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        device="cuda",
    )
    check_steps(layer, mode, lambda s: (leaf(64, 2, 128, seed=s),), (64, 2, 128), name)

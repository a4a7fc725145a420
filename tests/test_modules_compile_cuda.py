"""CUDA graphs, by hand and by torch.compile, of every layer; grouped layers, norms and transformer layers compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from cases import varied
from layer_cases import RECIPES, assert_equal, run
from module_cases import LAYERS, change_weights, make, sample
from module_cases import RECIPES as MADE
from module_cases import assert_equal as assert_all_equal
from torch import Tensor, nn

import te_dist

pytestmark = pytest.mark.cuda
modes = pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
recipes = pytest.mark.parametrize("name", sorted(RECIPES))
everything = pytest.mark.parametrize(("kind", "recipe"), [(kind, name) for name in sorted(MADE) for kind in LAYERS])
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
@torch._inductor.config.patch(emulate_precision_casts=True)
def test_transformer_layer(name: str, mode: str) -> None:
    """Rounded to bf16 where eager code rounds: inductor by itself keeps what it fuses in float32."""
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


@everything
def test_cuda_graph(kind: str, recipe: str) -> None:
    """A captured forward and backward equals eager, with the weight update decided at replay by a flag."""
    layer, eager = make(kind, recipe).cuda(), make(kind, recipe).cuda()
    static_x, skip = sample(64).cuda().requires_grad_(), torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(static_x, True, skip).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    for p in [static_x, *layer.parameters()]:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(static_x, True, skip)
        y.sum().backward()
    if recipe in ("delayed", "nvfp4"):  # state that moves on, and seeds: compared with themselves
        graph.replay()
        assert all(t.isfinite().all() for t in (y, static_x.grad, *[p.grad for p in layer.parameters()]))
        return
    x = sample(64, seed=5).cuda().requires_grad_()
    with torch.no_grad():
        static_x.copy_(x)
    graph.replay()
    expected = eager(x)
    expected.sum().backward()
    assert_all_equal([y, static_x.grad], [expected, x.grad])
    skip.fill_(1)
    change_weights(layer)
    graph.replay()
    if recipe != "none":
        assert torch.equal(y, expected), "the flag kept the quantized weight"


@everything
def test_reduce_overhead(kind: str, recipe: str) -> None:
    eager, layer = make(kind, recipe).cuda(), make(kind, recipe).cuda()
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for s in range(4):
        x = sample(64, seed=s).cuda()
        results = []
        for call, owner in ((compiled, layer), (eager, eager)):
            torch.manual_seed(7)
            torch.compiler.cudagraph_mark_step_begin()
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.backward(varied(tuple(y.shape), y.dtype, seed=9).cuda())
            results.append([t.detach().clone() for t in (y, leaf.grad, *[p.grad for p in owner.parameters()])])
            owner.zero_grad()
        if recipe == "nvfp4":  # a graph's random state is its own
            assert_all_equal(results[0][:1], results[1][:1])
        else:
            assert_all_equal(*results, f"step {s}")

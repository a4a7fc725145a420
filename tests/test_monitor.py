"""te_dist.monitor: its numbers against plain torch, its silence when it is off, and its sums over ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import te_dist
from te_dist import recipe as recipes
from te_dist.pipeline.operands import observer

RECIPES = [
    recipes.Float8CurrentScaling(),
    recipes.DelayedScaling(amax_history_len=4),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
    recipes.NVFP4BlockScaling(),
]


def model_of(recipe: te_dist.Recipe) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te_dist.LayerNormMLP(64, 96, activation="swiglu", recipe=recipe), te_dist.Linear(64, 32, recipe=recipe)
    )


def train_step(model: torch.nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_every_role_of_every_layer_is_seen(recipe: te_dist.Recipe, compiled: bool) -> None:
    model = model_of(recipe)
    x = torch.randn(48, 64, requires_grad=True)
    with te_dist.monitor(model, every=1) as watch:
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for _ in range(2):  # delayed scaling knows its scales from the second step on
            train_step(run, x)
            statistics = watch.step()
    assert statistics is not None and list(statistics) == ["0.fc1", "0.fc2", "1"]
    floor = {"NVFP4BlockScaling": 15.0, "Float8BlockScaling": 30.0, "MXFP8BlockScaling": 30.0}
    for roles in statistics.values():
        assert list(roles) == ["input", "weight", "grad_output"]
        for entry in roles.values():
            # 3 mantissa bits give about 31 dB, 2 give 25, E2M1 about 18; stochastic rounding costs a little.
            assert floor.get(type(recipe).__name__, 24.0) < entry["sqnr_db"] < 40.0
            assert 0 < entry["scale_min"] <= entry["scale_max"] and entry["amax"] > 0
            assert entry["saturation_percent"] == 0.0 and 0 <= entry["underflow_percent"] < 40.0


def test_numbers_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    layer = te_dist.Linear(64, 32, bias=False, recipe=recipes.Float8CurrentScaling(), name="fc")
    x = torch.randn(40, 64)
    x[0, :32] = 2.0**-18  # far below the smallest e4m3 under this scale
    with te_dist.monitor(layer) as watch:
        layer(x).sum().backward()
        statistics = watch.step()
    assert statistics is not None
    entry = statistics["fc"]["input"]
    made = te_dist.Float8CurrentScalingQuantizer("e4m3").quantize(x).dequantize(dtype=torch.float32)
    noise = (x - made).double().square().sum()
    assert entry["sqnr_db"] == pytest.approx(10 * math.log10(x.double().square().sum() / noise), abs=1e-6)
    assert entry["underflow_percent"] == pytest.approx(100 * ((made == 0) & (x != 0)).double().mean().item())
    assert entry["underflow_percent"] >= 100 * 32 / x.numel()
    assert entry["amax"] == x.abs().max().item()
    assert entry["scale_min"] == entry["scale_max"] == pytest.approx(x.abs().max().item() / 448.0, rel=1e-6)
    weight = te_dist.Float8CurrentScalingQuantizer("e4m3").quantize(layer.weight.detach()).dequantize()
    noise = (layer.weight - weight).detach().double().square().sum()
    signal = layer.weight.detach().double().square().sum()
    assert statistics["fc"]["weight"]["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), abs=1e-6)


def test_saturation_is_what_a_stale_scale_cuts_off() -> None:
    layer = te_dist.Linear(32, 32, bias=False, recipe=recipes.DelayedScaling(amax_history_len=1), name="fc")
    x = torch.ones(64, 32)
    with te_dist.monitor(layer, every=1) as watch:
        for value in (1.0, 1.0):
            layer(x * value).sum().backward()
            watch.step()
        spiked = x.clone()
        spiked[:16] = 8.0  # the scale was made for 1
        spiked[16, :] = 1.03  # beyond the largest, but it rounds to it
        layer(spiked).sum().backward()
        statistics = watch.step()
    assert statistics is not None
    assert statistics["fc"]["input"]["saturation_percent"] == 25.0


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_not_sampled_costs_nothing_and_no_step_changes_a_bit() -> None:
    x = torch.randn(48, 64)

    def run(monitored: bool) -> tuple[list[list[str]], list[Tensor]]:
        model = model_of(recipes.NVFP4BlockScaling())  # draws seeds: a monitor must not
        torch.manual_seed(7)
        watch = te_dist.monitor(model, every=3) if monitored else None
        ops, results = [], []
        for _ in range(4):
            with CountOps() as counter:
                train_step(model, x)
                if watch is not None:
                    watch.step()
            ops.append(counter.ops)
            results += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if watch is not None:
            watch.close()
        return ops, results

    bare, expected = run(False)
    watched, results = run(True)
    assert observer.see is None
    assert all(torch.equal(a, b) for a, b in zip(expected, results, strict=True))
    assert watched[1] == bare[1]  # not one operation more
    # Step 3 ends by switching the next one on, which clears two tables.
    assert watched[2][: len(bare[2])] == bare[2] and len(watched[2]) < len(bare[2]) + 8
    assert len(watched[0]) > len(bare[0]) and len(watched[3]) > len(bare[3])


def test_evaluation_and_other_models_are_not_counted() -> None:
    model, other = model_of(recipes.MXFP8BlockScaling()), te_dist.Linear(64, 32, recipe=recipes.MXFP8BlockScaling())
    x = torch.randn(48, 64)
    with te_dist.monitor(model) as watch:
        train_step(model, x)
        with torch.no_grad():
            model(1000 * x)
        other(1000 * x).sum().backward()
        statistics = watch.step()
    assert statistics is not None and list(statistics) == ["0.fc1", "0.fc2", "1"]
    assert statistics["0.fc1"]["input"]["amax"] < 20


def test_the_log_is_jsonl_or_a_function(tmp_path: Path) -> None:
    model = model_of(recipes.Float8BlockScaling())
    seen: list[int] = []
    for log in (tmp_path / "metrics.jsonl", lambda step, statistics: seen.append(step)):
        with te_dist.monitor(model, every=2, log=log) as watch:
            for _ in range(4):
                train_step(model, torch.randn(16, 64))
                watch.step()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 3] == seen
    assert lines[0]["event"] == "quantization" and "sqnr_db" in lines[0]["layers"]["1"]["weight"]


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="expects a model with te_dist layers but Linear has none"):
        te_dist.monitor(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="every"):
        te_dist.monitor(te_dist.Linear(32, 32), every=0)
    with pytest.raises(TypeError, match="expects a module"):
        te_dist.monitor("model")  # type: ignore[arg-type]
    model = model_of(recipes.MXFP8BlockScaling())
    with te_dist.monitor(model), pytest.raises(RuntimeError, match="another monitor"):
        te_dist.monitor(model)
    plain = te_dist.Linear(32, 32)
    with te_dist.monitor(plain) as watch, pytest.warns(UserWarning, match="quantized nothing"):
        watch.step()


def _rank_monitors(rank: int, world: int) -> Any:
    torch.manual_seed(0)
    layer = te_dist.Linear(64, 32, bias=False, recipe=recipes.MXFP8BlockScaling(), name="fc")
    x = torch.randn(64, 64)
    x[40] *= 100.0  # the second rank's
    mine = x[rank * 32 : (rank + 1) * 32] if world > 1 else x
    with te_dist.monitor(layer) as watch:
        layer(mine).sum().backward()
        return watch.step()


def test_ranks_are_brought_together(two_ranks: Callable[..., list[Any]]) -> None:
    """MXFP8's blocks lie within rows, so the whole batch in one process has the same statistics."""
    both = two_ranks(_rank_monitors)
    alone = _rank_monitors(0, 1)
    assert both[0] == both[1]
    for name, value in alone["fc"]["input"].items():
        assert both[0]["fc"]["input"][name] == pytest.approx(value, rel=1e-12), name

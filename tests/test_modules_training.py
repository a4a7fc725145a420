"""200 steps of a small model in every recipe follow the unquantized ones; caching, checkpointing and compiling change
nothing, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from module_cases import QUANTIZED, RECIPES
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_dist

WIDTH, INNER, ROWS, STEPS = 32, 64, 32, 200
SOME_STEPS = 12  # of trainings that are equal in every bit, or not
# How far the mean loss of the last 50 steps may lie above the unquantized one, relative to the drop in loss that
# training brings: quantization noise acts like label noise on a regression whose targets have none. Products of FP8
# operands are 2 to 3 % off (28 dB and more) and those of FP4 10 % (17 dB), and an error of that relative size in each
# product leaves about its square, times the few products in sequence, of the initial loss: 0.3 % and 4 %.
TOLERANCE = {"nvfp4": 0.08}
FP8_TOLERANCE = 0.01


class Model(nn.Module):
    """Two layers behind one another, and every kind of layer among the two models."""

    def __init__(self, kind: str, recipe: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = RECIPES[recipe]()
        if kind == "mlp":
            self.first: nn.Module = te_dist.LayerNormMLP(WIDTH, INNER, recipe=made, activation="swiglu", **options)
            self.second: nn.Module = te_dist.Linear(WIDTH, WIDTH, recipe=made)
        else:
            self.first = te_dist.LayerNormLinear(WIDTH, INNER, recipe=made, normalization="RMSNorm")
            self.second = te_dist.Linear(INNER, WIDTH, recipe=made)

    def forward(self, x: Tensor, flag: bool | None = None) -> Tensor:
        return self.second(nn.functional.silu(self.first(x, flag)), flag)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    xs = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(STEPS)]
    return [(x, torch.tanh(x @ teacher)) for x in xs]


def train(
    model: nn.Module, call: Any = None, steps: int = STEPS, microbatches: int = 1, cached: bool = False
) -> Tensor:
    """The loss of every step. float32 master weights under torch's bf16 autocast, as one trains."""
    call = model if call is None else call
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    torch.manual_seed(2)  # stochastic rounding
    for x, target in batches()[:steps]:
        optimizer.zero_grad()
        total = torch.zeros(())
        parts = zip(x.chunk(microbatches), target.chunk(microbatches), strict=True)
        for index, (part, wanted) in enumerate(parts):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = call(part, index == 0) if cached else call(part)
            loss = nn.functional.mse_loss(y.float(), wanted) / microbatches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        losses.append(total)
    return torch.stack(losses)


@functools.cache
def unquantized(kind: str) -> Tensor:
    return train(Model(kind, "none"))


@pytest.mark.parametrize("kind", ["mlp", "linear"])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_follows_the_unquantized_loss(kind: str, recipe: str) -> None:
    reference, losses = unquantized(kind), train(Model(kind, recipe))
    start, end = reference[0], reference[-50:].mean()
    assert end < 0.35 * start, "the unquantized model learns"
    assert losses.isfinite().all() and not torch.equal(losses, reference)
    gap = (losses[-50:].mean() - end) / (start - end)
    assert gap < TOLERANCE.get(recipe, FP8_TOLERANCE), f"{gap:.4f}"
    # Early on, before trajectories part, each single step agrees.
    early = ((losses - reference).abs() / reference)[:5].max()
    assert early < (0.2 if recipe == "nvfp4" else 0.05), f"{early:.4f}"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_caching_changes_nothing(recipe: str) -> None:
    """Two microbatches a step, with the quantized weights kept. Delayed scaling advances once per step then, and not
    once per microbatch, so it is compared at one microbatch."""
    count = 1 if recipe == "delayed" else 2
    expected = train(Model("mlp", recipe), steps=SOME_STEPS, microbatches=count)
    assert torch.equal(train(Model("mlp", recipe), steps=SOME_STEPS, microbatches=count, cached=True), expected)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_checkpointing_changes_nothing(recipe: str, reentrant: bool) -> None:
    expected = train(Model("mlp", recipe), steps=SOME_STEPS)
    model = Model("mlp", recipe)

    def call(x: Tensor) -> Tensor:
        # The reentrant kind needs an input with a gradient.
        return checkpoint(model, x.requires_grad_(reentrant), use_reentrant=reentrant)

    assert torch.equal(train(model, call, steps=SOME_STEPS), expected)
    assert torch.equal(train(Model("mlp", recipe, checkpoint=True), steps=SOME_STEPS), expected), "the layer's own"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_compiling_changes_nothing(recipe: str) -> None:
    torch._dynamo.reset()
    expected = train(Model("mlp", recipe), steps=SOME_STEPS)
    model = Model("mlp", recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(train(model, compiled, steps=SOME_STEPS), expected)
    if recipe in ("delayed", "mxfp8"):
        model = Model("mlp", recipe)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(train(model, compiled, steps=SOME_STEPS, cached=True), expected), "with caching"


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_training_can_be_resumed(recipe: str, tmp_path: Any) -> None:
    """state_dict at step 20, loaded into a new model: the same losses as without the break (SGD has no state)."""

    def run(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        losses = []
        for x, target in data:
            torch.manual_seed(len(losses))
            loss = nn.functional.mse_loss(model(x), target)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            losses.append(loss.detach())
        return losses

    data = batches()[:40]
    model = Model("mlp", recipe)
    run(model, data[:20])
    torch.save(model.state_dict(), tmp_path / "state.pt")
    expected = run(model, data[20:])
    other = Model("mlp", recipe)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(torch.stack(run(other, data[20:])), torch.stack(expected))

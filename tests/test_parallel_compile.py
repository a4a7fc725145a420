"""Parallel layers inside compiled graphs: fullgraph, bit-equal to eager on every rank, no recompile after step 2."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parallel_cases import MODES, RECIPES, differing, linear, make, parallel_twin, part, sample, step, tp_mesh
from torch import nn

import te_dist
from te_dist import recipe as recipes
from te_dist.parallel import (
    VocabParallelEmbedding,
    comm_report,
    parallelize,
    sequence_shards,
    vocab_parallel_cross_entropy,
)

Pools = Callable[[int], Any]


def compiled_equals_eager(rank: int, world: int, device: str, cases: list[tuple[str, str, str, str]]) -> None:
    """(kind, mode, recipe, backend) of each case."""
    k, n, m = 64, 128, 32 * world
    wrong: list[str] = []
    for kind, label, recipe, backend in cases:
        mode, sp = MODES[label]
        chosen = recipes.NVFP4BlockScaling() if recipe == "stochastic" else RECIPES[recipe]
        eager = parallel_twin(make(kind, k, n, chosen, device), tp_mesh(world, device), mode, sequence_parallel=sp)
        module = parallel_twin(make(kind, k, n, chosen, device), tp_mesh(world, device), mode, sequence_parallel=sp)
        is_block = kind in ("layernorm_mlp", "transformer")
        width = k if is_block else n
        x, dy = sample(m, k, device, 1), sample(m, width, device, 2)
        if is_block:
            x, dy = (part(t, 0 if sp else None, rank, world) for t in (x, dy))
        else:
            x_dim, dy_dim = (0 if sp else None, 1) if mode == "column" else (1, 0 if sp else None)
            x, dy = part(x, x_dim, rank, world), part(dy, dy_dim, rank, world)
        args: tuple[Any, ...] = ()
        if kind == "transformer":
            x, dy = x.view(x.shape[0] // 2, 2, -1), dy.view(dy.shape[0] // 2, 2, -1)
        elif kind == "grouped":
            args = ([x.shape[0] // 4, 0, 3 * x.shape[0] // 4],)
        torch._dynamo.reset()
        counter = CountingBackend(backend)
        call = torch.compile(module, fullgraph=True, backend=counter)
        for turn in range(3):
            with comm_report() as before:
                expected = step(eager, x, dy, *args)
            with comm_report() as after:
                made = step(module, x, dy, *args, call=call)
            wrong += differing(f"{kind} {label} {recipe} {backend} step {turn}", made, expected)
            if [c.bytes for c in before.select()] != [c.bytes for c in after.select()]:
                wrong.append(f"{kind} {label} {recipe} {backend}: other collectives")
            if turn == 1:
                graphs = counter.graphs
        if counter.graphs != graphs:
            wrong.append(f"{kind} {label} {recipe} {backend}: compiled again in step 3")
        with torch.no_grad():
            if not torch.equal(call(x, *args), eager(x, *args)):
                wrong.append(f"{kind} {label} {recipe} {backend}: no_grad")
    assert not wrong, "\n".join(wrong)


class CountingBackend:
    def __init__(self, name: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self.inner, self.graphs = lookup_backend(name), 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.inner(graph, inputs)


# Every layer, mode and recipe once or more; TE_DIST_FULL_MATRIX=1 runs all of their combinations, and
# TE_DIST_FULL_MATRIX=inductor runs them with that backend.
KINDS = {
    "linear": list(MODES),
    "grouped": list(MODES),
    "layernorm_linear": ["column", "column+SP"],
    "layernorm_mlp": ["column", "column+SP"],
    "transformer": ["column", "column+SP"],
}
CASES = [
    *(("linear", label, "current", "aot_eager") for label in MODES),
    *(("linear", "column+SP", recipe, "aot_eager") for recipe in ("delayed", "stochastic")),
    ("linear", "row+SP", "block", "aot_eager"),
    ("layernorm_linear", "column+SP", "mxfp8", "aot_eager"),
    ("grouped", "row+SP", "mxfp8", "aot_eager"),
    ("transformer", "column+SP", "current", "aot_eager"),
    ("layernorm_mlp", "column+SP", "nvfp4", "inductor"),
]
FULL = os.environ.get("TE_DIST_FULL_MATRIX")
if FULL:
    CASES = [
        (kind, label, recipe, "inductor" if FULL == "inductor" else "aot_eager")
        for kind, labels in KINDS.items()
        for label in labels
        for recipe in (*RECIPES, "stochastic")
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(rank_pools: Pools, device: str, kind: str) -> None:
    cases = [case for case in CASES if case[0] == kind]
    rank_pools(2).run(compiled_equals_eager, device, cases, timeout=max(280, 30 * len(cases)))


class SmallModel(nn.Module):
    def __init__(self, recipe: Any, device: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64, dtype=torch.bfloat16, device=device)
        self.layer = te_dist.TransformerLayer(
            64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=torch.bfloat16, recipe=recipe,
            device=device,
        )  # fmt: skip
        self.norm = nn.RMSNorm(64, dtype=torch.bfloat16, device=device)
        self.head = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layer(self.embed(tokens))))


PLAN = {"embed": "row", "layer": "column", "norm": "sequence", "head": "column"}


def model_compiles(rank: int, world: int, device: str) -> None:
    mesh = tp_mesh(world, device)
    torch.manual_seed(0)
    model = parallelize(SmallModel(RECIPES["current"], device), mesh, PLAN, sequence_parallel=True)
    assert isinstance(model.embed, VocabParallelEmbedding)
    tokens = torch.randint(0, 64, (16, 2), generator=torch.Generator().manual_seed(1)).to(device)

    def loss_of(t: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(model(t), t, mesh.get_group().group_name)

    def run(function: Any) -> list[torch.Tensor]:
        model.zero_grad()
        loss = function(tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.to_local() for p in model.parameters())]

    expected = run(loss_of)
    torch._dynamo.reset()
    made = run(torch.compile(loss_of, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_a_whole_model_compiles(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(model_compiles, device)


def uneven_compiles(rank: int, world: int, device: str) -> None:
    rows = (5, 2)
    eager = parallel_twin(linear("linear", 64, 96, RECIPES["mxfp8"], device), tp_mesh(world, device), "column",
                          sequence_parallel=True)  # fmt: skip
    torch._dynamo.reset()
    call = torch.compile(eager, fullgraph=True, backend="aot_eager")
    x, dy = sample(rows[rank], 64, device, 1), sample(7, 48, device, 2)
    with sequence_shards(rows):
        expected, made = step(eager, x, dy), step(eager, x, dy, call=call)
    assert not differing("uneven", made, expected)


def test_uneven_shards_compile(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(uneven_compiles, device)

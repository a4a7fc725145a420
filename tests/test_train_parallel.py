"""te-dist train over ranks: TP x FSDP2 x SP follow one process, resume bit for bit, and change their layout."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from ranks import RankPool
from torch._dynamo.utils import counters
from train_cases import config_of, losses, train

from te_dist.launch import runtime
from te_dist.launch.metrics import read_metrics
from te_dist.launch.optimization import gradient_norm
from te_dist.launch.trainer import Trainer

LAYOUT: dict[str, Any] = {"tp": 2, "sp": True, "dp_shard": 2, "micro_batch": 1, "heads": 4, "hidden": 128, "ffn": 256}
ALONE = {"micro_batch": 2, "hidden": 128, "ffn": 256}


def _train(rank: int, world: int, folder: Path, options: dict[str, Any]) -> int:
    trainer = Trainer(config_of(folder, **options), runtime.start("cpu", 60))
    first = trainer.done.step
    trainer.train()
    return first


def _answer(rank: int, world: int, folder: Path, options: dict[str, Any]) -> str:
    """What building the trainer says."""
    try:
        Trainer(config_of(folder, **options), runtime.start("cpu", 60))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# One without quantization, one without a state, one with scales, one with random numbers. fp8_block has no state
# either: TE_DIST_FULL_MATRIX=1 runs it, too.
RESUMED = ["bf16", "fp8_current", "fp8_delayed:amax_history_len=4", "nvfp4"]
RESUMED += ["fp8_block"] if os.environ.get("TE_DIST_FULL_MATRIX") else []


@pytest.mark.parametrize("recipe", RESUMED)
def test_tp_sp_fsdp_resume_bit_for_bit_and_follow_one_process(
    recipe: str, rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    four = rank_pools(4)
    options = {**LAYOUT, "recipe": recipe, "steps": 5, "monitor_every": 4}
    four.run(_train, tmp_path / "whole", options)
    four.run(_train, tmp_path / "parts", {**options, "checkpoint_every": 3, "final_checkpoint": False})
    assert four.run(_train, tmp_path / "parts", options) == [3] * 4
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts") and len(losses(tmp_path / "whole")) == 5
    train(tmp_path / "alone", recipe=recipe, steps=5, **ALONE)
    for step, loss in losses(tmp_path / "alone").items():
        # The first step differs by the order of sums in bf16; later ones by what the optimizer made of that.
        assert losses(tmp_path / "whole")[step] == pytest.approx(loss, rel=2e-3 if "nvfp4" not in recipe else 1e-2)
    events = read_metrics(tmp_path / "whole")
    wire = next(e for e in events if e["event"] == "wire")["collectives"]
    weights = {row["payload"] for row in wire if row["payload"].startswith("weight")}
    if recipe != "bf16":
        assert any("high precision" not in payload for payload in weights), weights
        assert any(e["event"] == "quantization" for e in events)


def _graphs(rank: int, world: int, folder: Path, options: dict[str, Any]) -> int:
    """Train compiled, by a backend that fuses nothing; how many graphs that took."""
    compile_block = torch.nn.Module.compile
    torch._dynamo.reset()
    counters.clear()
    try:
        torch.nn.Module.compile = functools.partialmethod(compile_block, backend="aot_eager")  # type: ignore[assignment]
        _train(rank, world, folder, {**options, "compile": True})
    finally:
        torch.nn.Module.compile = compile_block  # type: ignore[method-assign]
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("tp", "recipe"), [(1, "fp8_current"), (2, "nvfp4")])
def test_compiled_blocks_share_a_graph_and_train_like_eager_ones(
    tp: int, recipe: str, rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    options = {"tp": tp, "sp": tp > 1, "recipe": recipe, "steps": 2, "layers": 3, "final_checkpoint": False}
    two = rank_pools(2)
    two.run(_train, tmp_path / "eager", options)
    assert two.run(_graphs, tmp_path / "compiled", options) == [2, 2]  # to train, to evaluate
    assert losses(tmp_path / "compiled") == losses(tmp_path / "eager")


def test_a_model_that_is_built_on_the_meta_device_starts_with_the_same_weights(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for recipe, tied in (("fp8_block", False), ("fp8_delayed", True)):
        options = {**LAYOUT, "recipe": recipe, "steps": 2, "tied_embeddings": tied, "final_checkpoint": False}
        for meta in (False, True):
            rank_pools(4).run(_train, tmp_path / f"{recipe}-{meta}", {**options, "meta_init": meta})
        assert losses(tmp_path / f"{recipe}-True") == losses(tmp_path / f"{recipe}-False")


def test_a_checkpoint_of_four_ranks_goes_on_at_two_and_at_one(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    """The same sequences are read and the same weights were saved, so losses go on but for the order of sums."""
    options = {**LAYOUT, "recipe": "fp8_block", "checkpoint_every": 3, "final_checkpoint": False, "steps": 6}
    rank_pools(4).run(_train, tmp_path / "run", options)
    whole = losses(tmp_path / "run")
    at_two = {**options, "tp": 1, "sp": False}
    assert rank_pools(2).run(_train, tmp_path / "run", at_two) == [3, 3]
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(whole[step], rel=2e-3)
    at_one = config_of(tmp_path / "run", **{**options, **ALONE, "tp": 1, "sp": False, "dp_shard": 1})
    trainer = Trainer(at_one)
    assert trainer.done.step == 3
    trainer.train()
    for step, loss in losses(tmp_path / "run").items():
        assert loss == pytest.approx(whole[step], rel=2e-3)


def test_a_checkpoint_with_whole_gates_says_why_it_does_not_fit_tp(
    two_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    train(tmp_path / "run", steps=1)
    for answer in two_ranks(_answer, tmp_path / "run", {"tp": 2, "steps": 2}):
        assert "CheckpointError" in answer and "made with split_gate False but this run (tp 2) has True" in answer
    train(tmp_path / "split", steps=1, split_gate=True)
    assert losses(tmp_path / "split") == losses(tmp_path / "run")  # the same weights, and the same products
    assert two_ranks(_train, tmp_path / "split", {"tp": 2, "steps": 2}) == [1, 1]


def _norms(rank: int, world: int, folder: Path, options: dict[str, Any]) -> tuple[float, float]:
    trainer = Trainer(config_of(folder, **options), runtime.start("cpu", 60))
    (tokens,) = trainer.batches.step(1)
    trainer.model(tokens[:, :-1], tokens[:, 1:]).backward()
    squares = 0.0
    for param in trainer.params:
        grad = param.grad
        assert grad is not None
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        squares += whole.double().square().sum().item()
    return float(gradient_norm(trainer.params)), squares**0.5


def test_the_gradient_norm_counts_every_shard_once(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    for options in (
        {"tp": 2, "dp_shard": 2},
        {"dp_replicate": 2, "dp_shard": 2},
        {"tp": 2, "sp": True, "dp_replicate": 2},
    ):
        found = rank_pools(4).run(_norms, tmp_path, {**LAYOUT, "tp": 1, "dp_shard": -1, "sp": False, **options})
        for norm, expected in found:
            assert norm == pytest.approx(expected, rel=1e-5)
        assert len({norm for norm, _ in found}) == 1


def _microbatches(rank: int, world: int, folder: Path) -> None:
    for name, microbatches in (("one", 1), ("two", 2)):
        options = {
            "micro_batch": 2 // microbatches,
            "microbatches": microbatches,
            "compute_dtype": "float32",
            "steps": 2,
        }
        Trainer(config_of(folder / name, **options), runtime.start("cpu", 60)).train()


def test_microbatches_add_up_under_fsdp(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    rank_pools(2).run(_microbatches, tmp_path)
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert list(one.values()) == pytest.approx(list(two.values()), rel=1e-5)


def _rank_fails(rank: int, world: int, folder: Path) -> str:
    """One rank cannot read the data: all of them must learn of it."""
    torch.manual_seed(0)
    data = folder / f"data{rank}.txt"
    if rank == 0:
        data.write_text("x" * 5000)
    else:
        data.write_text("")
    return _answer(rank, world, folder / "run", {"data": str(data)})


def test_a_rank_whose_data_is_unreadable_stops_all_before_training(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    answers = rank_pools(2).run(_rank_fails, tmp_path)
    assert answers[1].startswith("ConfigError") and "data1.txt' is empty" in answers[1]
    assert "data1.txt' is empty" in answers[0], answers

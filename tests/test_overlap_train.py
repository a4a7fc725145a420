"""te-dist train --overlap: a training run is the same with it, over tensor parallelism and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import RankPool
from test_train_parallel import LAYOUT
from train_cases import config_of, losses

from te_dist.launch import runtime
from te_dist.launch.trainer import Trainer
from te_dist.parallel import overlap_report


def _train(rank: int, world: int, folder: Path, options: dict[str, Any]) -> set[tuple[str, str]]:
    trainer = Trainer(config_of(folder, **options), runtime.start("cpu", 60))
    with overlap_report() as report:
        trainer.train()
    return {(e.product, e.method) for e in report.entries}


def test_training_is_the_same_with_overlap(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    """Of two tensor-parallel ranks: sums of two numbers have one order."""
    options = {**LAYOUT, "recipe": "fp8_block", "steps": 2, "final_checkpoint": False}
    ran = {
        overlap: rank_pools(4).run(_train, tmp_path / overlap, {**options, "overlap": overlap})
        for overlap in ("off", "require")
    }
    assert not any(ran["off"])
    expected = {("fprop", "ring_exchange"), ("fprop", "pipeline"), ("dgrad", "bulk"), ("dgrad", "ring_exchange"),
                ("wgrad", "bulk")}  # fmt: skip
    assert all(seen == expected for seen in ran["require"]), ran["require"]
    assert losses(tmp_path / "off") == losses(tmp_path / "require") and len(losses(tmp_path / "off")) == 2

"""``te-dist train [--nproc-per-node N]``, or ``torchrun ... -m te_dist.launch.train``."""

from __future__ import annotations

import os
import sys
import time
import warnings

from te_dist.launch import runtime
from te_dist.launch.checkpoint import CheckpointError
from te_dist.launch.config import ConfigError
from te_dist.launch.options import config_from, parser, ranks_from
from te_dist.launch.ranks import run_ranks
from te_dist.launch.stopping import name_of
from te_dist.launch.trainer import Trainer, TrainingError
from te_dist.transport import RankFailed

PATIENCE = 5.0  # seconds in which torchrun ends a rank whose first one has given up
INTERRUPTED = 130
TOO_EARLY = "te-dist train: stopped by Ctrl-C before the first step; the newest checkpoint, if any, is whole"


def main(argv: list[str] | None = None) -> int:
    """Train; the last line says how it ended. Exit code 2: told something wrong; 128 + n: signal n."""
    arguments = sys.argv[1:] if argv is None else argv
    if any(a in ("-h", "--help") for a in arguments):
        parser().print_help()
        return 0
    # torch warns of writes into what a sharded block returned; none of the models here does that.
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
    try:
        ranks, rest = ranks_from(arguments)
        if ranks is None:
            return _run(rest)
        config_from(rest).check(ranks.count)  # a mistake is said here, once, and not by every rank
        return run_ranks("te_dist.launch.train", rest, ranks.count, ranks.restarts, TOO_EARLY)
    except ConfigError as error:
        return _refuse(error, 2)
    except (CheckpointError, TrainingError, RankFailed) as error:
        return _refuse(error, 1)
    except KeyboardInterrupt:  # before the first step, or a second time
        return _refuse("interrupted; the newest checkpoint is whole", INTERRUPTED)
    finally:
        runtime.stop()


def _refuse(error: Exception | str, code: int) -> int:
    """Every rank meets most errors; the first says it, and torchrun ends the others. A rank that is still there after a
    while is the only one who knows."""
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        if code == INTERRUPTED:
            return code
        time.sleep(PATIENCE)
    where = "" if rank == "0" else f" on rank {rank}"
    print(f"te-dist train: error{where}: {error}", file=sys.stderr, flush=True)
    return code


def _run(arguments: list[str]) -> int:
    trainer = Trainer(config_from(arguments))
    first = trainer.world.is_first
    if first:
        print(trainer.describe(), flush=True)
    result = trainer.train()
    if result.stopped_by:
        if first:
            print(
                f"te-dist train: stopped by {name_of(result.stopped_by)} after step {result.step}, which is saved in "
                f"{result.run_dir}; the same command goes on from there",
                flush=True,
            )
        return 128 + result.stopped_by
    if first and trainer.config.report:
        from te_dist.launch.report import write_report

        result.report = write_report([result.run_dir])
    if first:
        print(f"te-dist train: done, {trainer.summary()}")
        if result.report is not None:
            print(f"report: {result.report}")
    return 0


if __name__ == "__main__":
    runtime.leave(main())

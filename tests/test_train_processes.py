"""te-dist train as processes: Ctrl-C, SIGTERM, a killed rank, and torchrun's restart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from train_cases import children, finish, losses, start, wait_for_step

from te_dist.launch import checkpoint, ranks, runtime, train
from te_dist.launch.config import TrainConfig
from te_dist.launch.metrics import read_metrics


def whole_checkpoints(run_dir: Path) -> list[int]:
    world = runtime.start("cpu", 60)
    steps = []
    for path in sorted((run_dir / "checkpoints").glob("step-*")):
        found, _ = checkpoint.find(run_dir, str(path), world)  # raises if it is not whole
        assert found is not None
        steps.append(found.progress.step)
    return steps


def test_ctrl_c_saves_once_and_says_so(tmp_path: Path) -> None:
    process = start(tmp_path, steps=5000)
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    code, out, errors = finish(process)
    assert code == 128 + signal.SIGINT, (out, errors)
    last = out.strip().splitlines()[-1]
    (step,) = whole_checkpoints(tmp_path)
    assert last == (
        f"te-dist train: stopped by Ctrl-C after step {step}, which is saved in {tmp_path}; the same command goes on "
        f"from there"
    )
    assert "Traceback" not in out + errors
    saves = [e for e in read_metrics(tmp_path) if e["event"] == "checkpoint"]
    assert len(saves) == 1 and max(losses(tmp_path)) == step
    code, out, _ = finish(start(tmp_path, steps=step + 2))
    assert code == 0 and f"(step {step})" in out and max(losses(tmp_path)) == step + 2


def test_ctrl_c_with_ranks_of_its_own_saves_and_says_only_that(tmp_path: Path) -> None:
    process = start(tmp_path, ranks=2, torchrun=False, steps=5000, tp=2, progress="none")
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGINT)
    code, out, errors = finish(process)
    assert code == 128 + signal.SIGINT and errors == "", (out, errors)
    (step,) = whole_checkpoints(tmp_path)
    last = out.strip().splitlines()[-1]
    assert last.startswith(f"te-dist train: stopped by Ctrl-C after step {step}, which is saved in {tmp_path}")


def test_sigterm_to_torchrun_saves_on_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, ranks=2, steps=5000, tp=2, sp=True, recipe="fp8_current")
    wait_for_step(tmp_path, 3, process)
    process.send_signal(signal.SIGTERM)
    code, out, errors = finish(process)
    assert code != 0
    (step,) = whole_checkpoints(tmp_path)
    assert f"te-dist train: stopped by SIGTERM after step {step}" in out, (out, errors)
    assert not list((tmp_path / "checkpoints").glob(".partial*"))


def ranks_of(launcher: int) -> list[int]:
    return [pid for pid in children(launcher) if b"te_dist.launch.train" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_ends_the_job_with_the_cause(tmp_path: Path) -> None:
    process = start(tmp_path, ranks=2, steps=5000, tp=2)
    wait_for_step(tmp_path, 3, process)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    begun = time.monotonic()
    code, out, errors = finish(process)
    assert code != 0 and time.monotonic() - begun < TrainConfig().timeout / 2, "the other one did not wait for it"
    assert "SIGKILL" in errors or "Signal 9" in errors, (out, errors)
    assert "transport.RankFailed" not in errors, "the rank that is left says it in a line"


def test_a_killed_rank_of_its_own_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What the launcher says of a rank that could not say anything; one that could is not repeated."""
    killed = ProcessFailure(local_rank=1, pid=1, exitcode=-signal.SIGKILL, error_file="<N/A>")
    assert ranks._blame(ChildFailedError("te-dist", {1: killed})) == 128 + signal.SIGKILL
    assert capsys.readouterr().err == "te-dist: rank 1 was ended by SIGKILL, and with it the job\n"
    refused = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file="<N/A>")
    assert ranks._blame(ChildFailedError("te-dist", {0: refused})) == 2
    assert capsys.readouterr().err == ""


def test_torchrun_restarts_a_killed_rank_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    process = start(tmp_path, ranks=2, restarts=1, steps=20, tp=2, checkpoint_every=5)
    wait_for_step(tmp_path, 7, process)
    os.kill(ranks_of(process.pid)[0], signal.SIGKILL)
    code, out, errors = finish(process)
    assert code == 0, f"{out}\n{errors}"
    resumed = [e["step"] for e in read_metrics(tmp_path) if e["event"] == "resume"]
    assert len(resumed) == 1 and resumed[0] >= 5 and resumed[0] % 5 == 0
    assert list(losses(tmp_path)) == list(range(1, 21)) and "te-dist train: done, step 20" in out
    assert whole_checkpoints(tmp_path)[-1] == 20


_LATE = """
import atexit, sys, time
interval = sys.getswitchinterval()

@atexit.register
def until_gloo_lets_go():  # the last thing before Python ends: then gloo's thread has begun to free its tensor
    sys.setswitchinterval(1000)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass
    sys.setswitchinterval(interval)
    print("left", flush=True)

import torch
import torch.distributed as dist
from te_dist.launch import runtime
world = runtime.start("cpu", 60)
world.barrier()
dist.all_reduce(torch.ones(50_000_000), async_op=True)  # nobody but gloo has it
runtime.leave(int(sys.argv[1]))
"""


def test_ranks_whose_gloo_still_holds_tensors_end_with_their_exit_codes() -> None:
    """Without ``leave`` these processes end by SIGABRT, as a rank of a whole run did once."""
    codes = [0, 3]
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        where["MASTER_PORT"] = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _LATE, str(code)],
            env=os.environ | where | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, code in enumerate(codes)
    ]
    ended = [finish(process) for process in processes]
    assert [code for code, _, _ in ended] == codes, ended
    assert all(out == "left\n" for _, out, _ in ended), ended


_LAST_WORDS = """
import threading, time
from te_dist.launch import runtime
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread's"))).start()
print("last words")
runtime.leave(0)
"""


@pytest.mark.parametrize("world", ["1", "2"])
def test_what_a_rank_says_last_is_written_or_its_exit_code_says_that_it_is_not(tmp_path: Path, world: str) -> None:
    said, full = tmp_path / "said", Path("/dev/full")
    # Unbuffered, nothing would be left to write.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    environment |= {"RANK": "0", "WORLD_SIZE": world}
    for to, code in [(said, 0)] + [(full, 120)] * full.exists():
        with to.open("w") as out:
            ended = subprocess.run(
                [sys.executable, "-c", _LAST_WORDS], env=environment, stdout=out, stderr=subprocess.PIPE, text=True
            )
        assert ended.returncode == code, ended.stderr
        assert ("No space left on device" in ended.stderr) == (to is full)
    assert said.read_text() == "last words\na thread's\n"


def test_a_mistake_is_said_once_and_before_training(tmp_path: Path) -> None:
    code, out, errors = finish(start(tmp_path / "run", ranks=2, data=str(tmp_path / "nothing.txt")))
    assert code != 0
    assert errors.count("te-dist train: error: data expects an existing file or folder but got") == 1
    assert "step " not in out and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "3", "--tp", "2"], "tp 2 does not divide the 3 ranks"),
        (["--nproc-per-node", "two"], "--nproc-per-node expects a whole number but got 'two'"),
        (["--nproc-per-node", "0"], "at least 1 rank"),
        (["--nproc-per-nod", "2"], "did you mean --nproc-per-node?"),
        (["--max-restarts", "2"], "--max-restarts expects --nproc-per-node beside it"),
    ],
)
def test_wrong_ranks_are_refused_before_any_is_started(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_rank_of_torchrun_starts_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    assert train.main(["--nproc-per-node", "2"]) == 2
    assert "is a rank of torchrun already" in capsys.readouterr().err


def test_an_error_of_one_rank_is_said_by_that_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first rank speaks at once; another one waits to be ended, and then says what only it can know."""
    waited: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waited.append)
    for rank, said in (("0", "error: no such file"), ("3", "error on rank 3: no such file")):
        monkeypatch.setenv("RANK", rank)
        assert train._refuse("no such file", 2) == 2
        assert capsys.readouterr().err.strip() == f"te-dist train: {said}"
    assert waited == [train.PATIENCE]
    assert train._refuse("interrupted", train.INTERRUPTED) == train.INTERRUPTED
    assert not capsys.readouterr().err and len(waited) == 1, "Ctrl-C reaches all of them"

"""Saving, loading and resuming sharded models: plain tensors, other numbers of ranks, other recipes, a killed save."""

from __future__ import annotations

import datetime
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_cases import MAIN, RECIPES, assert_same, batches, build, full, full_state, make, mesh_of, train
from patience import HUNG
from ranks import RankPool, processes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

import te_dist
from te_dist.parallel import (
    fully_shard,
    latest_checkpoint,
    load_checkpoint,
    materialize,
    parallelize,
    save_checkpoint,
)
from te_dist.parallel.fsdp import checkpoint as checkpoint_file

Pools = Callable[[int], RankPool]


class Net(nn.Module):
    """Blocks that tensor parallelism can take: column, then row."""

    def __init__(self, recipe: Any, device: str) -> None:
        super().__init__()
        self.up = te_dist.Linear(64, 256, recipe=recipe, device=device)
        self.down = te_dist.Linear(256, 64, recipe=recipe, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net(recipe: str | None, device: str, dp: Any = None, tp: Any = None, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(*[Net(RECIPES[recipe] if recipe else None, device) for _ in range(2)])
    if tp is not None:
        parallelize(model, tp, {"*.up": "column", "*.down": "row"})
    if dp is not None:
        for block in model:
            fully_shard(block, mesh=dp)
        fully_shard(model, mesh=dp)
    return model


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def assert_plain(state: dict[str, Any]) -> None:
    for name, value in state.items():
        inner = value._local_tensor if isinstance(value, DTensor) else value
        assert type(inner) is Tensor, (name, type(inner))
        assert "_extra_state" not in name


# ------------------------------------------------------------------------------------------------- save at 4
def save_at_four(rank: int, world: int, device: str, folder: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(6, world, device, width=64)
    for recipe in MAIN:
        model = net(recipe, device, mesh)
        optimizer = adamw(model)
        train(model, data[:2], rank, optimizer=optimizer)
        assert_plain(model.state_dict())
        assert_plain(get_model_state_dict(model))
        extra = {"data": torch.tensor([2])}
        save_checkpoint(f"{folder}/{recipe}", 2, model, optimizer, extra)
        pending = save_checkpoint(f"{folder}/{recipe}_async", 2, model, optimizer, extra, asynchronous=True)
        before = {n: full(p).clone() for n, p in model.named_parameters()}
        train(model, data[2:3], rank, optimizer=optimizer)  # while it is being written
        assert pending.wait().name == "step_2"
        # Uninterrupted, to compare resumed runs with: the optimizer is that of step 2 again.
        load_checkpoint(f"{folder}/{recipe}", model, optimizer)
        assert all(torch.equal(full(p), before[n]) for n, p in model.named_parameters())
        losses = train(model, data, rank, optimizer=optimizer, first_step=2)
        whole = {name: value.cpu() for name, value in full_state(model).items()}
        if rank == 0:
            assert_plain(whole)
            torch.save({"saved": {n: v.cpu() for n, v in before.items()}, "end": whole}, f"{folder}/{recipe}.pt")
        # Never stopped at all: the same losses from the start.
        straight = net(recipe, device, mesh)
        everything = train(straight, data, rank, optimizer=adamw(straight))
        assert everything[2:] == losses, recipe
        assert_same(straight, model, what=f"{recipe}: resumed and not")


def resume_at_four(rank: int, world: int, device: str, folder: str) -> None:
    """In a process that knows nothing of the run: bit-exact."""
    mesh = mesh_of(device, world)
    data = batches(6, world, device, width=64)
    for recipe in MAIN:
        ends = torch.load(f"{folder}/{recipe}.pt", weights_only=True)["end"]
        for name in (recipe, f"{recipe}_async"):
            model = net(recipe, device, mesh, seed=9)
            optimizer, extra = adamw(model), {"data": torch.tensor([0])}
            assert load_checkpoint(f"{folder}/{name}", model, optimizer, extra) == 2
            assert extra["data"].item() == 2
            train(model, data, rank, optimizer=optimizer, first_step=2)
            for n, p in model.named_parameters():
                assert torch.equal(full(p).cpu(), ends[n]), (name, n)


def load_elsewhere(rank: int, world: int, device: str, folder: str, shape: tuple[int, ...]) -> None:
    """Other numbers of ranks, tensor parallelism, another recipe, none at all; each value as it was saved."""
    mesh = mesh_of(device, *shape, names=("dp", "tp")[: len(shape)])
    dp, tp = (mesh, None) if len(shape) == 1 else (mesh["dp"], mesh["tp"])
    for recipe in MAIN:
        saved = torch.load(f"{folder}/{recipe}.pt", weights_only=True)["saved"]
        other = "mxfp8" if recipe != "mxfp8" else "delayed"
        turns = [(recipe, recipe), (f"{recipe}_async", None if recipe == "current" else other)]
        for name, target in turns:
            model = net(target, device, dp, tp, seed=9)
            optimizer = adamw(model)
            assert load_checkpoint(f"{folder}/{name}", model, optimizer) == 2
            for n, p in model.named_parameters():
                assert torch.equal(full(p).cpu(), saved[n]), (name, target, n)
            states = list(optimizer.state.values())
            assert states and all(float(s["step"]) == 2 for s in states)
            model(torch.ones(4, 64, device=device)).sum().backward()
            optimizer.step()


def test_save_at_four_load_anywhere(rank_pools: Pools, device: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    rank_pools(4).run(save_at_four, device, folder)
    rank_pools(4).run(resume_at_four, device, folder)
    rank_pools(4).run(load_elsewhere, device, folder, (2, 2))
    rank_pools(2).run(load_elsewhere, device, folder, (2,))
    for recipe in MAIN:  # one process, and a model that was never sharded
        saved = torch.load(f"{folder}/{recipe}.pt", weights_only=True)["saved"]
        model = net(recipe, device, seed=9)
        assert load_checkpoint(f"{folder}/{recipe}", model, adamw(model)) == 2
        for n, p in model.named_parameters():
            assert torch.equal(p.detach().cpu(), saved[n]), (recipe, n)


# ------------------------------------------------------------------------------------------------- interrupted
def interrupted(rank: int, world: int, folder: str) -> None:
    mesh = mesh_of("cpu", world)
    model = build("current", "cpu", mesh)
    optimizer = adamw(model)
    data = batches(3, world, "cpu")
    train(model, data[:1], rank, optimizer=optimizer)
    save_checkpoint(folder, 1, model, optimizer)
    kept = {n: full(p).clone() for n, p in model.named_parameters()}
    train(model, data[1:2], rank, optimizer=optimizer)
    # Killed half way: some files are there, the metadata and the name are not.
    real = checkpoint_file._publish
    checkpoint_file._publish = lambda path, group: (_ for _ in ()).throw(KeyboardInterrupt())  # type: ignore[assignment]
    try:
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(folder, 2, model, optimizer)
    finally:
        checkpoint_file._publish = real
    dist.barrier()
    if rank == 0:
        os.remove(Path(folder) / "step_2.partial" / ".metadata")
    dist.barrier()
    assert latest_checkpoint(folder) == 1
    other = build("current", "cpu", mesh, seed=3)
    assert load_checkpoint(folder, other, adamw(other)) == 1
    for n, p in other.named_parameters():
        assert torch.equal(full(p), kept[n]), n
    # The next save of that step clears away what is left, and saving a step again replaces it.
    for _ in range(2):
        save_checkpoint(folder, 2, model, optimizer)
        assert sorted(os.listdir(folder)) == ["step_1", "step_2"]
    assert load_checkpoint(folder, other, adamw(other)) == 2
    assert_same(model, other)
    assert load_checkpoint(folder, other, adamw(other), step=1) == 1
    with pytest.raises(FileNotFoundError, match="step 7"):
        load_checkpoint(folder, other, step=7)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        load_checkpoint(folder + "/nowhere", other)
    with pytest.raises(ValueError, match="step"):
        save_checkpoint(folder, -1, model)


def test_interrupted_save(rank_pools: Pools, tmp_path: Path) -> None:
    rank_pools(2).run(interrupted, str(tmp_path))


def check_replaced(folder: Path) -> None:
    """Killed between the two renames of a step that is saved again: the old one is found where it has stepped aside."""
    model = make("current", "cpu")
    for step in (1, 2):
        save_checkpoint(folder, step, model)
    os.rename(folder / "step_2", folder / "step_2.replaced")
    assert latest_checkpoint(folder) == 2
    other = make("current", "cpu", seed=3)
    assert load_checkpoint(folder, other) == 2
    assert_same(model, other)
    save_checkpoint(folder, 2, other)
    assert sorted(os.listdir(folder)) == ["step_1", "step_2"]


def test_killed_while_a_step_is_replaced(tmp_path: Path) -> None:
    check_replaced(tmp_path)


def write_until_killed(rank: int, world: int, folder: str, asynchronous: bool) -> None:
    """A rank of a run of its own. The last rank stops in the middle of writing step 2, and waits there to be killed."""
    from torch.distributed.checkpoint import filesystem

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=HUNG)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    model = build("mxfp8", "cpu", mesh_of("cpu", world))
    optimizer = adamw(model)
    data = batches(2, world, "cpu")
    train(model, data[:1], rank, optimizer=optimizer)
    save_checkpoint(f"{folder}/run", 1, model, optimizer)
    kept = {name: full(p) for name, p in model.named_parameters()}
    if rank == 0:
        torch.save(kept, f"{folder}/kept.pt")
    train(model, data[1:], rank, optimizer=optimizer)
    real, written = filesystem._write_item, []

    def write(*args: Any, **kwargs: Any) -> Any:
        written.append(real(*args, **kwargs))
        if len(written) == 4:
            Path(f"{folder}/in_the_middle").touch()
            time.sleep(9999)
        return written[-1]

    if rank == world - 1:
        filesystem._write_item = write
    save_checkpoint(f"{folder}/run", 2, model, optimizer, asynchronous=asynchronous).wait()


def test_a_rank_killed_while_it_writes(tmp_path: Path) -> None:
    """kill -9 of a process that has written a part of its file: the other rank fails, and step 1 loads."""
    context = processes()
    runs: dict[Path, list[Any]] = {}
    for asynchronous in (False, True):  # side by side
        folder = tmp_path / f"{asynchronous}"
        folder.mkdir()
        runs[folder] = [
            context.Process(target=write_until_killed, args=(rank, 2, str(folder), asynchronous), daemon=True)
            for rank in range(2)
        ]
        for process in runs[folder]:
            process.start()
    for folder, started in runs.items():
        deadline = time.monotonic() + HUNG
        while not (folder / "in_the_middle").exists():
            assert all(p.is_alive() for p in started) and time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(started[1].pid, signal.SIGKILL)
        for process in started:
            process.join(HUNG / 2)
        assert started[1].exitcode == -signal.SIGKILL
        assert started[0].exitcode == 1, "the other rank does not wait for it"
        run = folder / "run"
        left = os.listdir(run / "step_2.partial")
        assert any(name.endswith(".distcp") for name in left) and ".metadata" not in left
        assert latest_checkpoint(run) == 1
        kept = torch.load(folder / "kept.pt", weights_only=True)
        model = make("mxfp8", "cpu", seed=3)
        optimizer = adamw(model)
        assert load_checkpoint(run, model, optimizer) == 1
        for name, p in model.named_parameters():
            assert torch.equal(p, kept[name]), name
        assert all(float(state["step"]) == 1 for state in optimizer.state.values())
        save_checkpoint(run, 2, model, optimizer)
        assert sorted(os.listdir(run)) == ["step_1", "step_2"] and latest_checkpoint(run) == 2


# ------------------------------------------------------------------------------------------------- state dicts
def state_dicts(rank: int, world: int, device: str, folder: str) -> None:
    """torch's own functions: full and sharded, broadcast from rank 0, assign, weights_only, while unsharded."""
    mesh = mesh_of(device, world)
    for recipe in MAIN:
        model = build(recipe, device, mesh)
        single = make(recipe, device)
        model(torch.ones(4, cases.WIDTH, device=device, requires_grad=True)).sum().backward()
        whole = full_state(model)
        names = {n for n in whole if not n.endswith(("fp8_scale", "fp8_amax_history"))}
        assert names == {n for n, _ in nn.Module.named_parameters(single)}
        for name in names if rank == 0 else ():
            assert torch.equal(whole[name].to(device), dict(single.named_parameters())[name]), name
        torch.save(model.state_dict(), f"{folder}/{rank}.pt")
        assert torch.load(f"{folder}/{rank}.pt", weights_only=True).keys() == model.state_dict().keys()
        other = build(recipe, device, mesh, seed=5)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        given = {n: v for n, v in whole.items() if n in names} if rank == 0 else {}
        if recipe != "delayed":
            set_model_state_dict(other, given, options=options)
            assert_same(model, other, what=recipe)
        third = build(recipe, device, mesh, seed=6)
        third.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
        assert_same(model, third, what=f"{recipe}, assigned")
        # What was assigned is gathered quantized too.
        third.blocks[0].unshard()
        cases.gathered(third.blocks[0].up)
        third.blocks[0].reshard()
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{recipe}")
        if rank == 0:
            shutil.rmtree(f"{folder}/{recipe}")


def test_state_dicts(rank_pools: Pools, device: str, tmp_path: Path) -> None:
    rank_pools(2).run(state_dicts, device, str(tmp_path))


# ------------------------------------------------------------------------------------------------- meta device
def from_meta(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, 2, 2, names=("dp", "tp"))
    for recipe in ("current", "delayed", None):
        for tp in (None, mesh["tp"]):
            expected = net(recipe, device, seed=11)
            model = net(recipe, "meta", seed=0)
            if tp is not None:
                parallelize(model, tp, {"*.up": "column", "*.down": "row"})
            for block in model:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            torch.manual_seed(11)
            materialize(model)
            assert_same(expected, model, what=f"{recipe} {tp is not None}")
            x = torch.randn(8, 64, device=device, requires_grad=True)
            model(x).sum().backward()
            if tp is None:
                assert torch.equal(model(x), expected(x)) or recipe == "delayed"

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, device="meta"))

    with pytest.raises(ValueError, match=r"'bare'.*Bare"):
        materialize(nn.ModuleDict({"bare": Bare()}), device)
    with pytest.raises(ValueError, match="device"):
        materialize(nn.Sequential(nn.Linear(2, 2, device="meta")))


def test_meta_device(rank_pools: Pools, device: str) -> None:
    rank_pools(4).run(from_meta, device)


# ------------------------------------------------------------------------------------------------- the example
def example(rank: int, world: int, device: str, folder: str) -> None:
    """launch/fsdp.py, without torchrun: tensor parallelism x FSDP2 from the meta device, resumed bit for bit."""
    from te_dist.launch import fsdp as launched

    mesh = mesh_of(device, 2, 2, names=("dp", "tp"))
    dp = mesh["dp"].get_local_rank()
    for recipe in ("nvfp4", "delayed"):
        model = launched.build(launched.RECIPES[recipe], mesh)
        optimizer = adamw(model)
        losses = launched.train(model, optimizer, 0, 2, dp, device)
        pending = save_checkpoint(f"{folder}/{recipe}", 2, model, optimizer, asynchronous=True)
        losses += launched.train(model, optimizer, 2, 4, dp, device)
        pending.wait()
        model = launched.build(launched.RECIPES[recipe], mesh)
        optimizer = adamw(model)
        step = load_checkpoint(f"{folder}/{recipe}", model, optimizer)
        assert launched.train(model, optimizer, step, 4, dp, device) == losses[2:], recipe


def test_example(rank_pools: Pools, device: str, tmp_path: Path) -> None:
    rank_pools(4).run(example, device, str(tmp_path))

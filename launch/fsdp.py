"""A small model trained with FSDP2 and quantized gathers, saved, and resumed:

    torchrun --nproc-per-node 2 -m te_dist.launch.fsdp [--recipe mxfp8] [--steps 12] [--tp 1] [--folder fsdp_output]
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_dist
from te_dist import recipe
from te_dist.launch import runtime
from te_dist.parallel import (
    all_gather_report,
    comm_report,
    fully_shard,
    load_checkpoint,
    materialize,
    parallelize,
    save_checkpoint,
)

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
WIDTH, HIDDEN, BLOCKS, ROWS = 256, 512, 4, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def build(chosen: recipe.Recipe, mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(*[Block() for _ in range(BLOCKS)])
    te_dist.convert(model, chosen, min_size=0, verbose=False)
    dp, tp = mesh["dp"], mesh["tp"]
    if tp.size() > 1:
        parallelize(model, tp, {"*.up": "column", "*.down": "row", "*.norm": "replicate"})
    for block in model:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    torch.manual_seed(0)
    return materialize(model)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, dp: int, device: str
) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + dp)
        x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
        torch.manual_seed(step)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="mxfp8")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--folder", default="fsdp_output")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if dist.get_world_size() % args.tp:
        raise SystemExit(f"--tp {args.tp} does not divide {dist.get_world_size()} ranks")
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    dp, chatty = mesh["dp"].get_local_rank(), dist.get_rank() == 0
    half = args.steps // 2

    model = build(RECIPES[args.recipe], mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if chatty:
        print(all_gather_report(model))
    with comm_report() as report:
        losses = train(model, optimizer, 0, 1, dp, device)
    if chatty:
        print(report)
    losses += train(model, optimizer, 1, half, dp, device)
    pending = save_checkpoint(args.folder, half, model, optimizer, asynchronous=True)
    losses += train(model, optimizer, half, args.steps, dp, device)
    pending.wait()

    resumed = build(RECIPES[args.recipe], mesh)
    optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
    step = load_checkpoint(args.folder, resumed, optimizer)
    again = train(resumed, optimizer, step, args.steps, dp, device)
    if again != losses[half:]:
        raise SystemExit(f"rank {dist.get_rank()}: resumed losses {again} are not {losses[half:]}")
    if chatty:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; resumed at step {step}: the same losses, bit for bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    runtime.leave(0)

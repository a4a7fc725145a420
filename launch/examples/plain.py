"""te_dist without its command line: torchrun --nproc-per-node 4 launch/examples/plain.py (TP x FSDP2)."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import te_dist
from te_dist.parallel import comm_report, fully_shard, parallelize

dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
tp = 2 if dist.get_world_size() % 2 == 0 else 1
mesh = init_device_mesh(device, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))

torch.manual_seed(0)
blocks = [
    nn.Sequential(te_dist.LayerNormLinear(256, 512, bias=False), nn.GELU(), te_dist.Linear(512, 256, bias=False))
    for _ in range(3)
]
model = nn.Sequential(*blocks).to(device)
te_dist.convert(model, te_dist.recipe.Float8CurrentScaling(), min_size=0, verbose=dist.get_rank() == 0)
parallelize(model, mesh["tp"], {"*.0": "column", "*.2": "row"}, sequence_parallel=True)
for block in model:
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

torch.manual_seed(1 + dist.get_rank())  # with sequence parallelism every rank has rows of its own
x = torch.randn(64, 256, device=device)
for step in range(20):
    with comm_report(verbose=step == 1 and dist.get_rank() == 0):
        loss = (model(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}")
dist.destroy_process_group()

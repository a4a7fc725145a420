"""FSDP2 with quantized gathers against bf16 FSDP2: several gloo ranks with CUDA tensors on one GPU.

    python benchmarks/fsdp.py [--json PATH] [--ranks 2] [--width 4096] [--ffn 14336] [--blocks 4]

bytes      that a rank sends for the weights in one forward + backward, as comm_report counts them, and of bf16's
memory     peak of a training step above what parameters, gradients and optimizer state take, and of bf16's
hooks      device time of what happens to a weight before and behind the gather (quantize; scales into place), in
           microseconds for one block, and the bytes a second that the pre hook reads
amax       device time of the reduction of all weights' amaxes in front of a forward, its all-reduce apart

Times of the collectives themselves are left out: gloo copies through the host, so they say nothing about a network.
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import machine, median_us, save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import te_dist
from te_dist import recipe
from te_dist.parallel import all_gather_report, comm_report, fully_shard
from te_dist.parallel.fsdp.codec import WeightCodec
from te_dist.parallel.fsdp.state import sharded_layers

DEFAULT = Path(__file__).parent / "results" / "h200" / "fsdp.json"
RECIPES: dict[str, recipe.Recipe | None] = {
    "bf16": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8 32x32": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


class Block(nn.Module):
    def __init__(self, width: int, ffn: int, chosen: recipe.Recipe | None) -> None:
        super().__init__()
        options: Any = {"bias": False, "recipe": chosen, "device": "cuda"}
        self.up = te_dist.Linear(width, ffn, **options)
        self.down = te_dist.Linear(ffn, width, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def build(chosen: recipe.Recipe | None, args: argparse.Namespace, mesh: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(args.width, args.ffn, chosen) for _ in range(args.blocks)])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x.clone().requires_grad_()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(name: str, args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    model = build(RECIPES[name], args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(args.tokens, args.width, device="cuda", dtype=torch.bfloat16)
    step(model, optimizer, x)
    step(model, optimizer, x)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with comm_report() as report:
        step(model, optimizer, x)
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_bytes": torch.cuda.max_memory_allocated() - base}
    gathers = [c for c in report.select(kind="all_gather") if c.payload.startswith("weight")]
    row["gathered_bytes"] = sum(c.bytes for c in gathers)
    row["gather_dtypes"] = sorted({c.dtype for c in gathers})
    row["amax_reductions"] = len(report.select(kind="all_reduce", payload="amax"))
    row["documented_bytes"] = all_gather_report(model).bytes
    row |= hooks(model)
    del model, optimizer
    torch.cuda.empty_cache()
    return row


def hooks(model: nn.Module) -> dict[str, float]:
    """Device time of one block's weights, with the ranks taking turns so that they do not share the GPU."""
    layers = sharded_layers(model)[:2]
    if not layers or layers[0].decisions(layers[0].layer.recipe)[0].codec is None:
        return {}
    result: dict[str, float] = {}
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            result = _times([w for owner in layers for w in owner.weights])
        dist.barrier()
    return result


def _times(weights: list[Any]) -> dict[str, float]:
    work: list[tuple[WeightCodec, Tensor, Tensor | None, Tensor | None, Any, list[Tensor]]] = []
    for weight in weights:
        codec = weight.owner.decisions(weight.owner.layer.recipe)[weight.owner.weights.index(weight)].codec
        local = weight.local()
        reduced = codec.contribution(local) if codec.amax_count else None
        scale = torch.ones(1, device="cuda") if codec.delayed else None
        planes = list(codec.planes)[:1]
        storage = codec.storage(torch.bfloat16, local.device)
        for buffer in codec.copied(planes):
            tensor = getattr(storage, buffer)
            tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        gathered = [
            torch.zeros(size * codec.shards.ranks, dtype=torch.uint8, device="cuda")
            for size in codec.wire_sizes(planes)
        ]
        work.append((codec, local, reduced, scale, (storage, planes), gathered))

    def pre() -> None:
        for codec, local, reduced, scale, (_, planes), _gathered in work:
            codec.encode(local, planes, reduced, scale)

    def post() -> None:
        for codec, _, _, _, (storage, planes), gathered in work:
            codec.decode(storage, planes, gathered)

    def contributions() -> None:
        for codec, local, *_ in work:
            if codec.amax_count:
                codec.contribution(local)

    read = sum(local.numel() * local.element_size() for _, local, *_ in work)
    pre_us = median_us(pre)
    return {
        "pre_us": pre_us,
        "pre_gbps": read / pre_us / 1e3,
        "post_us": median_us(post),
        "amax_us": median_us(contributions),
    }


def rank_main(rank: int, args: argparse.Namespace, store: str, results: Any) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    mesh = init_device_mesh("cuda", (args.ranks,), mesh_dim_names=("shard",))
    rows = {name: measure(name, args, mesh) for name in RECIPES}
    if rank == 0:
        results.put(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _answer(results: Any, workers: list[Any]) -> dict[str, dict[str, Any]]:
    """What rank 0 has measured; the end of the program if a rank fails."""
    while True:
        try:
            return json.loads(results.get(timeout=1))
        except queue.Empty:
            failed = [rank for rank, worker in enumerate(workers) if worker.exitcode]
            if failed:
                for worker in workers:
                    worker.kill()
                raise SystemExit(f"benchmarks/fsdp.py: rank {failed[0]} failed") from None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/fsdp.py needs a CUDA device")
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            context.Process(target=rank_main, args=(r, args, f"{folder}/store", results)) for r in range(args.ranks)
        ]
        for worker in workers:
            worker.start()
        rows = _answer(results, workers)
        for worker in workers:
            worker.join()
    base = rows["bf16"]
    titles = ("pre us", "post us", "amax us")
    columns = " ".join(f"{title:>8}" for title in titles)
    print(f"{'recipe':<12} {'bytes':>15} {'of bf16':>8} {'peak':>15} {'of bf16':>8} {columns}")
    for name, row in rows.items():
        row["gathered_of_bf16"] = row["gathered_bytes"] / base["gathered_bytes"]
        row["peak_of_bf16"] = row["peak_bytes"] / base["peak_bytes"]
        times = [f"{row[key]:8.1f}" if key in row else " " * 8 for key in ("pre_us", "post_us", "amax_us")]
        print(
            f"{name:<12} {row['gathered_bytes']:>15,} {row['gathered_of_bf16']:>8.3f} {row['peak_bytes']:>15,} "
            f"{row['peak_of_bf16']:>8.3f} {' '.join(times)}"
        )
    sizes = {"ranks": args.ranks, "width": args.width, "ffn": args.ffn, "blocks": args.blocks, "tokens": args.tokens}
    save(args.json, {"machine": machine(), "sizes": sizes, "recipes": rows})


if __name__ == "__main__":
    main()

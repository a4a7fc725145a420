"""A small Llama with tensor and sequence parallelism, in a few lines.

``torchrun --nproc-per-node 2 -m te_dist.launch.tensor_parallel --steps 30``
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import te_dist
from te_dist import recipe
from te_dist.launch import runtime
from te_dist.launch.corpus import builtin_corpus
from te_dist.launch.data import TokenData
from te_dist.parallel import comm_report, parallelize, seed_streams, vocab_parallel_cross_entropy

RECIPES = {
    "bf16": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=16),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
PLAN = {"embed": "row", "layers.*": "column", "norm": "sequence", "head": "column"}
BATCH, LENGTH = 8, 64


class Llama(nn.Module):
    """Tokens [length, batch] -> logits [length, batch, vocabulary], this rank's part of each where it is spread."""

    def __init__(self, chosen: recipe.Recipe | None, hidden: int = 128, layers: int = 2, vocabulary: int = 128) -> None:
        super().__init__()
        dtype = torch.bfloat16
        self.embed = nn.Embedding(vocabulary, hidden, dtype=dtype)
        self.layers = nn.ModuleList(
            te_dist.TransformerLayer(
                hidden, 2 * hidden, 4, hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", bias=False,
                activation="swiglu", params_dtype=dtype, recipe=chosen,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.norm = nn.RMSNorm(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
        rotary = te_dist.RotaryPositionEmbedding(hidden // 4)
        self.register_buffer("angles", rotary(LENGTH), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        return self.head(self.norm(x))


def batches(steps: int, device: torch.device) -> list[Tensor]:
    """[BATCH, LENGTH + 1] tokens below 128 for each step, the same on all ranks."""
    text = torch.frombuffer(bytearray(builtin_corpus(1 << 16)), dtype=torch.uint8)
    data = TokenData(text, LENGTH, "the corpus")
    return [data.batch(step * BATCH, BATCH, 0).to(device) for step in range(steps)]


def train(chosen: recipe.Recipe | None, data: list[Tensor], show: Callable[[int, float], None]) -> tuple[str, float]:
    """Train over all ranks of the default group; the comm report of the last step, and the last loss."""
    device = data[0].device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))["tp"]
    seed_streams(0, mesh)
    model = Llama(chosen).to(device)
    parallelize(model, mesh, PLAN, sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    loss = torch.zeros(())
    for step, batch in enumerate(data):
        tokens = batch.t().contiguous()  # [length + 1, batch]: rows, which are spread, come first
        with comm_report() as report:
            loss = vocab_parallel_cross_entropy(model(tokens[:-1]), tokens[1:], mesh)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        show(step, loss.item())
    return str(report), loss.item()


def main(argv: list[str] | None = None) -> int:

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="mxfp8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        print("start it with: torchrun --nproc-per-node 2 -m te_dist.launch.tensor_parallel", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    shared = device.type == "cuda" and torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(0 if shared else int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("gloo" if device.type == "cpu" or shared else "nccl")
    try:
        first = dist.get_rank() == 0

        def show(step: int, loss: float) -> None:
            if first and (step % 10 == 0 or step == options.steps - 1):
                print(f"  step {step:>4}  loss {loss:.3f}", flush=True)

        report, _ = train(RECIPES[options.recipe], batches(options.steps, device), show)
        if first:
            print(f"\n{report}")
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    runtime.leave(main())

"""A training script for accelerate: te_dist is the three marked lines.

accelerate launch --config_file launch/examples/single_gpu.yaml launch/examples/train_accelerate.py
TE_DIST_RECIPE=nvfp4 accelerate launch --config_file launch/examples/fsdp2.yaml launch/examples/train_accelerate.py
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from te_dist.launch.accelerate import TEDistAccelerator, TEDistPlugin  # 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    plugin = TEDistPlugin(recipe=None if "TE_DIST_RECIPE" in os.environ else "fp8_current")  # 2
    accelerator = TEDistAccelerator(te_dist_plugin=plugin)  # 3, in place of Accelerator()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 256, (8 * options.steps, 64))
    loader = torch.utils.data.DataLoader(tokens, batch_size=8)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(loader, 1):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}  loss {loss.item():.4f}")
    accelerator.save_state("accelerate_state")
    accelerator.end_training()


if __name__ == "__main__":
    main()

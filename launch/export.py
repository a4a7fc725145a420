"""``te-dist export RUN``: the newest whole checkpoint of a run as a model that transformers and vLLM load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch import Tensor

from te_dist import exporting
from te_dist.launch import checkpoint, runtime
from te_dist.launch.checkpoint import CheckpointError
from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.hugging_face import llama_config, llama_layers, llama_state
from te_dist.launch.layout import Layout
from te_dist.launch.llama import Llama
from te_dist.launch.models import BuiltModel, HuggingFaceLM, build_model
from te_dist.launch.options import read_config_file
from te_dist.launch.progress import size_text
from te_dist.launch.tokenizers import padded_vocab, tokenizer_from


def load(run: Path, resume: str = "auto") -> tuple[TrainConfig, BuiltModel, int]:
    """(its config, its model in this process and on the CPU, the step) of a run, however many ranks it had."""
    if not (run / "config.yaml").exists():
        raise ConfigError(f"{str(run)!r} is no folder of a run: it has no config.yaml")
    config = TrainConfig(**read_config_file(str(run / "config.yaml")))
    config.tp, config.sp, config.dp_shard, config.dp_replicate, config.overlap = 1, False, -1, 1, "off"
    config.device, config.compile = "cpu", False
    config.check()
    world = runtime.start("cpu", config.timeout)
    found, warnings = checkpoint.find(run, resume, world)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if found is None:
        raise CheckpointError(f"{str(run)!r} has no checkpoint")
    config.split_gate = bool(found.config.get("split_gate"))
    needed = padded_vocab(tokenizer_from(config.tokenizer).vocab_size)
    built = build_model(config, needed, Layout(0, 1, 1, 1, 1), world.device)
    checkpoint.load(found, world, built.model, None)
    return config, built, found.progress.step


def write(config: TrainConfig, built: BuiltModel, format: str, out: Path) -> dict[str, Tensor]:
    """A folder that ``AutoModelForCausalLM.from_pretrained`` reads."""
    if isinstance(built.model, HuggingFaceLM):
        return exporting.export(built.model.lm, format, out)
    assert isinstance(built.model, Llama)
    size = built.model.size
    state = llama_state(built.model.state_dict(), size)
    quantizers = {}
    if format in exporting.QUANTIZED:
        if not built.conversion.converted:
            raise ConfigError(f"format {format!r} expects a run with a recipe, but this one trained unquantized")
        names = [part for layer in built.conversion.converted for part in llama_layers(layer)]
        quantizers = {f"{name}.weight": exporting.QUANTIZED[format] for name in names}
    left_alone = [part for layer in built.conversion.skipped for part in llama_layers(layer)]
    tensors = exporting.encode(state, quantizers, format)
    exporting.save(out, tensors, llama_config(size, config.seq_len), format, left_alone)
    return tensors


def main(argv: list[str] | None = None) -> int:
    """Load, convert, write."""
    parser = argparse.ArgumentParser(prog="te-dist export", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    formats = (*exporting.HIGH_PRECISION, *exporting.QUANTIZED)
    parser.add_argument("--format", default="bf16", choices=formats, help="of the weights (default bf16)")
    parser.add_argument("--out", type=Path, help="the folder to write (default: RUN/export-FORMAT)")
    parser.add_argument("--checkpoint", default="auto", help="a checkpoint (default: the newest whole one)")
    options = parser.parse_args(argv)
    out = options.out or options.run / f"export-{options.format}"
    try:
        config, built, step = load(options.run, options.checkpoint)
        tensors = write(config, built, options.format, out)
    except (ConfigError, CheckpointError, OSError, ImportError) as error:
        print(f"te-dist export: error: {error}", file=sys.stderr)
        return 2
    size = size_text(sum(t.numel() * t.element_size() for t in tensors.values()))
    print(f"te-dist export: step {step} of {options.run} in {options.format}, {size}: {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""What a training run is told: every option once, with its type, default and sentence of help.

The same names are flags (``--seq-len 8192``), keys of a YAML file (``seq_len: 8192``) and fields of TrainConfig.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from te_dist.launch.presets import PRESETS, ModelSize
from te_dist.launch.recipes import patterns_from, short_label

DTYPES = ("float32", "bfloat16", "float16")


class ConfigError(ValueError):
    """A setting that cannot work; the message says which, what was given and what is needed."""


def option(default: Any, help: str, group: str, choices: tuple[Any, ...] | None = None) -> Any:
    metadata = {"help": help, "group": group, "choices": choices}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class TrainConfig:
    """One training run. ``check()`` fills what is derived and refuses what cannot work."""

    preset: str = option("1m", "size of the model", "model", tuple(PRESETS))
    layers: int | None = option(None, "number of blocks, instead of the preset's", "model")
    hidden: int | None = option(None, "width, instead of the preset's", "model")
    ffn: int | None = option(None, "inner width of the MLP, instead of the preset's", "model")
    heads: int | None = option(None, "attention heads, instead of the preset's", "model")
    kv_heads: int | None = option(None, "key and value heads, instead of the preset's", "model")
    vocab_size: int | None = option(None, "entries of the embedding; default: as the tokenizer needs", "model")
    rope_base: float | None = option(None, "base of the rotary frequencies, instead of the preset's", "model")
    tied_embeddings: bool | None = option(None, "head and embedding share their weight", "model")
    split_gate: bool | None = option(
        None,
        "hold the MLP's gate and up weights apart, as tensor parallelism does: then a checkpoint fits every tp; "
        "default: with tp, and where the checkpoint does",
        "model",
    )
    meta_init: bool | None = option(
        None, "build without memory, then give each rank its shard; default: over several ranks from 1e9 on", "model"
    )
    hf_config: str | None = option(
        None, "train this Hugging Face causal LM from its config.json (file or folder), not a Llama", "model"
    )

    data: str = option(
        "builtin", "text file, folder of text files, token file (.bin, .npy), or builtin: a generated corpus", "data"
    )
    eval_data: str | None = option(None, "as data, for evaluation; default: the last part of data", "data")
    eval_fraction: float = option(0.05, "part of data that is held out for evaluation", "data")
    tokenizer: str = option("bytes", "bytes, a tokenizer.json, or a folder for transformers.AutoTokenizer", "data")
    token_dtype: str = option("uint16", "what a .bin token file holds", "data", ("uint8", "uint16", "int32", "int64"))
    seq_len: int = option(256, "tokens of a sequence", "data")

    steps: int = option(100, "optimizer steps", "training")
    micro_batch: int = option(4, "sequences of one forward pass on each data-parallel rank", "training")
    microbatches: int = option(1, "forward passes whose gradients one step adds up", "training")
    seed: int = option(0, "of weights, data order and stochastic rounding", "training")
    optimizer: str = option("adamw", "what updates the weights", "training", ("adamw", "adam", "sgd"))
    lr: float = option(1e-3, "peak learning rate", "training")
    min_lr: float = option(0.1, "the schedule ends at this part of lr", "training")
    warmup: int = option(10, "steps until the learning rate is reached", "training")
    schedule: str = option("cosine", "how the learning rate falls", "training", ("cosine", "linear", "constant", "wsd"))
    weight_decay: float = option(0.1, "on matrices, embeddings excepted", "training")
    beta1: float = option(0.9, "AdamW's first moment, SGD's momentum", "training")
    beta2: float = option(0.95, "AdamW's second moment", "training")
    adam_eps: float = option(1e-8, "AdamW's epsilon", "training")
    clip: float = option(1.0, "largest norm of the gradient, 0 for none", "training")

    recipe: dict[str, str] = option(  # noqa: RUF009 (a field, as the others are)
        {"*": "bf16"},
        "bf16, fp8_current, fp8_delayed, fp8_block, mxfp8, nvfp4; PATTERN=RECIPE for layers by name (repeat it: the "
        "first pattern that matches counts); name:option=value,... for a recipe's options",
        "quantization",
    )
    first_last_layers_bf16: bool = option(False, "leave the first and the last block in high precision", "quantization")
    min_layer_size: int | None = option(
        None, "smallest weight, in elements, that is quantized; default: 2**20 on a GPU, 0 elsewhere", "quantization"
    )
    param_dtype: str = option("float32", "of the weights that the optimizer updates", "quantization", DTYPES)
    compute_dtype: str = option("bfloat16", "of activations, and of what is not quantized", "quantization", DTYPES)

    tp: int = option(1, "ranks of tensor parallelism", "parallelism")
    sp: bool = option(False, "sequence parallelism between the tensor-parallel layers", "parallelism")
    dp_shard: int = option(-1, "ranks that FSDP2 shards over; -1: all that are left", "parallelism")
    dp_replicate: int = option(1, "copies of that (HSDP)", "parallelism")
    quantized_all_gather: str = option(
        "auto", "gather FSDP2's weights as quantized bytes", "parallelism", ("auto", "on", "off")
    )
    reshard_after_forward: bool = option(
        True, "free FSDP2's gathered weights between forward and backward", "parallelism"
    )
    overlap: str = option(
        "off", "overlap tensor-parallel communication with the products", "parallelism", ("off", "auto", "require")
    )
    timeout: int = option(600, "seconds after which a collective that does not end is an error", "parallelism")

    device: str = option("auto", "cuda where there is one, else cpu", "execution", ("auto", "cpu", "cuda"))
    compile: bool = option(False, "torch.compile every block (fullgraph)", "execution")
    activation_checkpointing: str = option(
        "none", "recompute the activations of every block in backward", "execution", ("none", "full")
    )

    run_dir: str | None = option(None, "where everything goes; default: runs/<model>-<recipe>", "output")
    log_every: int = option(1, "steps between metrics", "output")
    eval_every: int = option(0, "steps between evaluations, 0 for none but the last", "output")
    eval_batches: int = option(4, "microbatches of an evaluation, 0 for no evaluation", "output")
    checkpoint_every: int = option(0, "steps between checkpoints, 0 for none but the last", "output")
    final_checkpoint: bool = option(True, "save a checkpoint when training ends", "output")
    keep_checkpoints: int = option(2, "how many stay, 0 for all", "output")
    resume: str = option("auto", "auto: from the newest whole checkpoint of run_dir; no; or a checkpoint", "output")
    monitor_every: int = option(0, "steps between quantization statistics, 0 for none", "output")
    comm_step: int = option(2, "the step whose bytes on the wire are counted, 0 for none", "output")
    profile: str | None = option(None, "START:STOP, the steps of a profiler trace", "output")
    tensorboard: bool = option(False, "write the metrics for TensorBoard too", "output")
    report: bool = option(True, "write report.html (and plots, if matplotlib is there) at the end", "output")
    progress: str = option("auto", "what is shown while training", "output", ("auto", "bar", "lines", "none"))

    # ------------------------------------------------------------------------------------------- derived
    @property
    def model_size(self) -> ModelSize:
        """The preset with the given changes. vocab_size is the preset's where nobody has decided it."""
        names = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size", "rope_base", "tied_embeddings")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "heads" in changes and "kv_heads" not in changes and changes["heads"] % PRESETS[self.preset].kv_heads:
            changes["kv_heads"] = changes["heads"]
        return dataclasses.replace(PRESETS[self.preset], **changes)

    @property
    def model_name(self) -> str:
        return Path(self.hf_config).stem if self.hf_config else self.preset

    @property
    def profile_steps(self) -> tuple[int, int] | None:
        if self.profile is None:
            return None
        start, _, stop = self.profile.partition(":")
        if not (start.isdigit() and stop.isdigit() and 0 < int(start) < int(stop)):
            raise ConfigError(f"profile expects START:STOP, two steps from 1 on, but got {self.profile!r}")
        if int(start) > self.steps:
            raise ConfigError(f"profile expects steps of this run, which has {self.steps}, but got {self.profile!r}")
        return int(start), int(stop)

    def data_parallel(self, world: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) for that many ranks."""
        rest, left = divmod(world, self.tp)
        if left:
            raise ConfigError(f"tp {self.tp} does not divide the {world} ranks of this run")
        if self.dp_shard == -1:
            shard, left = divmod(rest, self.dp_replicate)
            if left:
                raise ConfigError(f"dp_replicate {self.dp_replicate} does not divide the {rest} ranks that tp leaves")
            return self.dp_replicate, shard
        if self.dp_replicate * self.dp_shard * self.tp != world:
            raise ConfigError(
                f"dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} x tp {self.tp} is "
                f"{self.dp_replicate * self.dp_shard * self.tp} but there are {world} ranks"
            )
        return self.dp_replicate, self.dp_shard

    # ------------------------------------------------------------------------------------------- checks
    def check(self, world: int = 1) -> TrainConfig:
        """Refuse what cannot work, before anything is built; returns itself."""
        try:
            self.recipe = patterns_from(self.recipe)
        except (ValueError, TypeError) as error:
            raise ConfigError(str(error)) from None
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            if choices and value not in choices:
                raise ConfigError(f"{field.name} expects one of {', '.join(map(str, choices))} but got {value!r}")
        self._check_ranges()
        if self.hf_config is None:
            self._check_llama()
        self._check_files()
        self.data_parallel(world)
        self.profile_steps  # noqa: B018 (raises)
        if self.run_dir is None:
            self.run_dir = str(Path("runs") / f"{self.model_name}-{short_label(self.recipe)}")
        return self

    def _check_ranges(self) -> None:
        lowest = {
            "seq_len": 1, "steps": 1, "micro_batch": 1, "microbatches": 1, "seed": 0, "warmup": 0, "tp": 1,
            "dp_replicate": 1, "timeout": 1, "log_every": 1, "eval_every": 0, "eval_batches": 0,
            "checkpoint_every": 0, "keep_checkpoints": 0, "monitor_every": 0, "comm_step": 0,
        }  # fmt: skip
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} expects at least {least} but got {getattr(self, name)}")
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise ConfigError(
                f"dp_shard expects at least 1, or -1 for all ranks that are left, but got {self.dp_shard}"
            )
        if self.min_layer_size is not None and self.min_layer_size < 0:
            raise ConfigError(f"min_layer_size expects at least 0 but got {self.min_layer_size}")
        for name in ("lr", "adam_eps"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} expects a number above 0 but got {getattr(self, name)}")
        for name in ("clip", "weight_decay", "min_lr"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} expects at least 0 but got {getattr(self, name)}")
        for name in ("beta1", "beta2", "eval_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} expects a number in [0, 1) but got {getattr(self, name)}")
        if self.sp and self.tp == 1:
            raise ConfigError("sp expects tp of at least 2: it splits the sequence over the tensor-parallel ranks")
        if self.overlap != "off" and not self.sp:
            raise ConfigError(f"overlap {self.overlap!r} expects tp of at least 2 and sp")

    def _check_llama(self) -> None:
        try:
            size = self.model_size
            size.check()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for name in ("kv_heads", "heads", "ffn"):
            if getattr(size, name) % self.tp:
                raise ConfigError(f"tp expects a divisor of {name} {getattr(size, name)} but got {self.tp}")
        if self.sp and self.seq_len % self.tp:
            raise ConfigError(f"sp expects seq_len to be a multiple of tp {self.tp} but got {self.seq_len}")

    def _check_files(self) -> None:
        for name in ("hf_config", "eval_data"):
            path = getattr(self, name)
            if path is not None and path != "builtin":
                _readable(name, path)
        if self.data != "builtin":
            _readable("data", self.data)
        if self.tokenizer != "bytes":
            _readable("tokenizer", self.tokenizer)
        if self.resume not in ("auto", "no") and not os.path.exists(self.resume):
            raise ConfigError(f"resume expects auto, no or the folder of a checkpoint but got {self.resume!r}")

    # ------------------------------------------------------------------------------------------- text
    def as_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_yaml(self) -> str:
        """A YAML file that ``--config`` reads back; every value is JSON, which YAML contains."""
        lines = []
        group = ""
        for field in dataclasses.fields(self):
            if field.metadata["group"] != group:
                group = field.metadata["group"]
                lines.append(f"# {group}")
            lines.append(f"{field.name}: {json.dumps(getattr(self, field.name))}")
        return "\n".join(lines) + "\n"

    def resolved(self) -> str:
        """Every option, a line per group, for the top of the terminal."""
        groups: dict[str, list[str]] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                groups.setdefault(field.metadata["group"], []).append(f"{field.name}={value}")
        return "\n".join(f"  {group:<13} {', '.join(values)}" for group, values in groups.items())

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults."""
        defaults = TrainConfig()
        return {name: value for name, value in self.as_dict().items() if value != getattr(defaults, name)}


def _readable(name: str, path: str) -> None:
    if not os.path.exists(path):
        raise ConfigError(f"{name} expects an existing file or folder but got {path!r}")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{name}: {path!r} cannot be read (permission denied)")

"""Trainer: the loop around a model, from the first batch to the last checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import torch

import te_dist
from te_dist.launch import checkpoint, runtime
from te_dist.launch.checkpoint import CheckpointError, Progress
from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.data import Batches, check_vocabulary, load_data
from te_dist.launch.layout import check_available, make_layout
from te_dist.launch.metrics import MetricsLog, memory_bytes, peak_flops
from te_dist.launch.models import build_model
from te_dist.launch.optimization import (
    build_optimizer,
    clip_gradients,
    gradient_norm,
    learning_rate,
    set_learning_rate,
)
from te_dist.launch.profiling import StepProfiler
from te_dist.launch.progress import Lines, progress_for, short, size_text
from te_dist.launch.recipes import short_label, unmatched
from te_dist.launch.runtime import World
from te_dist.launch.stopping import StopRequest, name_of
from te_dist.launch.tokenizers import padded_vocab, tokenizer_from
from te_dist.launch.wire import count_bytes, weight_gathers
from te_dist.recipe import DelayedScaling

# What must be the same for a checkpoint to be continued.
MODEL_KEYS = ("preset", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size", "tied_embeddings", "hf_config")
# What may change, but makes the resumed run another one.
RUN_KEYS = ("data", "tokenizer", "seq_len", "micro_batch", "microbatches", "seed", "optimizer", "lr", "recipe", "steps")


@dataclasses.dataclass
class Result:
    """How a run ended."""

    run_dir: Path
    step: int
    loss: float
    eval_loss: float | None
    tokens_per_s: float
    stopped_by: int = 0  # a signal's number
    report: Path | None = None


class Trainer:
    """Builds everything that can fail before the first step; ``train()`` runs the rest.

    Example:
        >>> import tempfile
        >>> from te_dist.launch.config import TrainConfig
        >>> from te_dist.launch.trainer import Trainer
        >>> folder = tempfile.mkdtemp()
        >>> config = TrainConfig(steps=2, seq_len=16, layers=1, run_dir=folder, recipe="fp8_current", progress="none")
        >>> Trainer(config).train().step
        2
    """

    def __init__(self, config: TrainConfig, world: World | None = None) -> None:
        self.config = config.check(world.size if world else runtime.world_size_from_environment())
        check_available(config)
        self.world = world or runtime.start(config.device, config.timeout)
        self.layout = make_layout(config, self.world)
        assert config.run_dir is not None
        self.run_dir = Path(config.run_dir)
        self._check_run_dir()
        found, self.warnings = checkpoint.find(self.run_dir, config.resume, self.world)
        saved = found.config if found is not None else {}
        if config.split_gate is None:
            config.split_gate = config.tp > 1 or bool(saved.get("split_gate"))
        self._check_same_run(saved)
        tokenizer = tokenizer_from(config.tokenizer)
        train, held_out = load_data(config, tokenizer, self.run_dir / "data", self.world)
        needed = padded_vocab(tokenizer.vocab_size)
        self.built = build_model(config, needed, self.layout, self.world.device)
        self.warnings += unmatched(config.recipe, [layer.name for layer in self.built.conversion.layers])
        vocabulary = self._vocabulary(needed)
        for data in filter(None, (train, held_out)):
            self.world.attempt(functools.partial(check_vocabulary, data, vocabulary))
        self.batches = Batches(
            train,
            held_out,
            config.micro_batch,
            config.microbatches,
            config.seed,
            self.layout.dp_rank,
            self.layout.dp_size,
        )
        self.model = self.built.model
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(self.model, config)
        self.done = Progress(0, 0)
        self.resumed_from: Path | None = None
        if found is not None:
            checkpoint.load(found, self.world, self.model, self.optimizer)
            self.done, self.resumed_from = found.progress, found.path
        self.eval_loss: float | None = None
        self.last: dict[str, Any] = {}
        self.peak = peak_flops(self.world.device)
        self.most_memory = 0
        self.quantizes_once = self._may_quantize_once()

    # ------------------------------------------------------------------------------------------- before
    def _vocabulary(self, needed: int) -> int:
        size = getattr(self.built.model, "size", None)
        return size.vocab_size if size is not None else getattr(self.built.model, "vocab_size", needed)

    def _may_quantize_once(self) -> bool:
        """Whether the microbatches of a step share their quantized weights, without a bit of difference."""
        config = self.config
        # FSDP2 gathers weights anew for every microbatch, so there is nothing to keep. A compiled block that is
        # computed again would find the weight that it made the first time: another graph. And delayed scaling would
        # advance once, not with every microbatch.
        recomputed = config.compile and config.activation_checkpointing != "none"
        delayed = any(isinstance(layer.recipe, DelayedScaling) for layer in self.built.conversion.layers)
        return config.microbatches > 1 and not (self.layout.is_sharded or recomputed or delayed)

    def _check_run_dir(self) -> None:
        error = None
        if self.world.is_first:
            try:
                self.run_dir.mkdir(parents=True, exist_ok=True)
                (self.run_dir / ".writable").touch()
                (self.run_dir / ".writable").unlink()
            except OSError as failure:
                error = f"run_dir {str(self.run_dir)!r} cannot be written: {failure.strerror}"
            there = list(checkpoint.folder_of(self.run_dir).glob(f"{checkpoint.PREFIX}*"))
            if self.config.resume == "no" and there:
                error = (
                    f"run_dir {str(self.run_dir)!r} holds checkpoints of another run, and resume is no: choose another "
                    f"run_dir, or move them away"
                )
        if (error := self.world.together(error)) is not None:
            raise ConfigError(error)

    def _check_same_run(self, saved: dict[str, Any]) -> None:
        now = self.config.as_dict()
        for key in MODEL_KEYS:
            if key in saved and saved[key] != now[key]:
                raise CheckpointError(
                    f"the checkpoint was made with {key} {saved[key]!r} but this run has {now[key]!r}; choose another "
                    f"run_dir"
                )
        if saved.get("split_gate", now["split_gate"]) != now["split_gate"]:
            raise CheckpointError(
                f"the checkpoint was made with split_gate {saved['split_gate']} but this run (tp {self.config.tp}) has "
                f"{now['split_gate']}: a run that is to change to tensor parallelism starts with --split-gate"
            )
        changed = [key for key in RUN_KEYS if key in saved and saved[key] != now[key]]
        self.warnings += [f"resuming with another {key}: {saved[key]!r} -> {now[key]!r}" for key in changed]

    # ------------------------------------------------------------------------------------------- train
    def train(self, until: int | None = None, request: StopRequest | None = None) -> Result:
        """All steps that are left.

        Args:
            until: save after that step and return, as a stopped run would.
            request: where signals are noted, if somebody listens to them already.
        """
        config, first = self.config, self.done.step + 1
        log = MetricsLog(self.run_dir, self.world.is_first, config.tensorboard)
        self._write_start(log)
        monitor = te_dist.monitor(self.model, every=config.monitor_every) if config.monitor_every else None
        view = progress_for(config.progress, config.steps, first, self.world.is_first, short_label(config.recipe))
        profiler = StepProfiler(config.profile_steps, self.run_dir, self.world)
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)
        stopped_by = 0
        clock = _Clock(self.world.device)
        try:
            with StopRequest() if request is None else contextlib.nullcontext(request) as request:
                for step in range(first, config.steps + 1):
                    with profiler.step(step), count_bytes(step == config.comm_step, step, log, self.run_dir):
                        loss, norm, lr = self._step(step)
                    clock.count(self._tokens_per_step())
                    self.done = Progress(step, self.done.tokens + self._tokens_per_step())
                    if step % config.log_every == 0 or step in (first, config.steps):
                        self._log_step(step, loss, norm, lr, clock, log, view)
                    if monitor is not None and (statistics := monitor.step()):
                        log.write("quantization", step=step, layers=statistics)
                    stopped_by = self.world.agree_any(request.number)
                    is_last = step in (config.steps, until) or bool(stopped_by)
                    if config.eval_every and step % config.eval_every == 0 and not is_last:
                        self._evaluate(step, log, view)
                    if config.checkpoint_every and step % config.checkpoint_every == 0 and not is_last:
                        self._save(log, view)
                    if stopped_by:
                        view.say(f"te-dist train: {name_of(stopped_by)}: saving step {step}, then stopping")
                        self._save(log, view)
                        break
                    if step == until and step < config.steps:
                        self._save(log, view)
                        break
                    clock.restart()
                else:
                    self._finish(first, log, view)
        finally:
            view.close()
            profiler.close()
            if monitor is not None:
                monitor.close()
            log.write("end", step=self.done.step, stopped_by=name_of(stopped_by) if stopped_by else None)
            log.close()
        return self._result(stopped_by)

    def _finish(self, first: int, log: MetricsLog, view: Lines) -> None:
        if first > self.config.steps:
            view.say(
                f"te-dist train: the run is at step {self.done.step} of {self.config.steps} already: nothing to do "
                f"(more steps: --steps; a new run: --run-dir)"
            )
            return
        if self.config.eval_batches:
            self._evaluate(self.done.step, log, view)
        if self.config.final_checkpoint:
            self._save(log, view)

    def _step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        config = self.config
        torch.manual_seed(runtime.step_seed(config.seed, step, self.layout.dp_rank))
        lr = learning_rate(config, step)
        set_learning_rate(self.optimizer, lr)
        microbatches = self.batches.step(step)
        total = torch.zeros((), device=self.world.device)
        with te_dist.frozen_weights() if self.quantizes_once else contextlib.nullcontext():
            for index, tokens in enumerate(microbatches):
                if self.layout.is_sharded:
                    self.model.set_requires_gradient_sync(index == len(microbatches) - 1)  # type: ignore[operator]
                tokens = self._on_device(tokens)
                loss = self.model(tokens[:, :-1], tokens[:, 1:]) / len(microbatches)
                loss.backward()
                total += loss.detach()
        norm = gradient_norm(self.params)
        clip_gradients(self.params, norm, config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total, norm, lr

    def _on_device(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.world.device.type == "cuda":
            tokens = tokens.pin_memory()  # a copy from other memory waits for the device
        return tokens.to(self.world.device, non_blocking=True)

    def _tokens_per_step(self) -> int:
        config = self.config
        return config.micro_batch * config.microbatches * self.layout.dp_size * config.seq_len

    def _log_step(
        self,
        step: int,
        loss: torch.Tensor,
        norm: torch.Tensor,
        lr: float,
        clock: _Clock,
        log: MetricsLog,
        view: Lines,
    ) -> None:
        mean = self.world.mean(loss)  # waits for the device
        self.most_memory = max(self.most_memory, memory_bytes(self.world.device))
        tokens_per_s = clock.rate()
        mfu = None
        if self.peak is not None:
            mfu = tokens_per_s * self.built.flops_per_token / (self.peak * self.world.size)
        values = {
            "loss": mean,
            "grad_norm": float(norm),
            "lr": lr,
            "tokens": self.done.tokens,
            "tokens_per_s": tokens_per_s,
            "mfu": mfu,
            "memory": self.most_memory,
        }
        self.last = values
        log.write("step", step=step, **values)
        view.step(step, values)
        if not math.isfinite(mean):
            raise TrainingError(
                f"the loss of step {step} is {mean}; the newest checkpoint is from before it. A lower --lr, more "
                f"--warmup or --monitor-every 1 (which layers underflow or saturate) are what to try"
            )

    @torch.no_grad()
    def _evaluate(self, step: int, log: MetricsLog, view: Lines) -> None:
        if self.batches.held_out is None or not self.config.eval_batches:
            return
        self.model.eval()
        total = torch.zeros((), device=self.world.device)
        for tokens in self.batches.evaluation(self.config.eval_batches):
            tokens = self._on_device(tokens)
            total += self.model(tokens[:, :-1], tokens[:, 1:])
        self.model.train()
        self.eval_loss = self.world.mean(total / self.config.eval_batches)
        log.write("eval", step=step, loss=self.eval_loss)
        view.say(f"eval at step {step}: loss {self.eval_loss:.4f}")

    def _save(self, log: MetricsLog, view: Lines) -> None:
        start = time.perf_counter()
        path = checkpoint.save(
            self.run_dir,
            self.world,
            self.model,
            self.optimizer,
            self.done,
            self.config.as_dict(),
            self.config.keep_checkpoints,
        )
        seconds = time.perf_counter() - start
        log.write("checkpoint", step=self.done.step, path=str(path), seconds=round(seconds, 3))
        view.say(f"checkpoint of step {self.done.step}: {path}")

    # ------------------------------------------------------------------------------------------- words
    def _write_start(self, log: MetricsLog) -> None:
        config, device = self.config, self.world.device
        if self.world.is_first:
            (self.run_dir / "config.yaml").write_text(config.to_yaml())
            layers = [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "recipe": None if layer.recipe is None else repr(layer.recipe),
                    "reason": layer.reason,
                }
                for layer in self.built.conversion.layers
            ]
            (self.run_dir / "layers.json").write_text(json.dumps(layers, indent=1))
        log.write("gathers", weights=weight_gathers(self.model))
        if self.resumed_from is not None:
            log.write("resume", step=self.done.step, path=str(self.resumed_from))
        log.write(
            "start",
            te_dist=te_dist.__version__,
            torch=torch.__version__,
            cuda=torch.version.cuda,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            ranks=self.world.size,
            layout=str(self.layout),
            parameters=self.built.parameters,
            flops_per_token=self.built.flops_per_token,
        )

    def describe(self) -> str:
        """What will be trained, on what and how; for the top of the terminal."""
        config = self.config
        quantized = len(self.built.conversion.converted)
        lines = [
            f"te_dist {te_dist.__version__} on torch {torch.__version__}, {self.world.device.type}, {self.layout}",
            f"model     {config.model_name}, {short(self.built.parameters)} parameters, "
            f"{quantized} of {len(self.built.conversion.layers)} linear layers quantized",
            f"data      {config.data}, {short(len(self.batches.train.tokens))} tokens; "
            f"{short(self._tokens_per_step())} a step, {config.steps} steps",
            f"run_dir   {self.run_dir}",
            f"config\n{config.resolved()}",
        ]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.resumed_from is not None:
            lines.append(f"resuming from {self.resumed_from} (step {self.done.step})")
        return "\n".join(lines)

    def _result(self, stopped_by: int) -> Result:
        result = Result(
            self.run_dir,
            self.done.step,
            self.last.get("loss", float("nan")),
            self.eval_loss,
            self.last.get("tokens_per_s", 0.0),
            stopped_by,
        )
        return result

    def summary(self) -> str:
        """One line about the last step."""
        if not self.last:
            return f"at step {self.done.step}"
        text = f"step {self.done.step}: loss {self.last['loss']:.4f}"
        if self.eval_loss is not None:
            text += f", held-out {self.eval_loss:.4f}"
        return text + f", {short(self.last['tokens_per_s'])} tokens/s, peak memory {size_text(self.last['memory'])}"


class TrainingError(RuntimeError):
    """Training cannot go on."""


class _Clock:
    """Tokens per second of the steps since the last reading; what happens between steps does not count."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds, self.tokens = 0.0, 0
        self.restart()

    def restart(self) -> None:
        """A step begins."""
        self.started = time.perf_counter()

    def count(self, tokens: int) -> None:
        self.seconds += time.perf_counter() - self.started
        self.started = time.perf_counter()
        self.tokens += tokens

    def rate(self) -> float:
        """Called when the device is done."""
        self.seconds += time.perf_counter() - self.started
        self.started = time.perf_counter()
        rate = self.tokens / max(self.seconds, 1e-9)
        self.seconds, self.tokens = 0.0, 0
        return rate

"""te-dist train in one process: it learns, resumes bit for bit, and keeps its checkpoints whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters
from train_cases import config_of, losses, train

import te_dist
from te_dist.launch import checkpoint, runtime
from te_dist.launch import train as train_command
from te_dist.launch.checkpoint import CheckpointError
from te_dist.launch.config import ConfigError
from te_dist.launch.llama import Llama
from te_dist.launch.metrics import MetricsLog, read_metrics
from te_dist.launch.models import compile_blocks
from te_dist.launch.optimization import build_optimizer, clip_gradients, gradient_norm, learning_rate
from te_dist.launch.presets import ModelSize
from te_dist.launch.trainer import Trainer, TrainingError

RECIPES = ["bf16", "fp8_current", "fp8_delayed:amax_history_len=4", "fp8_block", "mxfp8", "nvfp4"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(whole, recipe=recipe)
    train(parts, recipe=recipe, steps=6, checkpoint_every=4, final_checkpoint=False)
    trainer = Trainer(config_of(parts, recipe=recipe))
    assert trainer.done.step == 4 and trainer.resumed_from == parts / "checkpoints" / "step-00000004"
    assert "resuming from" in trainer.describe()
    trainer.train()
    assert losses(parts) == losses(whole) and list(losses(whole)) == [1, 2, 3, 4, 5, 6]
    states = [Trainer(config_of(folder, recipe=recipe)).model.state_dict() for folder in (whole, parts)]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_it_learns_and_writes_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--preset", "1m", "--layers", "2", "--steps", "40", "--seq-len", "64", "--recipe", "fp8_current",
                 "--run-dir", str(tmp_path / "run"), "--monitor-every", "20", "--eval-every", "20", "--lr", "3e-3",
                 "--profile", "2:4", "--device", "cpu"]  # fmt: skip
    assert train_command.main(arguments) == 0
    seen = losses(tmp_path / "run")
    assert seen[1] > 5.0 and seen[40] < 3.3
    events = read_metrics(tmp_path / "run")
    kinds = {event["event"] for event in events}
    assert kinds == {"start", "gathers", "step", "eval", "quantization", "checkpoint", "end"}
    step = next(e for e in events if e["event"] == "step" and e["step"] == 7)
    assert (
        step["tokens"] == 7 * 4 * 64 and step["tokens_per_s"] > 0 and step["memory"] > 1 << 20 and step["mfu"] is None
    )
    assert step["grad_norm"] > 0 and step["lr"] == pytest.approx(3e-3 * 7 / 10)
    assert [e["step"] for e in events if e["event"] == "quantization"] == [1, 21]
    for name in ("config.yaml", "layers.json", "report.html", "report.png", "profile/rank0.json"):
        assert (tmp_path / "run" / name).stat().st_size > 100, name
    layers = json.loads((tmp_path / "run" / "layers.json").read_text())
    assert layers[-1] == {"name": "head", "shape": [320, 128], "recipe": None, "reason": "'head' is None"}
    assert train_command.main(arguments) == 0  # nothing left to do


def test_the_last_line_says_how_it_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--layers", "1", "--steps", "2", "--seq-len", "16", "--run-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert train_command.main(base) == 0
    out = capsys.readouterr().out
    assert "te-dist train: done, step 2: loss" in out and out.strip().endswith("report.html")
    assert train_command.main([*base, "--stpes", "3"]) == 2
    assert capsys.readouterr().err == "te-dist train: error: no option is called --stpes; did you mean --steps?\n"
    assert train_command.main(["--help"]) == 0 and "--dp-shard" in capsys.readouterr().out
    assert train_command.main([*base, "--hidden", "64"]) == 1
    assert "the checkpoint was made with hidden None but this run has 64" in capsys.readouterr().err
    assert train_command.main([*base, "--resume", "no"]) == 2
    assert "holds checkpoints of another run" in capsys.readouterr().err


def test_microbatches_add_up_to_the_same_step(tmp_path: Path) -> None:
    """4 x 1 and 1 x 4 sequences: the same gradient in float32, but for the order of sums."""
    options: dict[str, Any] = {"compute_dtype": "float32", "steps": 3}
    train(tmp_path / "one", micro_batch=4, microbatches=1, **options)
    train(tmp_path / "four", micro_batch=1, microbatches=4, **options)
    for step, loss in losses(tmp_path / "one").items():
        assert losses(tmp_path / "four")[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_checkpointed_activations_change_nothing(tmp_path: Path, recipe: str) -> None:
    train(tmp_path / "plain", recipe=recipe, steps=2)
    train(tmp_path / "recomputed", recipe=recipe, steps=2, activation_checkpointing="full")
    assert losses(tmp_path / "plain") == losses(tmp_path / "recomputed")


def test_tied_embeddings_are_one_parameter_and_survive_a_resume(tmp_path: Path) -> None:
    train(tmp_path / "whole", tied_embeddings=True)
    train(tmp_path / "parts", tied_embeddings=True, checkpoint_every=3, final_checkpoint=False)
    trainer = Trainer(config_of(tmp_path / "parts", tied_embeddings=True))
    assert isinstance(trainer.model, Llama) and trainer.model.head.weight is trainer.model.embed.weight
    trainer.train()
    assert losses(tmp_path / "whole") == losses(tmp_path / "parts")


def test_compiled_blocks_train_like_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for all blocks, and with a backend that fuses nothing not a bit of difference."""
    compile_block = torch.nn.Module.compile

    def whole_graph(block: torch.nn.Module, **options: Any) -> None:
        assert options == {"fullgraph": True}
        compile_block(block, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", whole_graph)
    for recipe, recomputed in (("fp8_block", "none"), ("nvfp4", "full"), ("fp8_delayed", "full")):
        options: dict[str, Any] = {"steps": 2, "layers": 3, "recipe": recipe, "microbatches": 2}
        options |= {"activation_checkpointing": recomputed, "eval_batches": 0}
        train(tmp_path / recipe / "eager", **options)
        torch._dynamo.reset()
        counters.clear()
        train(tmp_path / recipe / "compiled", compile=True, **options)
        assert losses(tmp_path / recipe / "compiled") == losses(tmp_path / recipe / "eager")
        # However many blocks there are: one graph, or three where weights are kept (made, used, and made anew).
        assert counters["stats"]["unique_graphs"] == (3 if recipe == "fp8_block" else 1), recipe


def test_blocks_that_are_not_alike_have_graphs_of_their_own() -> None:
    kinds = ("gelu", "gelu", "silu")
    blocks = [te_dist.TransformerLayer(32, 64, 2, activation=a, name=f"layers.{i}") for i, a in enumerate(kinds)]
    limit = torch._dynamo.config.recompile_limit
    compile_blocks(list(blocks) * 8)
    try:
        assert torch._dynamo.config.recompile_limit == max(limit, 4 * 24)
        mlps = [block.layernorm_mlp.traced_spec for block in blocks]
        assert mlps[0] is mlps[1] and mlps[0].name == "layers.*.layernorm_mlp" and mlps[2] != mlps[0]
        assert blocks[0].self_attention.proj.traced_spec.name == "layers.*.self_attention.proj"
    finally:
        torch._dynamo.config.recompile_limit = limit


def test_a_hugging_face_model_from_its_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = transformers.GPTNeoXConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    small.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"hf_config": str(tmp_path / "model"), "recipe": "fp8_current", "lr": 3e-3}
    train(tmp_path / "whole", **options)
    train(tmp_path / "parts", checkpoint_every=3, final_checkpoint=False, **options)
    train(tmp_path / "parts", **options)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    layers = {entry["name"]: entry["recipe"] for entry in json.loads((tmp_path / "whole" / "layers.json").read_text())}
    assert layers["lm.gpt_neox.layers.0.mlp.dense_h_to_4h"] == "Float8CurrentScaling()"
    small.vocab_size = 100
    small.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="has a vocabulary of 100, but the tokenizer needs 320"):
        Trainer(config_of(tmp_path / "other", hf_config=str(tmp_path / "small")))
    with pytest.raises(ConfigError, match="gives no causal LM"):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "config.json").write_text("{}")
        Trainer(config_of(tmp_path / "bad_run", hf_config=str(tmp_path / "bad")))


# ------------------------------------------------------------------------------------------------- checkpoints
def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_old_checkpoints_go_and_the_kept_ones_are_whole(tmp_path: Path) -> None:
    train(tmp_path, checkpoint_every=1, keep_checkpoints=2)
    assert checkpoints(tmp_path) == ["step-00000005", "step-00000006"]
    world = runtime.start("cpu", 60)
    for name in checkpoints(tmp_path):
        found, _ = checkpoint.find(tmp_path, str(tmp_path / "checkpoints" / name), world)
        assert found is not None and found.progress.step == int(name[-1]) and found.config["hidden"] == 64


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["bit", "cut", "missing", "marker", "no marker"])
def test_a_damaged_checkpoint_is_found_out_and_the_one_before_it_serves(tmp_path: Path, damage: str) -> None:
    train(tmp_path, checkpoint_every=2, keep_checkpoints=0)
    newest = tmp_path / "checkpoints" / "step-00000006"
    data = newest / "__0_0.distcp"
    if damage == "bit":
        flip_a_bit(data)
    elif damage == "cut":
        data.write_bytes(data.read_bytes()[:-10])
    elif damage == "missing":
        data.unlink()
    elif damage == "marker":
        (newest / "checkpoint.json").write_text("{")
    else:
        (newest / "checkpoint.json").unlink()
    trainer = Trainer(config_of(tmp_path))
    assert trainer.done.step == 4
    assert len(trainer.warnings) == 1 and str(newest) in trainer.warnings[0]
    assert f"warning: {newest}" in trainer.describe()
    with pytest.raises(CheckpointError, match="step-00000006"):
        Trainer(config_of(tmp_path, resume=str(newest)))
    for name in ("step-00000002", "step-00000004"):
        (tmp_path / "checkpoints" / name / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole"):  # never a quiet start from scratch
        Trainer(config_of(tmp_path))


def test_a_save_that_fails_half_way_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, steps=2)
    real = checkpoint.dcp.save

    def half(state: Any, **options: Any) -> None:
        real(state, **options)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.dcp, "save", half)
        with pytest.raises(CheckpointError, match=r"step 6 could not be written.*No space left"):
            train(tmp_path, steps=6)
    assert checkpoints(tmp_path) == [".partial-step-00000006", "step-00000002"]
    result = train(tmp_path, steps=6)  # resumes, and clears away what was left
    assert result.step == 6 and checkpoints(tmp_path) == ["step-00000002", "step-00000006"]


def test_a_checkpoint_moves_between_recipes(tmp_path: Path) -> None:
    train(tmp_path / "a", steps=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    trainer = Trainer(config_of(tmp_path / "b", steps=5, recipe="fp8_delayed"))
    assert any("another recipe" in warning for warning in trainer.warnings)
    assert trainer.train().step == 5


# ------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "mxfp8", "min_layer_size": 1 << 30}, "quantizes no layer of this model"),
        ({"vocab_size": 100}, "vocab_size expects at least the tokenizer's 320 but got 100"),
        ({"seq_len": 1 << 20}, "too few for sequences"),
        ({"overlap": "auto"}, "overlap 'auto' expects tp"),
        ({"recipe": "nvfp4", "ffn": 31}, "layernorm_mlp': NVFP4 packs two .* in_features to be even but it is 31"),
        ({"profile": "9:11"}, "profile expects steps of this run, which has 6, but got '9:11'"),
        ({"resume": "yes"}, "resume expects auto, no or the folder of a checkpoint but got 'yes'"),
    ],
)
def test_what_cannot_train_is_refused_before_it_starts(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Trainer(config_of(tmp_path, **options))


def test_a_pattern_that_no_layer_matches_is_said(tmp_path: Path) -> None:
    recipe = {"*.projj": "mxfp8", "layers.0.*": "nvfp4", "*": "fp8_current"}
    said = "no layer matches the recipe's pattern '*.projj'; there is 'layers.0.self_attention.proj'"
    trainer = Trainer(config_of(tmp_path, recipe=recipe))
    assert trainer.warnings == [said] and f"warning: {said}" in trainer.describe()


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"file is no checkpoint of te-dist train"):
        Trainer(config_of(tmp_path / "run", resume=str(tmp_path / "file")))


def test_a_run_dir_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        Trainer(config_of(tmp_path / "file" / "run"))


def test_a_loss_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    trainer = Trainer(config_of(tmp_path, checkpoint_every=1))
    with torch.no_grad():
        trainer.model.get_parameter("norm.weight").fill_(torch.nan)
    with pytest.raises(TrainingError, match="the loss of step 1 is nan"):
        trainer.train()
    assert not (tmp_path / "checkpoints").exists()  # it is not saved


# ------------------------------------------------------------------------------------------------- parts
def test_the_learning_rate_schedules(tmp_path: Path) -> None:
    base = config_of(tmp_path, steps=100, warmup=10, lr=1.0, min_lr=0.1)
    for schedule, middle in {"cosine": 0.55, "linear": 0.55, "constant": 1.0, "wsd": 1.0}.items():
        config = dataclasses.replace(base, schedule=schedule)
        rates = [learning_rate(config, step) for step in (1, 10, 55, 100)]
        assert rates == pytest.approx([0.1, 1.0, middle, 1.0 if schedule == "constant" else 0.1])
    assert learning_rate(dataclasses.replace(base, warmup=0), 1) <= 1.0


def test_gradient_norm_and_clipping_are_torchs() -> None:
    torch.manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(7, 5)),
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.ones(2)),
    ]
    for param in params[:2]:
        param.grad = torch.randn_like(param)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    for copy, param in zip(copies, params, strict=True):
        copy.grad = None if param.grad is None else param.grad.clone()
    norm = gradient_norm(params)
    clip_gradients(params, norm, 0.5)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(copies, 0.5))
    for copy, param in zip(copies[:2], params[:2], strict=True):
        torch.testing.assert_close(param.grad, copy.grad)


def test_norms_and_embeddings_do_not_decay(tmp_path: Path) -> None:
    model = Llama(ModelSize(1, 64, 128, 4, 2, 320))
    decayed, others = build_optimizer(model, config_of(tmp_path)).param_groups
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    kept = {id(p) for p in others["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in kept}
    assert names == {"embed.weight", "norm.weight", "layers.0.self_attention.layernorm_qkv.layer_norm_weight",
                     "layers.0.layernorm_mlp.layer_norm_weight"}  # fmt: skip


def test_metrics_survive_a_killed_writer_and_a_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, True)
    for step in range(1, 6):
        log.write("step", step=step, loss=float(step))
    log.write("resume", step=3)
    log.write("step", step=4, loss=40.0)
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "ste')
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path, steps=2, tensorboard=True)
    assert any(path.stat().st_size > 100 for path in (tmp_path / "tensorboard").iterdir())


def test_llama_starts_the_same_whatever_surrounds_a_layer() -> None:
    models = [Llama(ModelSize(layers, 64, 128, 4, 2, 320)) for layers in (2, 2)]
    for model in models:
        torch.manual_seed(hash(id(model)) % 1000)
        model.init_weights(3)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)
    first = models[0].get_parameter("layers.0.layernorm_mlp.fc1_weight")
    second = models[0].get_parameter("layers.1.layernorm_mlp.fc1_weight")
    assert not torch.equal(first, second) and abs(first.std().item() - 0.02) < 1e-3
    other = Llama(ModelSize(2, 64, 128, 4, 2, 320))
    other.init_weights(4)
    assert not torch.equal(other.embed.weight, models[0].embed.weight)


def test_llama_agrees_with_a_plain_one_in_float32() -> None:
    """Grouped-query attention, rotary positions, SwiGLU and RMSNorm, written again with torch alone."""
    size = ModelSize(2, 64, 96, 4, 2, 320)
    model = Llama(size, compute_dtype=torch.float32)
    model.init_weights(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    tokens = torch.randint(0, 320, (2, 16))
    state = {name: p.detach().double() for name, p in model.named_parameters()}
    x = state["embed.weight"][tokens]
    frequencies = 10000.0 ** (-torch.arange(0, 16, 2).double() / 16)
    turns = torch.outer(torch.arange(16).double(), frequencies)
    cos, sin = torch.cat([turns.cos()] * 2, -1), torch.cat([turns.sin()] * 2, -1)

    def norm(v: torch.Tensor, name: str) -> torch.Tensor:
        return v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-5) * state[name]

    def rotate(v: torch.Tensor) -> torch.Tensor:
        return v * cos + torch.cat([-v[..., 8:], v[..., :8]], -1) * sin

    for i in range(2):
        at, mlp = f"layers.{i}.self_attention.", f"layers.{i}.layernorm_mlp."
        h = norm(x, at + "layernorm_qkv.layer_norm_weight") @ state[at + "layernorm_qkv.weight"].t()
        h = h.view(2, 16, 2, 4, 16)  # groups of two queries, a key and a value
        q = h[:, :, :, :2].reshape(2, 16, 4, 16).transpose(1, 2)
        k, v = (h[:, :, :, j].repeat_interleave(2, 2).transpose(1, 2) for j in (2, 3))
        scores = rotate(q) @ rotate(k).transpose(-1, -2) / 4.0
        scores = scores.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 16, 64)
        x = x + mixed @ state[at + "proj.weight"].t()
        gate, up = (norm(x, mlp + "layer_norm_weight") @ state[mlp + "fc1_weight"].t()).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ state[mlp + "fc2_weight"].t()
    expected = norm(x, "norm.weight") @ state["head.weight"].t()
    torch.testing.assert_close(model(tokens).double(), expected, rtol=1e-4, atol=1e-5)
    targets = torch.randint(0, 320, (2, 16))
    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, targets).double(), loss, rtol=1e-5, atol=1e-6)

"""te_dist in accelerate: FSDP2 on two ranks, tensor parallelism on four, accelerate launch, transformers.Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HUNG
from torch.distributed.tensor import DTensor

pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import te_dist  # noqa: E402
from te_dist.launch.accelerate import TEDistAccelerator, TEDistPlugin, TEDistTrainerMixin, prepare  # noqa: E402
from te_dist.launch.config import ConfigError  # noqa: E402
from te_dist.parallel import all_gather_report, comm_report  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "launch" / "examples"


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batches(count: int, rank: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(0, 128, (4, 32), generator=generator) for _ in range(count)]


def steps(accelerator: Any, model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def fresh_state(monkeypatch: pytest.MonkeyPatch) -> Any:
    """accelerate keeps what it found in the process for ever."""
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "TE_DIST_"))]:
        monkeypatch.delenv(key)
    _forget()
    yield
    _forget()


def _forget() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


# ------------------------------------------------------------------------------------------------- one process
@pytest.mark.parametrize("form", ["class", "function"])
def test_prepare_quantizes_in_place_and_trains(form: str) -> None:
    from accelerate import Accelerator

    plugin = TEDistPlugin(recipe={"*.down_proj": "nvfp4", "*": "fp8_current"}, verbose=False)
    model = llama()
    before = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if form == "class":
        accelerator: Any = TEDistAccelerator(te_dist_plugin=plugin, cpu=True, mixed_precision="fp8")
        assert accelerator.mixed_precision == "bf16"  # and nobody asked for torchao
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = prepare(accelerator, model, optimizer, plugin=plugin)
    inner = accelerator.unwrap_model(model)
    layer = inner.model.layers[1]
    assert type(layer.mlp.down_proj.recipe).__name__ == "NVFP4BlockScaling"
    assert type(layer.self_attn.q_proj.recipe).__name__ == "Float8CurrentScaling"
    assert type(inner.lm_head) is torch.nn.Linear
    assert all(param is before[name] for name, param in inner.named_parameters())  # the optimizer's own
    losses = steps(accelerator, model, optimizer, batches(1) * 12)
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("backend", ["no", "aot_eager"])
def test_blocks_that_accelerate_compiles_are_the_same_to_a_graph(backend: str) -> None:
    from accelerate.utils import TorchDynamoPlugin

    dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    plugin = TEDistPlugin(recipe="fp8_current", verbose=False)
    model = llama(layers=3)
    blocks = list(model.model.layers)
    TEDistAccelerator(te_dist_plugin=plugin, cpu=True, dynamo_plugin=dynamo).prepare(model)
    layers = [block.mlp.up_proj for block in blocks]
    assert layers[0].traced_spec is layers[2].traced_spec
    assert [layer.spec.name for layer in layers] == [f"model.layers.{i}.mlp.up_proj" for i in range(3)]


def test_state_round_trip_resumes_bit_for_bit_in_one_process(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        _forget()
        accelerator = TEDistAccelerator(te_dist_plugin=TEDistPlugin(recipe="fp8_delayed", verbose=False), cpu=True)
        model = llama()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))

    data = batches(6)
    accelerator, model, optimizer = start()
    steps(accelerator, model, optimizer, data[:3])
    accelerator.save_state(str(tmp_path / "state"))
    expected = steps(accelerator, model, optimizer, data[3:])
    accelerator, model, optimizer = start()
    accelerator.load_state(str(tmp_path / "state"))
    assert steps(accelerator, model, optimizer, data[3:]) == expected


def test_the_monitor_steps_with_the_optimizer(tmp_path: Path) -> None:
    log = tmp_path / "quantization.jsonl"
    plugin = TEDistPlugin(recipe="mxfp8", monitor_every=2, monitor_log=str(log), verbose=False)
    accelerator = TEDistAccelerator(te_dist_plugin=plugin, cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    steps(accelerator, model, optimizer, batches(3))
    assert accelerator.te_dist_monitor is not None
    accelerator.te_dist_monitor.close()
    assert len(log.read_text().splitlines()) == 2


def test_options_come_from_arguments_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="expects a recipe"):
        TEDistPlugin()
    pytest.importorskip("yaml")
    file = tmp_path / "te_dist.yaml"
    file.write_text("recipe: {'*.mlp.*': nvfp4, '*': mxfp8}\nmin_size: 7\nquantized_all_gather: false\n")
    monkeypatch.setenv("TE_DIST_CONFIG", str(file))
    plugin = TEDistPlugin()
    assert plugin.recipe == {"*.mlp.*": "nvfp4", "*": "mxfp8"} and plugin.quantized_all_gather == "off"
    monkeypatch.setenv("ACCELERATE_FP8_TE_DIST_RECIPE", "fp8_block")  # from fp8_config
    monkeypatch.setenv("ACCELERATE_FP8_TE_DIST_FIRST_LAST_LAYERS_BF16", "True")
    assert TEDistPlugin().recipe == {"*": "fp8_block"} and TEDistPlugin().first_last_layers_bf16 is True
    monkeypatch.setenv("TE_DIST_RECIPE", "*.o_proj=bf16;nvfp4")
    assert TEDistPlugin().recipe == {"*.o_proj": "bf16", "*": "nvfp4"} and TEDistPlugin().min_size == 7
    assert TEDistPlugin(recipe="fp8_current", min_size=3).recipe == {"*": "fp8_current"}
    monkeypatch.setenv("TE_DIST_MIN_SIZE", "lots")
    with pytest.raises(ConfigError, match="TE_DIST_MIN_SIZE expects a whole number"):
        TEDistPlugin()
    monkeypatch.delenv("TE_DIST_MIN_SIZE")
    monkeypatch.setenv("ACCELERATE_FP8_TE_DIST_RECIPEE", "mxfp8")
    with pytest.raises(ConfigError, match="no option 'recipee'; did you mean fp8_config: te_dist_recipe"):
        TEDistPlugin()


def test_what_would_train_unquantized_is_refused() -> None:
    from accelerate import Accelerator

    with pytest.raises(ConfigError, match="quantizes nothing"):
        TEDistPlugin(recipe="bf16")
    with pytest.raises(ConfigError, match="did you mean 'fp8_current'"):
        TEDistPlugin(recipe="fp8_curent")
    plugin = TEDistPlugin(recipe={"nothing": "mxfp8"}, verbose=False)
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match="quantizes no layer of LlamaForCausalLM"):
        prepare(Accelerator(cpu=True), model, optimizer, plugin=plugin)
    plugin = TEDistPlugin(recipe="mxfp8", verbose=False)
    with pytest.raises(ConfigError, match="one model at a time but got 2"):
        prepare(Accelerator(cpu=True), model, llama(), optimizer, plugin=plugin)
    with pytest.raises(ConfigError, match="tp_plan, but accelerate's parallelism_config"):
        with_plan = TEDistPlugin(recipe="mxfp8", tp_plan={"*.q_proj": "column"}, verbose=False)
        prepare(Accelerator(cpu=True), model, optimizer, plugin=with_plan)
    _forget()
    accelerator = Accelerator(cpu=True)
    accelerator.te_recipe_handler = object()
    with pytest.raises(ConfigError, match="another FP8 library's"):
        prepare(accelerator, model, optimizer, plugin=plugin)
    with pytest.raises(TypeError, match="expects a TEDistPlugin but got str"):
        TEDistAccelerator(te_dist_plugin="mxfp8")  # type: ignore[arg-type]


def test_keys_without_te_dist_in_use_warn() -> None:
    program = """
import warnings, torch, te_dist.launch.accelerate
from accelerate import Accelerator
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), 0.1))
said = [str(w.message) for w in caught if "does not use te_dist" in str(w.message)]
assert len(said) == 1 and "TE_DIST_RECIPE is set" in said[0] and "unquantized" in said[0], said
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    te_dist.launch.accelerate.prepare(Accelerator(cpu=True), model, torch.optim.SGD(model.parameters(), 0.1))
assert not [w for w in caught if "does not use te_dist" in str(w.message)]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"TE_DIST_RECIPE": "mxfp8"}
    )
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------------------------- ranks
def accelerator_on_ranks(rank: int, world: int, plugin: TEDistPlugin, tp: int = 1) -> Any:
    """FSDP2 without GPUs, which accelerate does not offer: its state is told that it is there."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    _forget()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}  # fmt: skip
    accelerator = TEDistAccelerator(te_dist_plugin=plugin, cpu=True)
    fsdp = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True,
    )  # fmt: skip
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = fsdp
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if tp > 1:
        parallelism = ParallelismConfig(dp_shard_size=world // tp, tp_size=tp)
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
    return accelerator


def _fsdp2(rank: int, world: int, folder: Path, recipe: str) -> dict[str, Any]:
    plugin = TEDistPlugin(recipe=recipe, quantized_all_gather="on", verbose=False)

    def start() -> tuple[Any, Any, Any]:
        accelerator = accelerator_on_ranks(rank, world, plugin)
        model = llama()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))

    data = batches(6, rank)
    accelerator, model, optimizer = start()
    params = {id(p) for p in model.parameters()}
    mapped = all(id(p) in params for group in optimizer.param_groups for p in group["params"])
    with comm_report() as report:
        first = steps(accelerator, model, optimizer, data[:1])
    first += steps(accelerator, model, optimizer, data[1:3])
    gathered = all_gather_report(model)
    accelerator.save_state(str(folder / "state"))
    expected = steps(accelerator, model, optimizer, data[3:])
    accelerator, model, optimizer = start()
    accelerator.load_state(str(folder / "state"))
    resumed = steps(accelerator, model, optimizer, data[3:])
    wire = {
        c.dtype
        for c in report.select(kind="all_gather")
        if c.payload.startswith("weight, ") and "high" not in c.payload
    }
    return {"first": first, "expected": expected, "resumed": resumed, "mapped": mapped, "wire": wire,
            "quantized": len(gathered.quantized), "all": len(gathered.parameters)}  # fmt: skip


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_fsdp2_on_two_ranks_saves_and_resumes_bit_for_bit(
    recipe: str, two_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    answers = two_ranks(_fsdp2, tmp_path, recipe)
    for answer in answers:
        assert answer["mapped"] and answer["quantized"] == answer["all"] == 14
        assert answer["resumed"] == answer["expected"] and len(set(answer["expected"])) == 3
        assert answer["wire"] == {"uint8"}
    # Against one process with plain torch, on both ranks' data: the first loss is that of the same weights.
    model = llama()
    te_dist.convert(model, {"lm_head": None, "*": te_dist.launch.recipes.recipe_from(recipe)}, verbose=False)
    for rank, answer in enumerate(answers):
        (tokens,) = batches(1, rank)
        with torch.no_grad():
            loss = model(input_ids=tokens, labels=tokens).loss.item()
        assert answer["first"][0] == pytest.approx(loss, rel=1e-5)


def _fsdp2_and_tp(rank: int, world: int) -> dict[str, Any]:
    accelerator = accelerator_on_ranks(rank, world, TEDistPlugin(recipe="fp8_block", verbose=False), tp=2)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3))
    q_proj = model.model.layers[0].self_attn.q_proj.weight
    axes = q_proj.device_mesh.mesh_dim_names if isinstance(q_proj, DTensor) else ()
    params = {id(p) for p in model.parameters()}
    mapped = all(id(p) in params for group in optimizer.param_groups for p in group["params"])
    data = batches(1, rank // 2) * 6
    return {"losses": steps(accelerator, model, optimizer, data), "axes": axes, "mapped": mapped}


def test_fsdp2_and_tensor_parallelism_on_four_ranks(rank_pools: Callable[[int], Any]) -> None:
    answers = rank_pools(4).run(_fsdp2_and_tp)
    for answer in answers:
        assert answer["mapped"] and len(answer["axes"]) == 2 and "tp" in answer["axes"]
        assert answer["losses"][-1] < answer["losses"][0] - 0.3
    assert answers[0]["losses"] == answers[1]["losses"]  # tensor parallel ranks see the same loss
    model = llama()
    te_dist.convert(model, {"lm_head": None, "*": te_dist.recipe.Float8BlockScaling()}, verbose=False)
    (tokens,) = batches(1, 0)
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert answers[0]["losses"][0] == pytest.approx(loss, rel=1e-3)


# ------------------------------------------------------------------------------------------------- accelerate launch
def test_accelerate_launch_with_the_example(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(EXAMPLES / "single_gpu.yaml"),
         "--cpu", str(EXAMPLES / "train_accelerate.py"), "--hidden", "64", "--layers", "1", "--steps", "3"],
        capture_output=True, text=True, cwd=tmp_path, timeout=HUNG, env=os.environ | {"TE_DIST_RECIPE": "nvfp4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "te_dist: 7 of 8 linear layers quantized" in done.stdout and "NVFP4BlockScaling" in done.stdout
    assert "step 3  loss" in done.stdout and (tmp_path / "accelerate_state").is_dir()


def test_the_examples_are_configs_that_accelerate_reads() -> None:
    pytest.importorskip("yaml")
    from accelerate.commands.config.config_args import ClusterConfig

    for name in ("single_gpu", "fsdp2", "fsdp2_tp", "multi_node"):
        config = ClusterConfig.from_yaml_file(str(EXAMPLES / f"{name}.yaml"))
        assert config.mixed_precision == "bf16"
        if name != "single_gpu":
            assert config.fsdp_config["fsdp_version"] == 2
    assert config.num_machines == 2


# ------------------------------------------------------------------------------------------------- Trainer
class Trainer(TEDistTrainerMixin, transformers.Trainer):
    pass


def test_transformers_trainer(tmp_path: Path) -> None:
    def trainer(folder: str, max_steps: int) -> Any:
        _forget()
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder), per_device_train_batch_size=4, max_steps=max_steps, logging_steps=1, save_steps=3,
            use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3, lr_scheduler_type="constant",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in torch.cat(batches(4))]
        plugin = TEDistPlugin(recipe="fp8_current", verbose=False)
        return Trainer(model=llama(), args=arguments, train_dataset=data, te_dist_plugin=plugin)

    whole = trainer("whole", 6)
    whole.train()
    assert isinstance(whole.accelerator, TEDistAccelerator)
    assert isinstance(whole.model.model.layers[0].mlp.up_proj, te_dist.Linear)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    trainer("parts", 3).train()
    resumed = trainer("parts", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.train(resume_from_checkpoint=True)
    again = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert len(losses) == 6 and again == losses
    # The saved model is one that transformers loads without te_dist.
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert torch.equal(loaded.model.layers[1].mlp.up_proj.weight, whole.model.model.layers[1].mlp.up_proj.weight)

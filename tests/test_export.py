"""export: names, bytes and meaning of what is written, and that others read it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from train_cases import train

import te_dist
from te_dist import exporting, recipe
from te_dist.launch import cli
from te_dist.launch.export import load
from te_dist.parallel import fully_shard


def converted(chosen: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 136), nn.GELU(), nn.Linear(136, 64, bias=False), nn.Linear(64, 8))
    te_dist.convert(model, {"3": None, "*": chosen or recipe.Float8BlockScaling()}, verbose=False)
    return model


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32"])
def test_high_precision_loads_back_in_strict_mode(format: str) -> None:
    model = converted(recipe.DelayedScaling())
    model(torch.randn(16, 200))  # delayed scaling has state now, which is not exported
    tensors = te_dist.export(model, format)
    plain = nn.Sequential(nn.Linear(200, 136), nn.GELU(), nn.Linear(136, 64, bias=False), nn.Linear(64, 8))
    plain.load_state_dict(tensors)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.get_parameter(name).to(exporting.HIGH_PRECISION[format]).float())


@pytest.mark.parametrize(
    ("format", "chosen"), [("fp8", recipe.Float8CurrentScaling()), ("fp8_block", recipe.Float8BlockScaling())]
)
def test_the_bytes_are_those_that_the_layer_multiplied_with(format: str, chosen: Any) -> None:
    """The exported weight means exactly what the layer's own quantized weight means."""
    model = converted(chosen)
    decoded = exporting.decode(te_dist.export(model, format))
    for name in ("0.weight", "2.weight"):
        weight = model.get_parameter(name).detach()
        own = chosen.quantizer_for(te_dist.QuantizerRole("linear", "weight", ""))
        assert torch.equal(decoded[name], own.quantize(weight).dequantize()), name
        assert not torch.equal(decoded[name], weight)
    assert torch.equal(decoded["3.weight"], model.get_parameter("3.weight").bfloat16().float())
    assert decoded.keys() == model.state_dict().keys()


def test_other_recipes_are_written_with_scales_of_full_precision() -> None:
    tensors = te_dist.export(converted(recipe.NVFP4BlockScaling()), "fp8_block")
    assert tensors["0.weight"].dtype == torch.float8_e4m3fn and tensors["0.weight_scale_inv"].shape == (2, 2)
    weight = converted().get_parameter("0.weight").detach()
    blocks = [weight[i : i + 128, j : j + 128].abs().max() for i in (0, 128) for j in (0, 128)]
    torch.testing.assert_close(tensors["0.weight_scale_inv"].flatten(), torch.stack(blocks) / 448.0)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"export expects format in .*'fp8_block'.* but got 'int4'"):
        te_dist.export(converted(), "int4")
    with pytest.raises(ValueError, match="no layer has a recipe"):
        te_dist.export(nn.Sequential(nn.Linear(8, 8)), "fp8")
    with pytest.raises(ValueError, match="expects scales beside 'w'"):
        exporting.decode({"w": torch.zeros(2, 2).to(torch.float8_e4m3fn)})


def shards_export_as_the_whole(rank: int, world: int) -> None:
    expected = te_dist.export(converted(), "fp8_block")
    model = converted()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randn(16, 200)).sum().backward()
    actual = te_dist.export(model, "fp8_block")
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name].view(torch.uint8), value.view(torch.uint8)), name


def test_shards_are_gathered(two_ranks: Callable[..., list[Any]]) -> None:
    two_ranks(shards_export_as_the_whole)


def test_a_run_becomes_a_llama_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names, the order of heads, gate and up, positions: the same logits; and FP8 read by transformers itself."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    run = tmp_path / "run"
    train(run, hidden=128, ffn=256, recipe={"layers.0.*": "bf16", "*": "fp8_block"}, steps=2, split_gate=True)
    assert cli.main(["export", str(run), "--format", "fp32"]) == 0
    assert f"step 2 of {run} in fp32" in capsys.readouterr().out
    _, built, _ = load(run)
    ours = built.model
    ours.compute_dtype = torch.float32
    for layer in ours.modules():
        if isinstance(layer, te_dist.modules.base.QuantizedLayer):
            layer.recipe = None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run / "export-fp32")
    tokens = torch.randint(0, 257, (2, 24))
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-4, atol=1e-5)

    assert cli.main(["export", str(run), "--format", "fp8_block", "--out", str(tmp_path / "fp8")]) == 0
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == [128, 128]
    assert {"lm_head", "model.layers.0.mlp.up_proj"} <= set(config["modules_to_not_convert"])
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    safetensors = pytest.importorskip("safetensors.torch")
    decoded = exporting.decode(safetensors.load_file(tmp_path / "fp8" / "model.safetensors"), torch.bfloat16)
    for layer in ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        assert torch.equal(read.get_parameter(f"{layer}.weight"), decoded[f"{layer}.weight"]), layer


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export", str(tmp_path / "none")]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    train(tmp_path / "run", steps=1, final_checkpoint=False)
    assert cli.main(["export", str(tmp_path / "run")]) == 2
    assert "has no checkpoint" in capsys.readouterr().err
    train(tmp_path / "run", steps=2)
    assert cli.main(["export", str(tmp_path / "run"), "--format", "fp8"]) == 2
    assert "this one trained unquantized" in capsys.readouterr().err

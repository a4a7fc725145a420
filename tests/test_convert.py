"""te_dist.convert: layers are swapped in place, nothing else about the model changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_dist
from te_dist.recipe import Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.attention(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_parameters_and_names_stay() -> None:
    model = Model()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    report = te_dist.convert(model, Float8CurrentScaling(), verbose=False)
    assert list(model.state_dict()) == names
    assert all(p is before[name] for name, p in model.named_parameters())
    assert len(report.converted) == 13 and not report.skipped
    assert isinstance(model.lm_head, te_dist.Linear) and isinstance(model.lm_head, nn.Linear)
    model(torch.arange(16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_high_precision_result_is_unchanged() -> None:
    torch.manual_seed(0)
    model = Model()
    tokens = torch.arange(16)
    before = model(tokens)
    te_dist.convert(model, Float8CurrentScaling(), verbose=False)
    with te_dist.autocast(enabled=False):
        assert torch.allclose(model(tokens), before, atol=1e-6)
    assert not torch.equal(model(tokens), before)


def test_recipes_by_name_pattern() -> None:
    model = Model()
    report = te_dist.convert(
        model,
        {"layers.*.mlp.*": NVFP4BlockScaling(), "layers.0.*": None, "layers.*": MXFP8BlockScaling()},
        verbose=False,
    )
    assert model.layers[0].mlp[0].recipe == NVFP4BlockScaling()  # the first pattern that matches counts
    assert type(model.layers[0].attention) is nn.Linear
    assert model.layers[1].attention.recipe == MXFP8BlockScaling()
    assert report.skipped == {"layers.0.attention": "'layers.0.*' is None", "lm_head": "no pattern matches"}


def test_first_and_last_blocks() -> None:
    model = Model()
    te_dist.convert(model, Float8BlockScaling(), first_last_layers_bf16=True, verbose=False)
    kinds = [type(layer.attention) for layer in model.layers]
    assert kinds == [nn.Linear, te_dist.Linear, te_dist.Linear, nn.Linear]
    with pytest.raises(ValueError, match="ModuleList"):
        te_dist.convert(nn.Sequential(nn.Linear(4, 4)), Float8BlockScaling(), first_last_layers_bf16=True)


def test_filter_size_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(8, 8), Odd(32, 32), nn.Linear(33, 32), nn.Linear(32, 64))
    report = te_dist.convert(model, NVFP4BlockScaling(), filter_fn=lambda m, name: name != "4", min_size=100)
    assert report.converted == ["0"]
    assert set(report.skipped) == {"1", "2", "3", "4"}
    printed = capsys.readouterr().out
    assert "1 of 5 linear layers quantized" in printed
    for reason in ("fewer than min_size 100", "Odd", "odd size", "filter_fn"):
        assert reason in printed


def test_again_and_meta() -> None:
    with torch.device("meta"):
        model = Model()
    te_dist.convert(model, MXFP8BlockScaling(), min_size=0, verbose=False)
    assert model.lm_head.weight.is_meta and isinstance(model.lm_head, te_dist.Linear)
    report = te_dist.convert(model, NVFP4BlockScaling(), min_size=0, verbose=False)
    assert len(report.converted) == 13 and model.lm_head.recipe == NVFP4BlockScaling()
    model.to_empty(device="cpu")
    model.load_state_dict(Model().state_dict())
    model(torch.arange(16)).sum().backward()


def test_hooks_and_mode_survive() -> None:
    model = Model().eval()
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    model.lm_head.weight.requires_grad_(False)
    te_dist.convert(model, Float8CurrentScaling(), verbose=False)
    model(torch.arange(16))
    assert calls == [1] and not model.lm_head.training and not model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("recipe", "message"),
    [("fp8", "'fp8'"), ({"*": "mxfp8"}, "recipe\\['\\*'\\]"), (Float8CurrentScaling, "Float8CurrentScaling")],
)
def test_wrong_recipe(recipe: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        te_dist.convert(Model(), recipe)


def test_wrong_model_and_size() -> None:
    with pytest.raises(TypeError, match=r"te_dist\.Linear"):
        te_dist.convert(nn.Linear(4, 4), Float8CurrentScaling())
    with pytest.raises(ValueError, match="min_size"):
        te_dist.convert(Model(), Float8CurrentScaling(), min_size="small")

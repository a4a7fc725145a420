"""Options of te-dist train: flags, YAML, their order, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_dist.launch.config import ConfigError, TrainConfig
from te_dist.launch.options import config_from, parser, read_config_file
from te_dist.launch.presets import PRESETS
from te_dist.launch.recipes import patterns_from, recipe_from, recipe_table, short_label
from te_dist.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 7\nlr: 1e-4\nseq-len: 64\nrecipe:\n  '*.fc2': nvfp4\n  '*': mxfp8\nsp: false\nlayers: null\n"
    )
    config = config_from(["--config", str(file), "--steps", "9"]).check()
    assert (config.steps, config.lr, config.seq_len, config.micro_batch) == (9, 1e-4, 64, TrainConfig().micro_batch)
    assert config.recipe == {"*.fc2": "nvfp4", "*": "mxfp8"} and config.layers is None


def test_what_is_saved_reads_back_equal_with_and_without_a_yaml_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--recipe", "*.proj=bf16", "--recipe", "nvfp4:disable_rht=true", "--preset", "8b", "--no-report"]
    config = config_from([*given, "--profile", "2:4"]).check()
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert TrainConfig(**read_config_file(str(file))).check() == config
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert TrainConfig(**read_config_file(str(file))).check() == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepss", "3"], "no option is called --stepss; did you mean --steps?"),
        (["--seq-length=3"], "did you mean --seq-len?"),
        (["--steps", "three"], "--steps expects a whole number but got 'three'"),
        (["--steps", "1.5"], "expects a whole number"),
        (["--steps", "0"], "steps expects at least 1 but got 0"),
        (["--lr", "fast"], "--lr expects a number"),
        (["--lr", "nan"], "lr expects a number above 0"),
        (["--preset", "9b"], "preset expects one of 1m"),
        (["--recipe", "fp8_curent"], "did you mean 'fp8_current'?"),
        (["--recipe", "mxfp8:rht=1"], "has no option 'rht'"),
        (["--recipe", "a=mxfp8", "--recipe", "a=bf16"], "'a' is there twice"),
        (["--data", "/no/such/file"], "data expects an existing file or folder but got '/no/such/file'"),
        (["--heads", "3"], "heads expects a divisor of hidden 128 but got 3"),
        (["--kv-heads", "3"], "kv_heads expects a divisor of heads 4"),
        (["--sp"], "sp expects tp of at least 2"),
        (["--tp", "2"], "tp 2 does not divide the 1 ranks"),
        (["--dp-shard", "3"], "dp_replicate 1 x dp_shard 3 x tp 1 is 3 but there are 1 ranks"),
        (["--profile", "5"], "profile expects START:STOP"),
        (["train.yaml"], "unexpected argument 'train.yaml'"),
        (["--config", "/no/file.yaml"], "cannot be read"),
    ],
)  # fmt: skip
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config_from(arguments).check()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps: 3\n", "no option is called 'stepps'; did you mean steps?"),
        ("steps: many\n", "steps expects a whole number but got 'many'"),
        ("compile: 3\n", "compile expects true or false but got 3"),
        ("- steps\n", "holds a list"),
        ("steps: [1\n", "is not YAML"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        config_from(["--config", str(file)]).check()
    assert message in str(error.value) and str(file) in str(error.value)


def test_tensor_parallel_sizes_are_checked_before_anything_is_built() -> None:
    with pytest.raises(ConfigError, match="tp expects a divisor of kv_heads 2 but got 4"):
        TrainConfig(tp=4).check(world=4)
    with pytest.raises(ConfigError, match="sp expects seq_len to be a multiple of tp 2 but got 33"):
        TrainConfig(tp=2, sp=True, seq_len=33).check(world=2)
    assert TrainConfig(tp=2, dp_replicate=2).check(world=8).data_parallel(8) == (2, 2)


def test_presets_have_the_sizes_of_their_names() -> None:
    for name, size in PRESETS.items():
        size.check()
        number = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert number * 0.75 < size.parameters < number * 1.3, (name, size.parameters)


def test_recipes_by_name_options_json_and_pattern() -> None:
    assert recipe_from("bf16") is None and recipe_from("tensorwise") == Float8CurrentScaling()
    assert recipe_from("fp8_delayed:amax_history_len=16,margin=1") == DelayedScaling(amax_history_len=16, margin=1)
    assert recipe_from(Float8BlockScaling(use_f32_scales=True).to_json()) == Float8BlockScaling(use_f32_scales=True)
    assert patterns_from(["*.fc1=nvfp4", "fp8_current:amax_epsilon=1e-4"]) == {
        "*.fc1": "nvfp4", "*": "fp8_current:amax_epsilon=1e-4"
    }  # fmt: skip
    table = recipe_table({"*.mlp": "nvfp4", "*": "mxfp8"})
    assert table["head"] is None and list(table)[-2:] == ["*.mlp", "*"]  # the head is left alone, and comes first
    assert recipe_table({"head": "mxfp8", "*": "nvfp4"}) == {"head": MXFP8BlockScaling(), "*": NVFP4BlockScaling()}
    assert short_label({"a": "nvfp4", "*": "blockwise"}) == "nvfp4+fp8_block" and short_label({"*": "none"}) == "bf16"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    parser().print_help()
    shown = capsys.readouterr().out
    for name in TrainConfig().as_dict():
        assert "--" + name.replace("_", "-") in shown

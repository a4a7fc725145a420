"""overlap="off" | "auto" | "require": what is chosen, what is refused, and that all ranks say the same."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import RECIPES, linear, own_mesh, parallel_twin, sample, step, tp_mesh
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import te_dist
from te_dist.parallel import (
    ColwiseParallel,
    OverlapUnavailable,
    RowwiseParallel,
    overlap_report,
    overlapped,
    parallelize,
    set_overlap,
)
from te_dist.parallel.comm import TensorParallel
from te_dist.parallel.userbuffers import Method, Overlapped, capability, read_table, reserve
from te_dist.parallel.userbuffers.choice import _Known
from te_dist.parallel.userbuffers.methods import DEFAULTS, table_name
from te_dist.parallel.userbuffers.schedules import feature_bounds

Pools = Callable[[int], Any]


# ------------------------------------------------------------------------------------------------- the table
def test_the_defaults_are_those_that_transformer_engine_has() -> None:
    table = read_table(None)
    assert {name: table[name].fprop.name for name in ("qkv", "fc1", "proj", "fc2")} == {
        "qkv": "ring_exchange", "fc1": "ring_exchange", "proj": "pipeline", "fc2": "pipeline",
    }  # fmt: skip
    assert [table["qkv"].dgrad.name, table["qkv"].wgrad.name] == ["bulk", "bulk"]
    assert [table["proj"].dgrad.name, table["proj"].wgrad.name] == ["ring_exchange", "bulk"]


def test_a_dictionary_and_a_file_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    given = {
        "qkv_fprop": {"method": "ring_exchange", "aggregate": 1},
        "fc1_dgrad": {"method": "pipeline", "num_splits": 8},
        "proj_wgrad": {"method": "external"},
        "fc2_fprop": "off",
    }
    path = tmp_path / "tp_comm_overlap_cfg.yaml"
    path.write_text(
        "qkv_fprop:\n  method: ring_exchange\n  aggregate: 1\n"
        "fc1_dgrad:\n  method: pipeline\n  num_splits: 8\n"
        "proj_wgrad: {method: external}\nfc2_fprop: 'off'\n"
    )
    table = read_table(given)
    assert table == read_table(path) == read_table(str(path))
    assert table["qkv"].fprop == Method("ring_exchange", aggregate=True)
    assert table["fc1"].dgrad == Method("pipeline", 8)
    assert table["proj"].wgrad.name == "bulk" and not table["fc2"].fprop.is_on
    assert table["fc2"].dgrad == DEFAULTS["fc2"].dgrad and table["row"] == DEFAULTS["row"]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"qkv_forward": "off"}, ValueError, "qkv_forward"),
        ({"attn_fprop": "off"}, ValueError, "attn_fprop"),
        ({"qkv_fprop": "pipeline"}, ValueError, "ring_exchange"),
        ({"proj_dgrad": "bulk"}, ValueError, "proj_dgrad"),
        ({"proj_fprop": {"method": "pipeline", "splits": 2}}, ValueError, "splits"),
        ({"proj_fprop": {"num_splits": 0}}, ValueError, "num_splits"),
        ({"proj_fprop": {"num_splits": True}}, ValueError, "num_splits"),
        ({"proj_dgrad": {"aggregate": "yes"}}, ValueError, "aggregate"),
        (3, TypeError, "int"),
        ("no/such/file.yaml", FileNotFoundError, "file.yaml"),
    ],
)
def test_a_wrong_table_is_refused(given: Any, error: type[Exception], words: str) -> None:
    pytest.importorskip("yaml")
    with pytest.raises(error, match=words):
        read_table(given)


def test_options_of_kernels_that_are_not_there_are_named() -> None:
    with pytest.warns(UserWarning, match=r"\['num_sm', 'set_sm_margin'\] have no effect"):
        read_table({"qkv_fprop": {"num_sm": 4, "set_sm_margin": True}, "fc1_fprop": {"cga_size": 0}})


@pytest.mark.parametrize(
    ("layer", "stage", "is_row", "name"),
    [
        ("layers.0.self_attention.layernorm_qkv", "", False, "qkv"),
        ("model.layers.3.mlp.gate_proj", "", False, "fc1"),
        ("model.layers.3.mlp.down_proj", "", True, "fc2"),
        ("layers.1.layernorm_mlp", "fc2", True, "fc2"),
        ("head", "", False, "column"),
        ("mixer.out", "", True, "row"),
        ("blocks.proj", "", False, "column"),  # a name of row-parallel layers
    ],
)
def test_layers_are_found_by_their_names(layer: str, stage: str, is_row: bool, name: str) -> None:
    assert table_name(layer, stage, is_row) == name


@pytest.mark.parametrize("features", [1, 100, 128, 130, 256, 384, 1000, 4096])
@pytest.mark.parametrize("splits", [1, 2, 3, 4, 8])
def test_parts_of_features_are_whole_blocks(features: int, splits: int) -> None:
    bounds = feature_bounds(features, splits)
    assert bounds[0][0] == 0 and bounds[-1][1] == features and len(bounds) <= splits
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    widths = [last - first for first, last in bounds]
    assert all(width % 128 == 0 for width in widths[:-1]) and len(set(widths[:-1])) <= 1 and widths[-1] <= widths[0]


# ------------------------------------------------------------------------------------------------- the choice
class Block(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        common: dict[str, Any] = {"dtype": torch.bfloat16, "recipe": RECIPES["current"], "device": device}
        self.qkv = te_dist.LayerNormLinear(64, 64, **common)
        self.proj = te_dist.Linear(64, 64, **common)
        self.mlp = te_dist.LayerNormMLP(64, 128, **common)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.proj(self.qkv(x)))


PLAN = {"qkv": "column", "proj": "row", "mlp": "column"}


def comms(model: nn.Module) -> dict[str, list[Any]]:
    return {name: [s.comm for s in m.spec.stages] for name, m in model.named_modules() if hasattr(m, "spec")}


def chosen(rank: int, world: int) -> None:
    mesh = tp_mesh(world)
    model = parallelize(Block(), mesh, PLAN, sequence_parallel=True, overlap="require")
    found = comms(model)
    assert all(type(comm) is Overlapped for stage in found.values() for comm in stage)
    assert found["qkv"][0].column == DEFAULTS["qkv"] and found["proj"][0].row == DEFAULTS["proj"]
    assert found["mlp"][0].column == DEFAULTS["fc1"] and found["mlp"][1].row == DEFAULTS["fc2"]

    # By pattern, and by product.
    model = parallelize(
        Block(), mesh, PLAN, sequence_parallel=True, overlap={"mlp": "off", "*": "auto"},
        overlap_config={"proj_fprop": "ring_exchange", "qkv_fprop": "off"},
    )  # fmt: skip
    found = comms(model)
    assert all(type(comm) is TensorParallel for comm in found["mlp"])
    assert found["proj"][0].row.fprop.name == "ring_exchange" and not found["qkv"][0].column.fprop.is_on
    x = sample(16, 64, "cpu", 1)
    with overlap_report(model) as report:
        step(model, x, x)
    assert {e.layer for e in report.entries} == {"qkv", "proj"}
    assert not report.select(layer="qkv", product="fprop") and report.select(layer="proj", product="fprop")
    assert "mlp: off" in str(report)

    # Off is off, and what was chosen can be taken back.
    assert all(
        type(comm) is TensorParallel
        for stage in comms(parallelize(Block(), mesh, PLAN, sequence_parallel=True)).values()
        for comm in stage
    )
    set_overlap(model, "off")
    assert all(type(comm) is TensorParallel for stage in comms(model).values() for comm in stage)

    # torch's own way in.
    styles = {
        "qkv": ColwiseParallel(sequence_parallel=True, overlap="require", overlap_config={"column_dgrad": "pipeline"}),
        "proj": RowwiseParallel(sequence_parallel=True),
    }
    found = comms(parallelize_module(Block(), mesh, styles))
    assert found["qkv"][0].column.dgrad.name == "pipeline" and type(found["proj"][0]) is TensorParallel
    with pytest.raises(ValueError, match="always"):
        parallelize(Block(), mesh, PLAN, sequence_parallel=True, overlap="always")
    with pytest.raises(ValueError, match="qkv_all"):
        parallelize(Block(), mesh, PLAN, sequence_parallel=True, overlap="auto", overlap_config={"qkv_all": "off"})


def test_layers_get_their_methods(rank_pools: Pools) -> None:
    rank_pools(2).run(chosen)


def one_lacks_it(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Rank 1 says that it cannot; what all of them do then."""
    _Known.reasons.clear()
    before = capability.missing_here
    if rank == 1:
        capability.missing_here = lambda group, device: "no peer access to GPU 0"  # type: ignore[assignment]
    said: list[str] = []
    try:
        for attempt in (
            lambda: parallelize(Block(), tp_mesh(world), PLAN, sequence_parallel=True, overlap="require"),
            lambda: overlapped(TensorParallel.of(tp_mesh(world), None), "require"),
        ):
            with pytest.raises(OverlapUnavailable) as caught:
                attempt()
            said.append(str(caught.value))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            model = parallelize(Block(), tp_mesh(world), PLAN, sequence_parallel=True, overlap="auto")
        assert all(type(comm) is TensorParallel for stage in comms(model).values() for comm in stage)
        x = sample(16, 64, "cpu", 1)
        with overlap_report(model) as report:
            step(model, x, x)
        assert not report.entries and "no peer access" in str(report)
        return said, [str(w.message) for w in seen if "overlap" in str(w.message)]
    finally:
        capability.missing_here = before
        _Known.reasons.clear()


def test_one_rank_that_cannot_speaks_for_all(rank_pools: Pools) -> None:
    results = rank_pools(2).run(one_lacks_it)
    for said, _ in results:
        assert all("rank(s) [1]: no peer access to GPU 0" in text for text in said), said
    assert len(results[0][1]) == 1 and "no peer access" in results[0][1][0], "one warning, which says why"
    assert not results[1][1]


def asks_once(rank: int, world: int) -> int:
    _Known.reasons.clear()
    calls = []
    before = capability.missing_here
    capability.missing_here = lambda group, device: calls.append(1) or ""  # type: ignore[func-returns-value, assignment]
    try:
        for _ in range(3):
            parallelize(Block(), tp_mesh(world), PLAN, sequence_parallel=True, overlap="auto")
    finally:
        capability.missing_here = before
    return len(calls)


def test_a_group_is_asked_once(rank_pools: Pools) -> None:
    assert rank_pools(2).run(asks_once) == [1, 1]


def needs_rows(rank: int, world: int) -> list[str]:
    with pytest.raises(OverlapUnavailable, match="sequence_parallel"):
        parallelize(Block(), tp_mesh(world), PLAN, overlap="require")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        parallelize(Block(), tp_mesh(world), PLAN, overlap="auto")
        gathered = nn.Sequential(te_dist.Linear(64, 64, recipe=RECIPES["mxfp8"]))
        with pytest.raises(OverlapUnavailable, match="gathered by the block"):
            parallelize(
                nn.Sequential(gathered), tp_mesh(world), {"0": "gather", "0.0": "column"}, sequence_parallel=True,
                overlap="require",
            )  # fmt: skip
    return [str(w.message) for w in seen if "overlap" in str(w.message)]


def test_without_sequence_parallelism_there_is_nothing_to_overlap(rank_pools: Pools) -> None:
    first, second = rank_pools(2).run(needs_rows)
    assert len(first) == 1 and "sequence_parallel" in first[0] and not second


def test_what_no_machine_of_this_kind_can() -> None:
    device = torch.device("cuda")
    assert "hosts" not in capability.missing_between(["a/0", "a/1"], device)
    assert "['a', 'b']" in capability.missing_between(["a/0", "b/0"], device)
    if not torch.cuda.is_available():
        assert capability.missing_here(None, device) == "no CUDA device"
    assert "xpu" in capability.missing_here(None, torch.device("xpu"))


def test_several_ranks_on_a_device_need_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in capability.missing_between(["a/0", "a/0"], device)
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    assert capability.missing_between(["a/0", "a/0"], device) == ""


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="int"):
        set_overlap(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="TensorParallel"):
        overlapped(None)  # type: ignore[arg-type]


def links_go_with_their_group(rank: int, world: int) -> None:
    import torch.distributed as dist

    from te_dist.parallel.userbuffers import registry

    mesh = own_mesh("cpu")
    group = mesh.get_group()
    name = group.group_name
    layer = parallel_twin(linear("linear", 64, 64, None, "cpu"), mesh, "column", sequence_parallel=True)
    set_overlap(layer, "require")(sample(8, 64, "cpu", 1))
    reserve(group, 1 << 20, "cpu")  # nothing to do
    for size in (0, True, 1.5):
        with pytest.raises(ValueError, match="positive number of bytes"):
            reserve(group, size)  # type: ignore[arg-type]
    assert any(key[0] == name for key in registry._Links.made)
    dist.destroy_process_group(group)
    assert not any(key[0] == name for key in registry._Links.made)


def test_a_link_ends_with_its_group(rank_pools: Pools) -> None:
    rank_pools(2).run(links_go_with_their_group)


# ------------------------------------------------------------------------------------------------- the documentation
DOCS = Path(__file__).resolve().parent.parent / "docs"


def examples_run(rank: int, world: int, examples: list[str]) -> str:
    names: dict[str, Any] = {"__name__": "docs"}
    for example in examples:
        exec(compile(example, "overlap.md", "exec"), names)
    return str(names["report"])


def test_the_examples_of_the_documentation_run(rank_pools: Pools) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / "overlap.md").read_text(), re.DOTALL)
    assert len(examples) == 4
    for text in rank_pools(2).run(examples_run, examples):
        shown = [line.split() for line in text.splitlines()]
        assert ["0.self_attention.layernorm_qkv", "forward", "fprop", "ring_exchange", "2", "1", "33,792"] in [
            line[:7] for line in shown
        ], text
        assert ["0.self_attention.proj", "forward", "fprop", "pipeline", "2", "1", "65,536"] in [
            line[:7] for line in shown
        ], text


def test_the_documented_methods_are_those_that_there_are() -> None:
    """Rows of the table: layer, product, method; an empty cell repeats the one above."""
    from te_dist.parallel.userbuffers.methods import ALLOWED

    text = (DOCS / "overlap.md").read_text()
    found: dict[tuple[bool, str], list[str]] = {}
    layer = product = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or cells[0] in ("layer", "---"):
            continue
        layer, product = cells[0] or layer, cells[1] or product
        found.setdefault(("row" in layer, product), []).append(cells[2].strip("`"))
    assert {key: sorted(value) for key, value in found.items()} == {
        key: sorted(set(value) - {"off"}) for key, value in ALLOWED.items()
    }
    for (is_row, product), methods in found.items():
        assert methods[0] == DEFAULTS["row" if is_row else "column"].of(product).name

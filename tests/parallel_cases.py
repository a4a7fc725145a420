"""One process against several: layers, sizes and comparisons of the tensor parallel tests.

Every rank has the whole model and the whole data, computes what one process computes, and compares with its part.
"""

from __future__ import annotations

import copy
import datetime
from typing import Any

import torch
import torch.distributed as dist
from cases import varied
from gemm_cases import sqnr
from layer_cases import FLOORS
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_dist
from te_dist import recipe as recipes
from te_dist.parallel.modules import ParallelOptions, make_parallel
from te_dist.recipe import Recipe

RECIPES: dict[str, Recipe | None] = {
    "none": None,
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    # Without random bits, so that ranks can be compared with one process bit for bit.
    "nvfp4": recipes.NVFP4BlockScaling(fp8_quant_bwd_grad=recipes.QParams(stochastic_rounding=False)),
}
MODES = {"column": ("column", False), "row": ("row", False), "column+SP": ("column", True), "row+SP": ("row", True)}

# Where a sum crosses ranks, each rank's partial result is rounded to bf16 before the sum is: one process rounds once.
# Four roundings (two partial results, their sum, what a norm makes of it) of 55 dB each give 49; 4 dB of slack.
SUMMED = 45.0

# A GPU's kernels add up in another order for another width, and Hopper's FP8 tensor cores keep no more than 13 bits
# below the largest addend (gemm_cases.NATIVE_SQNR: 48 dB): the errors of two results are 45, with the roundings above
# 43; 3 of slack.
SUMMED_ON_GPU = 40.0

_meshes: dict[tuple[int, str], Any] = {}


def tp_mesh(world: int, device: str = "cpu") -> Any:
    key = (world, device)
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device, (world,), mesh_dim_names=("tp",))
    return _meshes[key]


def own_mesh(device: str, timeout: datetime.timedelta | None = None) -> Any:
    """A mesh around a group of its own: one that has failed is not usable again. Under a name of its own: DTensor takes
    meshes of the same ranks and names for one, and would exchange over this group what other tests do later."""
    group = dist.new_group(timeout=timeout)
    return DeviceMesh.from_group(group, device, mesh_dim_names=(f"tp{group.group_name}",))


def sizes(world: int) -> tuple[int, int, int]:
    """M, K, N, so that each rank's share is made of whole blocks of every format. No dimension is so long that the
    CPU's matmul adds it up in another order for another width of the result."""
    return 128 * world, 128 * world, 128 * world


def shake(module: nn.Module) -> nn.Module:
    """Parameters that are not the ones and zeros which hide a missing factor."""
    with torch.no_grad():
        for name, param in module.named_parameters():
            if "norm" in name or "bias" in name:
                param.add_(torch.randn_like(param) * 0.2)
    return module


def parallel_twin(module: nn.Module, mesh: Any, mode: str, **options: Any) -> nn.Module:
    twin = copy.deepcopy(module)
    make_parallel(twin, mesh, mode, ParallelOptions(**options))
    return twin


def outlier_on_last_rank(x: Tensor) -> Tensor:
    x[-3:, -5:] *= 64
    return x


def sample(rows: int, cols: int, device: str, seed: int) -> Tensor:
    return outlier_on_last_rank(varied((rows, cols), torch.bfloat16, seed)).to(device)


def step(module: nn.Module, x: Tensor, dy: Tensor, *args: Any, call: Any = None) -> dict[str, Tensor]:
    """y, dx and every parameter's gradient (this rank's part of a DTensor's)."""
    module.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    torch.manual_seed(5)
    y = (module if call is None else call)(leaf, *args)
    y.backward(dy)
    made = {"y": y.detach(), "dx": leaf.grad}
    for name, param in module.named_parameters():
        assert param.grad is not None, name
        made[name] = local(param.grad)
    return made


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def part(t: Tensor, dim: int | None, rank: int, world: int) -> Tensor:
    """A rank's part, as DTensor cuts it."""
    if dim is None:
        return t
    pieces = t.chunk(world, dim)
    if rank < len(pieces):
        return pieces[rank]
    shape = list(t.shape)
    shape[dim] = 0
    return t.new_empty(shape)


def param_dim(module: nn.Module, name: str) -> int | None:
    """Along which dimension a DTensor parameter is spread."""
    placement = dict(module.named_parameters())[name].placements[0]
    return placement.dim if placement.is_shard() else None


def compare(
    what: str,
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    exact: set[str],
    floor: float,
    flips: str | None = None,
) -> list[str]:
    """Names that differ where they must not, or too much where they may.

    `flips`: the recipe of a layer of several products. On a GPU what comes between them differs by a rounding here and
    there, and where it is quantized, by a step: the errors of two quantizations.
    """
    assert actual.keys() == expected.keys(), what
    wrong = []
    for name, value in expected.items():
        made, least = actual[name], floor
        if value.is_cuda:
            least = min(floor, SUMMED_ON_GPU, SUMMED_ON_GPU if flips is None else FLOORS[flips] - 3)
        if made.shape != value.shape or made.dtype != value.dtype:
            wrong.append(f"{what} {name}: {made.dtype} {list(made.shape)} != {value.dtype} {list(value.shape)}")
        elif name in exact and not value.is_cuda:
            if not torch.equal(made, value):
                wrong.append(f"{what} {name}: {sqnr(made, value.double()):.1f} dB, not equal")
        elif value.numel() and (ratio := sqnr(made, value.double())) < least:
            wrong.append(f"{what} {name}: {ratio:.1f} dB < {least}")
    return wrong


def differing(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names that differ in a bit: for the same products in the same sizes, on any device."""
    assert actual.keys() == expected.keys(), what
    return [f"{what} {name}" for name, value in expected.items() if not torch.equal(actual[name], value)]


def linear(kind: str, k: int, n: int, recipe: Recipe | None, device: str, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    common = {"recipe": recipe, "device": device, "dtype": torch.bfloat16, **options}
    if kind == "linear":
        return shake(te_dist.Linear(k, n, name="layer", **common))
    if kind == "layernorm_linear":
        return shake(te_dist.LayerNormLinear(k, n, name="layer", **common))
    if kind == "layernorm_mlp":
        return shake(te_dist.LayerNormMLP(k, n, name="layer", **common))
    return shake(te_dist.GroupedLinear(3, k, n, name="layer", **common))


def make(kind: str, k: int, n: int, recipe: Any, device: str) -> nn.Module:
    if kind != "transformer":
        return linear(kind, k, n, recipe, device)
    torch.manual_seed(3)
    return shake(
        te_dist.TransformerLayer(
            k, n, 4, hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu", params_dtype=torch.bfloat16,
            recipe=recipe, device=device,
        )
    )  # fmt: skip

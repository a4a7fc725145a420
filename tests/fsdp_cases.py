"""Models, meshes, training loops and comparisons of the FSDP2 tests. Everything runs on ranks of a pool."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cases import varied
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import te_dist
from te_dist import recipe as recipes
from te_dist.parallel import fully_shard
from te_dist.recipe import Recipe
from te_dist.tensors import QuantizedStorage
from te_dist.tensors.gathered import GatheredWeight
from te_dist.torch_compat import whole_tensor

RECIPES: dict[str, Recipe | None] = {
    "current": recipes.Float8CurrentScaling(),
    "current_pow2": recipes.Float8CurrentScaling(use_power_2_scales=True),
    "delayed": recipes.DelayedScaling(amax_history_len=3),
    "block": recipes.Float8BlockScaling(),
    "block_1d": recipes.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp8_2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "nvfp4_1d": recipes.NVFP4BlockScaling(disable_2d_quantization=True),
}
MAIN = ("current", "delayed", "block", "mxfp8", "nvfp4")  # one for each recipe class
ONE_PLANE = ("current", "current_pow2", "delayed", "block", "mxfp8_2d", "nvfp4")
COMMON_BUFFERS = ("_scale_inv", "_amax_rowwise", "_amax_columnwise")
# Every combination of what each test otherwise takes a cross section of.
FULL_MATRIX = os.environ.get("TE_DIST_FULL_MATRIX") == "1"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mesh_of(device: str, *shape: int, names: Sequence[str] | None = None) -> DeviceMesh:
    """All ranks may share one GPU: FSDP2 would take the GPU of the rank's number."""
    if device == "cuda":
        torch.cuda.set_device(0)
    default = {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tp")}[len(shape)]
    return init_device_mesh(device, shape, mesh_dim_names=tuple(names or default))


# ------------------------------------------------------------------------------------------------- models
class Block(nn.Module):
    """Two linear layers of sizes that shards and blocks do not divide; checkpointed inside if asked."""

    def __init__(self, width: int, hidden: int, recipe: Recipe | None, remat: str | None) -> None:
        super().__init__()
        self.up = te_dist.Linear(width, hidden, recipe=recipe)
        self.down = te_dist.Linear(hidden, width, recipe=recipe)
        self.remat = remat

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.remat not in ("inner", "inner reentrant"):
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.remat != "inner")


class Model(nn.Module):
    def __init__(self, recipe: Recipe | None, hidden: Sequence[int], width: int, remat: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, h, recipe, remat) for h in hidden)
        self.head = nn.Linear(width, 8, bias=False)
        self.remat = remat

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.remat in ("outer", "outer reentrant"):
                x = checkpoint(block, x, use_reentrant=self.remat != "outer")
            else:
                x = block(x)
        return self.head(x)


WIDTH, HIDDEN = 96, (160, 66)


def make(
    recipe: str | Recipe | None,
    device: str = "cpu",
    *,
    hidden: Sequence[int] = HIDDEN,
    width: int = WIDTH,
    remat: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Model:
    recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    torch.manual_seed(seed)
    return Model(recipe, hidden, width, remat).to(device, dtype)


def shard(model: Model, mesh: DeviceMesh | None = None, backend: str | None = None, **options: Any) -> Model:
    for block in model.blocks:
        if backend is not None:
            block.compile(fullgraph=True, backend=backend)
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def build(recipe: str | Recipe | None, device: str, mesh: DeviceMesh | None = None, **options: Any) -> Model:
    """A sharded model; options of ``make`` and of ``shard``."""
    own = {k: options.pop(k) for k in ("hidden", "width", "remat", "dtype", "seed") if k in options}
    return shard(make(recipe, device, **own), mesh, **options)


# ------------------------------------------------------------------------------------------------- training
SGD = "sgd"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # Not foreach, which would be the default for plain tensors on a GPU, but not for DTensors.
    SGD: lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=3e-3, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=3e-3, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=3e-3, fused=True),
    "muon_like": lambda params: SignedMomentum(params, lr=1e-3),
}


class SignedMomentum(torch.optim.Optimizer):
    """An optimizer that knows nothing of torch's: it orthogonalises nothing, but like Muon it works on whole DTensors
    with arithmetic of its own and keeps one buffer."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.add_(buffer.sign(), alpha=-group["lr"])


def batches(steps: int, parts: int, device: str, width: int = WIDTH, rows: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(parts, rows, width, generator=generator).to(device) for _ in range(steps)]


def train(
    model: nn.Module,
    data: list[Tensor],
    rank: int | None,
    *,
    optimizer: str | torch.optim.Optimizer = "adamw",
    micro: int = 1,
    dtype: torch.dtype | None = None,
    first_step: int = 0,
    clip: float | None = None,
    loss_scale: float = 1.0,
    after: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Losses of this rank, or with rank None of one process that does all the ranks' parts one after the other."""
    made = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    losses = []
    for step, batch in enumerate(data[first_step:], first_step):
        total = 0.0
        for part in range(micro):
            if rank is not None and micro > 1:
                model.set_requires_gradient_sync(part == micro - 1)  # type: ignore[operator]
            for r in range(len(batch)) if rank is None else [rank]:
                torch.manual_seed(1000 * step + 10 * part + r)  # stochastic rounding
                x = batch[r].chunk(micro)[part].to(dtype).requires_grad_()
                loss = model(x).float().square().mean() * loss_scale
                loss.backward()
                total += float(loss.detach())
        if rank is None:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.div_(len(batch) * loss_scale)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        made.zero_grad()
        losses.append(total)
        after(step)
    return losses


# ------------------------------------------------------------------------------------------------- comparisons
def full(t: Tensor) -> Tensor:
    return whole_tensor(t.detach())


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict, by torch's own function; where that ends the process (gloo on a GPU), by hand."""
    if next(model.parameters()).is_cuda:
        return {name: whole_tensor(value) for name, value in get_model_state_dict(model).items()}
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def differences(expected: nn.Module, actual: nn.Module) -> dict[str, float]:
    """By parameter: 0.0 where equal bit for bit, else the relative size of the difference."""
    theirs = dict(actual.named_parameters())
    found = {}
    for name, p in expected.named_parameters():
        a, b = full(p).double(), full(theirs[name]).double()
        found[name] = 0.0 if torch.equal(a, b) else float((a - b).norm() / a.norm())
    return found


def assert_same(expected: nn.Module, actual: nn.Module, tolerance: float = 0.0, what: str = "") -> None:
    far = {name: d for name, d in differences(expected, actual).items() if not d <= tolerance}
    assert not far, f"{what}: {far}"


def gathered(module: nn.Module, name: str = "weight") -> QuantizedStorage:
    """The storage behind an unsharded parameter, in tensor parallelism the local one."""
    weight = getattr(module, name)
    local = weight._local_tensor if isinstance(weight, DTensor) else weight
    assert isinstance(local, GatheredWeight), f"{name} is a {type(local).__name__}"
    return local.quantized_storage


def assert_storage_equals(storage: QuantizedStorage, expected: QuantizedStorage, what: str = "") -> None:
    assert storage.inner_names() == expected.inner_names(), what
    for name in expected.inner_names():
        mine, theirs = getattr(storage, name), getattr(expected, name)
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype, (what, name)
        assert torch.equal(mine, theirs), (what, name)


def whole_weight(storage: QuantizedStorage, weight: Tensor, scale: Tensor | None = None) -> QuantizedStorage:
    """The whole weight quantized by one process, with the planes of `storage`."""
    quantizer = storage.quantizer
    if scale is not None:
        quantizer = te_dist.Float8Quantizer.around(scale, torch.zeros_like(scale), quantizer)
    out = storage.quantizer.make_empty(weight.shape, dtype=weight.dtype, device=weight.device)
    quantizer._quantize_into(weight, out, None, None, None)
    return out


def has_memory(buffer: Tensor) -> bool:
    return buffer.untyped_storage().size() > 0


def plane_buffers(storage: QuantizedStorage) -> list[Tensor]:
    return [getattr(storage, name) for name in storage.inner_names() if name not in COMMON_BUFFERS]


def weight_of(rows: int, cols: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return varied((rows, cols), dtype, seed).to(device)


@contextlib.contextmanager
def counted(module: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """Calls of a function, with their positional arguments."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(module, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    setattr(module, name, spy)
    try:
        yield calls
    finally:
        setattr(module, name, real)


def twin(model: Model) -> Model:
    return copy.deepcopy(model)

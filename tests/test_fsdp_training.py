"""Training under FSDP2 with quantized gathers against one process.

On two ranks sums over ranks have one order, and everything is bit-equal. Where more ranks or two-dimensional meshes add
up in another order the difference is that of float32 sums, stated with each test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_cases as cases
import pytest
import torch
from fsdp_cases import MAIN, RECIPES, assert_same, batches, build, full, make, mesh_of, train
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import te_dist
from te_dist.parallel import all_gather_report, comm_report, fully_shard, parallelize
from te_dist.recipe import DelayedScaling, MMParams, Recipe

Pools = Callable[[int], RankPool]
FULL_MATRIX = cases.FULL_MATRIX
STEPS = 20
FEWER_STEPS = STEPS if FULL_MATRIX else 6  # what may go wrong in these ways goes wrong in a few
# A sum of a few float32 numbers in another order, amplified by 20 steps: quantized bytes flip where a value lies on the
# border of two codes, which for one weight in a thousand moves it by a sixteenth (E4M3) or a fourth (E2M1).
REORDERED = 5e-3


def reordered(device: str) -> float:
    """For one batch in place of two: on a CPU the products of forward are the same, row by row; a GPU may choose other
    kernels for more rows."""
    return 1e-5 if device == "cpu" else REORDERED


def single(recipe: str, device: str, data: list[Tensor], **options: Any) -> nn.Module:
    """One process: all ranks' parts one after the other, gradients averaged. Delayed scaling sees them as one batch,
    because its history is that of a step and not of a part."""
    model = make(recipe, device)
    if recipe != "delayed":
        train(model, data, None, **options)
        return model
    # The mean over so many more rows has so much smaller gradients: scales that start at one would show it.
    train(model, [x.flatten(0, 1)[None] for x in data], None, loss_scale=float(len(data[0])), **options)
    return model


# ------------------------------------------------------------------------------------------------- one process
def check_twenty_steps(rank: int, world: int, device: str, recipe: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(STEPS, world, device)
    # One batch of 32 rows or two of 16: the products of wgrad add up in another order. AdamW, which divides by the size
    # of a gradient, would make something of that; SGD shows it as it is.
    tolerance, optimizer = (reordered(device), cases.SGD) if recipe == "delayed" else (0.0, "adamw")
    reference = single(recipe, device, data, optimizer=optimizer)
    start = make(recipe, device)
    assert max(cases.differences(start, reference).values()) > 0.01, "nothing was learnt"
    losses: dict[str, list[float]] = {}
    ways: dict[str, dict[str, Any]] = {
        "reshard": {"reshard_after_forward": True},
        "no reshard": {"reshard_after_forward": False},
        "checkpointing": {"remat": "inner"},
        "compiled": {"backend": "aot_eager"},
    }
    for name, options in ways.items():
        torch._dynamo.reset()
        model = build(recipe, device, mesh, **options)
        losses[name] = train(model, data, rank, optimizer=optimizer)
        assert_same(reference, model, tolerance, f"{recipe}, {name}")
        assert losses[name] == losses["reshard"], f"{recipe}, {name}"


@pytest.mark.parametrize("recipe", MAIN)
def test_twenty_steps_equal_one_process(rank_pools: Pools, device: str, recipe: str) -> None:
    rank_pools(2).run(check_twenty_steps, device, recipe)


# One process in place of two ranks has products of more rows, for which a GPU may choose another kernel. Sums in
# float32 then differ in their last bits; those of the tensor core's short accumulator differ in the tenth, and over
# twice as many products as without microbatches that was 0.9 % of a weight.
FLOAT32_SUMS = DelayedScaling(amax_history_len=3, fp8_gemm_fprop=MMParams(use_split_accumulator=True))


def accumulated(recipe: Recipe | None, device: str, data: list[Tensor], micro: int) -> nn.Module:
    """One process: on each rank microbatches first, then the sum over ranks."""
    model = make(recipe, device)
    optimizer = cases.OPTIMIZERS["adamw"](model.parameters())
    if isinstance(recipe, DelayedScaling):  # microbatches of all ranks together, as in ``single``
        together = [torch.cat([torch.cat([x.chunk(micro)[part] for x in batch]) for part in range(micro)])
                    for batch in data]  # fmt: skip
        scale = float(len(data[0]))
        train(model, [x[None] for x in together], None, optimizer=cases.SGD, micro=micro, loss_scale=scale)
        return model
    for step, batch in enumerate(data):
        total: dict[str, Tensor] = {}
        for r in range(len(batch)):
            for part in range(micro):
                torch.manual_seed(1000 * step + 10 * part + r)
                model(batch[r].chunk(micro)[part]).square().mean().backward()
            for name, p in model.named_parameters():
                total[name] = p.grad if name not in total else total[name] + p.grad
                p.grad = None
        for name, p in model.named_parameters():
            p.grad = total[name] / len(batch)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_accumulation(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(FEWER_STEPS, world, device)
    for name in MAIN:
        recipe = FLOAT32_SUMS if name == "delayed" else RECIPES[name]
        reference = accumulated(recipe, device, data, 2)
        tolerance, optimizer = (reordered(device), cases.SGD) if name == "delayed" else (0.0, "adamw")
        for reshard in (True, False):
            model = build(recipe, device, mesh, reshard_after_forward=reshard)
            train(model, data, rank, micro=2, optimizer=optimizer)
            assert_same(reference, model, tolerance, f"{name}, reshard {reshard}")
            model = build(recipe, device, mesh, reshard_after_forward=reshard)
            model.set_reshard_after_backward(False)  # one gather serves several steps' forward and backward
            model(data[0][rank]).sum().backward()
            model(data[1][rank]).sum().backward()


def test_gradient_accumulation(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_accumulation, device)


def mixed_precision_reference(recipe: str, device: str, data: list[Tensor], optimizer: str) -> nn.Module:
    """param_dtype bf16, reduce_dtype fp32, in one process and without FSDP2: weights are quantized from float32, and
    their gradients are float32; the other parameters are cast, and their gradients are bf16, summed in float32."""
    model = make(recipe, device)
    made = cases.OPTIMIZERS[optimizer](model.parameters())
    scale = 1.0
    if recipe == "delayed":  # as in ``single``
        data, scale = [x.flatten(0, 1)[None] for x in data], float(len(data[0]))
    for step, batch in enumerate(data):
        for r, x in enumerate(batch):
            cast = {
                name: p.detach().bfloat16().requires_grad_()
                for name, p in model.named_parameters()
                if not (name.startswith("blocks") and p.dim() == 2)
            }
            torch.manual_seed(1000 * step + r)
            loss = functional_call(model, cast, (x.bfloat16(),)).float().square().mean() * scale
            loss.backward()
            for name, leaf in cast.items():
                p, gradient = model.get_parameter(name), leaf.grad.float()
                p.grad = gradient if p.grad is None else p.grad + gradient
        for p in model.parameters():
            p.grad.div_(len(batch) * scale)
        made.step()
        made.zero_grad()
    return model


def check_mixed_precision(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(FEWER_STEPS, world, device)
    for recipe in MAIN:
        # One batch or two: the gradients of biases and of the head are rounded to bf16 (8 bits) at another time.
        tolerance, optimizer = (4 * REORDERED, cases.SGD) if recipe == "delayed" else (0.0, "adamw")
        reference = mixed_precision_reference(recipe, device, data, optimizer)
        for reshard in (True, False):
            # reduce_dtype is not given: te_dist makes it float32 on every torch version.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
            model = build(recipe, device, mesh, mp_policy=policy, reshard_after_forward=reshard)
            train(model, data, rank, dtype=torch.bfloat16, optimizer=optimizer)
            assert all(p.dtype == torch.float32 for p in model.parameters())
            assert_same(reference, model, tolerance, f"{recipe}, reshard {reshard}")
        if recipe not in ("current", "mxfp8") and not FULL_MATRIX:
            continue
        torch._dynamo.reset()
        model = build(recipe, device, mesh, mp_policy=policy, backend="aot_eager")
        train(model, data, rank, dtype=torch.bfloat16, optimizer=optimizer)
        assert_same(reference, model, tolerance, f"{recipe}, compiled")


def test_mixed_precision_policy(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_mixed_precision, device)


# Zeros and ones, which every format holds, so that all rounding is that of the gradient's dtype. Their sums are near
# 500: 8 bits leave an error of one or two, 24 bits leave none, but for scales that are no powers of two (144 dB).
UNROUNDED, ROUNDED_TO_BF16 = 130.0, 60.0


def sqnr(exact: Tensor, rounded: Tensor) -> float:
    noise = (exact - rounded.double()).square().mean()
    return float("inf") if noise == 0 else 10 * float(torch.log10(exact.square().mean() / noise))


def zeros_and_ones(*shape: int, seed: int) -> Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def check_gradient_precision(rank: int, world: int, device: str) -> None:
    """With reduce_dtype float32 no gradient of a quantized weight is rounded to bf16 on its way: against the exact sum
    in float64, over microbatches without synchronisation too. The bias, which is bf16, shares their parameter group."""
    mesh = mesh_of(device, world)
    micro, rows = 3, 2048
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    recipes: dict[str, Any] = {name: RECIPES[name] for name in MAIN}
    recipes["nvfp4"] = te_dist.recipe.NVFP4BlockScaling(disable_rht=True)  # a transform would leave other numbers
    for name, recipe in recipes.items():
        for policy, backend in ((cases.BF16, None), (cases.BF16, "aot_eager"), (bf16, None)):
            torch._dynamo.reset()
            model = te_dist.Linear(32, 64, recipe=recipe, device=device)
            if backend is not None:
                model.compile(fullgraph=True, backend=backend)
            fully_shard(model, mesh=mesh, mp_policy=policy)
            expected = torch.zeros(64, 32, dtype=torch.float64)
            for part in range(micro):
                model.set_requires_gradient_sync(part == micro - 1)
                for r in range(world):
                    seed = 10 * part + r
                    x, dy = zeros_and_ones(rows, 32, seed=seed), zeros_and_ones(rows, 64, seed=seed + 100)
                    expected += dy.double().t() @ x.double() / world
                    if r == rank:
                        y = model(x.to(device, torch.bfloat16).requires_grad_())
                        y.backward(dy.to(y))
            gradient = full(model.weight.grad).cpu()
            assert gradient.dtype == torch.float32 and y.dtype == torch.bfloat16
            found = sqnr(expected, gradient)
            fits = found > UNROUNDED if policy is cases.BF16 else found < ROUNDED_TO_BF16
            assert fits, (name, policy, backend, found)
            assert torch.isfinite(full(model.bias.grad)).all()
        # Beside tensor parallelism too, where an unsharded weight is a DTensor.
        grid = mesh_of(device, 1, world, names=("dp", "tp"))
        part = te_dist.Linear(32, 64 * world, recipe=recipe, device=device)
        parallelize(part, grid["tp"], {"": "column"})
        fully_shard(part, mesh=grid["dp"], mp_policy=cases.BF16)
        x, dy = zeros_and_ones(rows, 32, seed=1), zeros_and_ones(rows, 64 * world, seed=2)
        y = part(x.to(device, torch.bfloat16).requires_grad_())
        y.backward(dy.chunk(world, 1)[rank].to(y))
        assert sqnr(dy.double().t() @ x.double(), full(part.weight.grad).cpu()) > UNROUNDED, name


def test_weight_gradients_leave_their_product_in_float32(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_gradient_precision, device)


def check_optimizers(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(4, world, device)
    for recipe in ("current", "mxfp8"):
        for optimizer in cases.OPTIMIZERS:
            model = build(recipe, device, mesh)
            made = cases.OPTIMIZERS[optimizer](model.parameters())
            train(model, data, rank, optimizer=made)
            assert_same(single(recipe, device, data, optimizer=optimizer), model, what=f"{recipe}, {optimizer}")
            for state in made.state.values():  # nothing in there is a quantized tensor
                for value in state.values():
                    inner = getattr(value, "_local_tensor", value)
                    assert not isinstance(inner, Tensor) or type(inner) is Tensor
        # Norms of sharded gradients are DTensors of plain tensors too.
        clipped = [single(recipe, device, data, clip=0.01), build(recipe, device, mesh)]
        train(clipped[1], data, rank, clip=0.01)
        assert_same(clipped[0], clipped[1], REORDERED, f"{recipe}, clipped")


def test_any_optimizer(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_optimizers, device)


def check_offload(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(4, world, device)
    for recipe in MAIN:
        expected = build(recipe, device, mesh)
        train(expected, data, rank)
        policy = CPUOffloadPolicy(pin_memory=device == "cuda")
        model = build(recipe, device, mesh, offload_policy=policy)
        train(model, data, rank)
        assert all(p._local_tensor.device.type == "cpu" for p in model.parameters())
        for (name, a), b in zip(expected.named_parameters(), model.parameters(), strict=True):
            mine, theirs = b._local_tensor, a._local_tensor.cpu()
            if device == "cpu":
                assert torch.equal(mine, theirs), (recipe, name)
            else:  # an optimizer on the host rounds at other places than one on a GPU
                assert (mine - theirs).norm() <= REORDERED * theirs.norm(), (recipe, name)


def test_cpu_offload(rank_pools: Pools, device: str) -> None:
    """The optimizer steps on the host; shards travel to the device and are quantized there."""
    rank_pools(2).run(check_offload, device)


# ------------------------------------------------------------------------------------------------- frozen weights
class LoRA(nn.Module):
    def __init__(self, recipe: str, device: str) -> None:
        super().__init__()
        self.base = te_dist.Linear(96, 160, recipe=RECIPES[recipe], device=device).requires_grad_(False)
        self.a = nn.Linear(96, 4, bias=False, device=device)
        self.b = nn.Linear(4, 160, bias=False, device=device)
        self.out = te_dist.Linear(160, 96, recipe=RECIPES[recipe], device=device).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.base(x) + self.b(self.a(x)))


def lora(recipe: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(LoRA(recipe, device), LoRA(recipe, device))


def check_lora(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    data = batches(4, world, device)
    for recipe in MAIN:
        if recipe == "delayed":
            continue
        reference = lora(recipe, device)
        trained = [p for p in reference.parameters() if p.requires_grad]
        train(reference, data, None, optimizer=cases.OPTIMIZERS["adamw"](trained))
        model = lora(recipe, device)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        trained = [p for p in model.parameters() if p.requires_grad]
        train(model, data, rank, optimizer=cases.OPTIMIZERS["adamw"](trained))
        assert_same(reference, model, what=recipe)
        assert torch.equal(full(model[0].base.weight), lora(recipe, device)[0].base.weight)
        assert len(all_gather_report(model).quantized) == 4


def test_frozen_weights(rank_pools: Pools, device: str) -> None:
    """Only the adapters learn; frozen weights are gathered quantized and pass gradients on."""
    rank_pools(2).run(check_lora, device)


# ------------------------------------------------------------------------------------------------- all layers
def layers(recipe: Any, device: str) -> dict[str, Callable[[], nn.Module]]:
    options = {"recipe": recipe, "device": device}
    return {
        "linear": lambda: te_dist.Linear(64, 96, **options),
        "layernorm_linear": lambda: te_dist.LayerNormLinear(64, 96, **options),
        "layernorm_mlp": lambda: te_dist.LayerNormMLP(64, 96, activation="swiglu", **options),
        "grouped": lambda: te_dist.GroupedLinear(3, 64, 96, **options),
        "grouped_single": lambda: te_dist.GroupedLinear(3, 64, 98, single_grouped_weight=True, **options),
        "grouped_one": lambda: te_dist.GroupedLinear(1, 64, 96, single_grouped_weight=True, bias=False, **options),
        "transformer": lambda: te_dist.TransformerLayer(64, 96, 4, **options),
        "split": lambda: te_dist.Linear(64, 224, parameters_split={"q": 128, "k": 64, "v": 32}, **options),
        "split_norm": lambda: te_dist.LayerNormLinear(64, 384, parameters_split=("q", "k", "v"), **options),
        "split_gate": lambda: te_dist.LayerNormMLP(64, 128, activation="swiglu", split_gate=True, **options),
        "tied": lambda: Tied(options),
    }


class Tied(nn.Module):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.one, self.two = te_dist.Linear(64, 64, **options), te_dist.Linear(64, 64, **options)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


class Attention(nn.Module):
    """What a transformer block joins: q, k and v in front, gate and up behind."""

    def __init__(self, recipe: Any, device: str, remat: bool = False, width: int = 64, rows: int = 128) -> None:
        super().__init__()
        options = {"recipe": recipe, "device": device}
        self.qkv = te_dist.LayerNormLinear(width, 3 * rows, parameters_split=("q", "k", "v"), **options)
        self.proj = te_dist.Linear(3 * rows, width, **options)
        self.mlp = te_dist.LayerNormMLP(width, rows, activation="swiglu", split_gate=True, **options)
        self.remat = remat

    def inner(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.proj(self.qkv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.remat else self.inner(x)


COMPILED = {("current", "compiled"), ("mxfp8", "compiled, checkpointing")}


def check_joined(rank: int, world: int, device: str, recipes: tuple[str, ...]) -> None:
    """Weights joined from several parameters: gathered as bytes, the same in every way of running, nothing left."""
    mesh = mesh_of(device, world)
    data = batches(2, world, device, width=64, rows=16)
    ways: dict[str, dict[str, Any]] = {
        "eager": {}, "no reshard": {"reshard_after_forward": False}, "checkpointing": {"remat": True},
        "compiled": {"backend": "aot_eager"}, "compiled, checkpointing": {"backend": "aot_eager", "remat": True},
    }  # fmt: skip
    for recipe in recipes:
        def made(remat: bool = False, recipe: str = recipe) -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(*[Attention(RECIPES[recipe], device, remat) for _ in range(2)])

        reference = made()
        train(reference, data, None)
        for way, chosen in ways.items():
            if "compiled" in way and not FULL_MATRIX and (recipe, way) not in COMPILED:
                continue
            torch._dynamo.reset()
            options = dict(chosen)
            model = made(options.pop("remat", False))
            backend = options.pop("backend", None)
            for block in model:
                if backend is not None:
                    block.compile(fullgraph=True, backend=backend)
                fully_shard(block, mesh=mesh, quantized_all_gather="on", **options)
            fully_shard(model, mesh=mesh, **options)
            with comm_report() as report:
                train(model, data, rank)
            gathers = report.select(kind="all_gather")
            assert gathers and {c.dtype for c in gathers} == {"uint8"}, (recipe, way)
            assert len(report.select(kind="all_reduce", payload="amax")) <= len(data), (recipe, way)
            if recipe != "delayed":  # one process sees other histories
                assert_same(reference, model, what=f"{recipe}, {way}")
            # The bytes of q, k and v are those of the whole, held once, and gone after reshard.
            model[0].unshard()
            layer = model[0].qkv
            parts = [layer.q_weight, layer.k_weight, layer.v_weight]
            storage = parts[0].quantized_storage
            assert all(p.quantized_storage is storage and p.shape == (128, 64) for p in parts)
            if recipe != "delayed":
                whole = torch.cat([full(p) for p in (reference[0].qkv.q_weight, reference[0].qkv.k_weight,
                                                     reference[0].qkv.v_weight)])  # fmt: skip
                cases.assert_storage_equals(storage, cases.whole_weight(storage, whole), f"{recipe}, {way}")
                values = storage.dequantize()
                assert torch.equal(torch.cat([p.dequantize() for p in parts]), values)
            for param in model[0]._get_fsdp_state()._fsdp_param_group.fsdp_params:
                if param._module_info.param_name in ("q_weight", "k_weight", "v_weight"):
                    assert not any(cases.has_memory(t) for t in param.all_gather_outputs), "held twice"
            model[0].reshard()
            assert not any(cases.has_memory(t) for t in cases.plane_buffers(storage)), "not freed"


def test_joined_weights(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_joined, device, MAIN)


class Experts(nn.Module):
    """One parameter that holds the weights of all experts."""

    def __init__(self, recipe: Any, device: str) -> None:
        super().__init__()
        self.layer = te_dist.GroupedLinear(3, 64, 96, single_grouped_weight=True, recipe=recipe, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, [6, 0, 10])


def check_stacked(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, world)
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1)).to(device)
    for recipe in MAIN:
        results = []
        for way in ("one process", "eager", "compiled"):
            if way == "compiled" and recipe not in ("current", "mxfp8", "delayed") and not FULL_MATRIX:
                continue
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Experts(RECIPES[recipe], device)
            if way == "compiled":
                model.compile(fullgraph=True, backend="aot_eager")
            if way != "one process":
                fully_shard(model, mesh=mesh, quantized_all_gather="on")
            made = []
            for step in range(2):  # the second time into the same buffers
                torch.manual_seed(step)
                leaf = x[step].clone().requires_grad_()
                with comm_report() as report:
                    y = model(leaf)
                    y.square().sum().backward()
                made += [y.detach(), leaf.grad, full(model.layer.weight.grad).clone()]
                model.zero_grad()
            gathers = report.select(kind="all_gather")
            assert way == "one process" or {c.dtype for c in gathers if "weight" in c.layer} == {"uint8"}
            results.append(made)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True)), recipe
        if recipe == "delayed":
            continue
        weight = full(model.layer.weight)
        model.unshard()
        stack = model.layer.weight
        for i, part in enumerate(stack.unbind(0)):
            storage = part.quantized_storage
            cases.assert_storage_equals(storage, cases.whole_weight(storage, weight[i]), f"{recipe}, expert {i}")
        assert torch.equal(stack.dequantize()[2], part.dequantize())
        model.reshard()
        assert not any(cases.has_memory(t) for t in cases.plane_buffers(stack.quantized_storage)), "not freed"


def test_one_parameter_of_several_weights(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_stacked, device)


def check_layers(rank: int, world: int, device: str, recipes: tuple[str, ...]) -> None:
    mesh = mesh_of(device, world)
    for recipe_name in recipes:
        # Formats within a recipe change what a weight's planes are, not how layers ask for them.
        every = recipe_name in MAIN or FULL_MATRIX
        for name in layers(None, device) if every else ("linear", "grouped_single", "split_norm"):
            models = []
            for _ in range(2):
                torch.manual_seed(2)
                models.append(nn.ModuleList([layers(RECIPES[recipe_name], device)[name]()]))
            fully_shard(models[1][0], mesh=mesh)
            report = all_gather_report(models[1])
            if name == "transformer" and "block" in recipe_name:  # q, k and v have 64 rows, blocks have 128
                joined = [f"0.self_attention.layernorm_qkv.{n}_weight" for n in ("query", "key", "value")]
                assert list(report.others) == joined
            elif name == "split" and "block" in recipe_name:
                assert all("at row 192" in reason for reason in report.others.values())
            else:
                assert report.quantized and not report.others, (name, str(report))
            splits = {"grouped": [10, 0, 22], "grouped_single": [10, 0, 22], "grouped_one": [32]}
            arguments = (splits[name],) if name in splits else ()
            shape = (8, 4, 64) if name == "transformer" else (32, 64)
            for step in range(2):
                x = torch.randn(shape, device=device)
                made = []
                for m in models:
                    leaf = x.clone().requires_grad_()
                    torch.manual_seed(step)
                    y = m[0](leaf, *arguments)
                    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
                    made.append([leaf.grad, *[full(p.grad) for p in m.parameters()]])
                for i, (a, b) in enumerate(zip(*made, strict=True)):  # the ranks have one batch, so means are exact
                    assert torch.equal(a, b), (recipe_name, name, step, i)


def test_every_layer(rank_pools: Pools, device: str) -> None:
    rank_pools(2).run(check_layers, device, tuple(RECIPES))


# ------------------------------------------------------------------------------------------------- meshes
def check_meshes(rank: int, world: int, device: str) -> None:
    """FSDP on four ranks, HSDP 2x2 and 1x4 and 4x1: quantized gathers against those of torch, bit for bit."""
    data = batches(3, world, device)
    references = {recipe: single(recipe, device, data) for recipe in MAIN}
    for shape in ((4,), (2, 2), (1, 4), (4, 1)):
        mesh = mesh_of(device, *shape, names=("outer", "inner")[-len(shape) :])
        for recipe in ("current", "mxfp8") if 1 in shape and not FULL_MATRIX else MAIN:
            if recipe == "delayed":
                continue
            plain = build(recipe, device, mesh, quantized_all_gather="off")
            quantized = build(recipe, device, mesh)
            losses = train(plain, data, rank)
            assert train(quantized, data, rank) == losses, (shape, recipe)
            assert_same(plain, quantized, what=f"{shape} {recipe}")
            assert_same(references[recipe], quantized, REORDERED, f"{shape} {recipe}")
    # Delayed scaling: the ranks agree on every scale.
    for shape in ((4,), (2, 2)):
        mesh = mesh_of(device, *shape, names=("outer", "inner")[-len(shape) :])
        model = build("delayed", device, mesh)
        train(model, data, rank)
        assert_same(references["delayed"], model, REORDERED, f"{shape} delayed")
        model(data[0][rank])  # the last reduction
        for buffer in (b for n, b in model.named_buffers() if n.endswith("fp8_scale")):
            scales = [torch.empty_like(buffer) for _ in range(world)]
            torch.distributed.all_gather(scales, buffer)
            assert all(torch.equal(s, scales[0]) for s in scales)


def test_meshes_of_four_ranks(rank_pools: Pools, device: str) -> None:
    rank_pools(4).run(check_meshes, device)


class Projections(nn.Module):
    """A block for tensor parallelism: column, then row."""

    def __init__(self, recipe: str, device: str, width: int = 256, hidden: int = 256) -> None:
        super().__init__()
        self.up = te_dist.Linear(width, hidden, recipe=RECIPES[recipe], device=device)
        self.down = te_dist.Linear(hidden, width, recipe=RECIPES[recipe], device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def projections(recipe: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Projections(recipe, device), Projections(recipe, device))


def two_dimensional(recipe: str, device: str, dp: Any, tp: Any, sequence: bool, backend: str | None = None, **options: Any) -> nn.Module:  # noqa: E501
    model = projections(recipe, device)
    parallelize(model, tp, {"*.up": "column", "*.down": "row"}, sequence_parallel=sequence)
    for block in model:
        if backend is not None:
            block.compile(fullgraph=True, backend=backend)
        fully_shard(block, mesh=dp, **options)
    return fully_shard(model, mesh=dp, **options)


def train_2d(model: nn.Module, data: list[Tensor], dp: int, tp: int, sequence: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step, batch in enumerate(data):
        x = batch[dp].chunk(2)[tp] if sequence else batch[dp]
        torch.manual_seed(step)
        loss = model(x.clone().requires_grad_()).square().mean() * (0.5 if sequence else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def check_2d(rank: int, world: int, device: str) -> None:
    mesh = mesh_of(device, 2, 2, names=("dp_shard", "tp"))
    dp, tp = mesh["dp_shard"], mesh["tp"]
    at = dp.get_local_rank(), tp.get_local_rank()
    data = batches(2, 2, device, width=256, rows=64)
    for recipe in MAIN:
        sequence = recipe != "delayed"
        reference = projections(recipe, device)
        model = two_dimensional(recipe, device, dp, tp, sequence)
        with torch.no_grad():
            model[0].eval().unshard()
        for name, dim in (("up", 0), ("down", 1)):  # what one process makes of the whole weight, this rank's part
            storage = cases.gathered(getattr(model[0], name))
            whole = getattr(reference[0], name).weight.detach()
            scale = torch.ones(1, device=device) if recipe == "delayed" else None
            expected = cases.whole_weight(storage, whole, scale)
            assert torch.equal(storage.dequantize(), expected.dequantize().chunk(2, dim)[at[1]]), (recipe, name)
            if recipe == "current":
                assert torch.equal(storage._scale_inv, expected._scale_inv), "ranks of tensor parallelism disagree"
        model[0].train().reshard()
        with comm_report() as report:
            losses = train_2d(model, data, *at, sequence)
        weights = [c for c in report.select(kind="all_gather") if c.payload.startswith("weight")]
        assert weights and {c.dtype for c in weights} == {"uint8"}
        if recipe != "delayed":  # the histories' reduction over dp is ours alone
            plain = two_dimensional(recipe, device, dp, tp, sequence, quantized_all_gather="off")
            assert train_2d(plain, data, *at, sequence) == losses, recipe
            assert_same(plain, model, what=recipe)
        if recipe in ("current", "mxfp8"):
            torch._dynamo.reset()
            compiled = two_dimensional(recipe, device, dp, tp, sequence, backend="aot_eager")
            assert train_2d(compiled, data, *at, sequence) == losses, recipe
            assert_same(model, compiled, what=f"{recipe}, compiled")
        if recipe not in ("delayed", "nvfp4"):  # whose random bits are each rank's own
            train(reference, data, None)
            assert_same(reference, model, 10 * REORDERED, f"{recipe} against one process")


def check_joined_2d(rank: int, world: int, device: str) -> None:
    """q, k, v and a gated fc1 beside tensor parallelism: bytes, and what they train to, as with torch's own gather."""
    mesh = mesh_of(device, 2, 2, names=("dp_shard", "tp"))
    dp, tp = mesh["dp_shard"], mesh["tp"]
    data = batches(2, 2, device, width=64)
    plan = {"*.qkv": "column", "*.proj": "row", "*.mlp": "column"}
    for recipe in MAIN:
        results = []
        for mode in ("off", "auto"):
            torch.manual_seed(0)
            model = nn.Sequential(*[Attention(RECIPES[recipe], device, width=64, rows=256) for _ in range(2)])
            parallelize(model, tp, plan)
            for block in model:
                fully_shard(block, mesh=dp, quantized_all_gather=mode)
            fully_shard(model, mesh=dp)
            if mode == "auto":
                assert not all_gather_report(model).others, (recipe, str(all_gather_report(model)))
            results.append((train_2d(model, data, dp.get_local_rank(), tp.get_local_rank(), False), model))
        if recipe == "delayed":  # whose histories torch's gather leaves to each rank
            continue
        assert results[0][0] == results[1][0], recipe
        assert_same(results[0][1], results[1][1], what=recipe)


def test_joined_weights_beside_tensor_parallelism(rank_pools: Pools, device: str) -> None:
    rank_pools(4).run(check_joined_2d, device)


def test_two_dimensional_mesh(rank_pools: Pools, device: str) -> None:
    """dp_shard 2 x tp 2, column and row parallel with sequence parallelism, eager and compiled."""
    rank_pools(4).run(check_2d, device)


def check_3d(rank: int, world: int, device: str, shapes: list[tuple[int, int, int]], recipes: tuple[str, ...]) -> None:
    """replicate x shard x tp: unsharded bytes, and training, as with torch's own gather of high precision."""
    for shape in shapes:
        mesh = mesh_of(device, *shape)
        dp, tp = mesh["replicate", "shard"], mesh["tp"]
        part = dp["replicate"].get_local_rank() * shape[1] + dp["shard"].get_local_rank()
        data = batches(2, shape[0] * shape[1], device, width=64)
        for recipe in recipes:
            results = []
            for mode in ("off", "auto"):
                torch.manual_seed(0)
                model = nn.Sequential(Projections(recipe, device, 64, 256))
                parallelize(model, tp, {"*.up": "column", "*.down": "row"})
                fully_shard(model[0], mesh=dp, quantized_all_gather=mode)
                fully_shard(model, mesh=dp, quantized_all_gather=mode)
                losses = train_2d(model, data, part, tp.get_local_rank(), False)
                results.append((losses, model))
            assert len(all_gather_report(model).quantized) == 2
            if recipe == "delayed":  # whose histories torch's gather leaves to each rank: here they are all the same
                scales = model[0].up.fp8_scale.clone()
                torch.distributed.all_reduce(scales, torch.distributed.ReduceOp.MAX, group=dp["shard"].get_group())
                assert torch.equal(scales, model[0].up.fp8_scale)
                continue
            assert results[0][0] == results[1][0], (shape, recipe)
            assert_same(results[0][1], results[1][1], what=f"{shape} {recipe}")
            weight = full(model[0].up.weight)
            model[0].unshard()
            storage = cases.gathered(model[0].up)
            mine = weight.chunk(shape[2])[tp.get_local_rank()]
            if recipe == "mxfp8":  # no scale spans the ranks of tensor parallelism
                cases.assert_storage_equals(storage, cases.whole_weight(storage, mine), f"{shape} {recipe}")
            elif recipe == "current":  # its one scale does
                scale_inv = cases.whole_weight(storage, weight)._scale_inv
                assert torch.equal(storage._scale_inv, scale_inv), shape
            model[0].reshard()


def test_three_dimensional_meshes_of_four_ranks(rank_pools: Pools, device: str) -> None:
    """Each side of one rank in turn; ``test_three_dimensional_mesh`` has none."""
    shapes = [(1, 2, 2), (2, 1, 2), (2, 2, 1)]
    rank_pools(4).run(check_3d, device, shapes, ("current", "mxfp8", "delayed"))


@pytest.mark.skipif(not FULL_MATRIX, reason="eight ranks; TE_DIST_FULL_MATRIX=1 runs it")
def test_three_dimensional_mesh(rank_pools: Pools, device: str) -> None:
    rank_pools(8).run(check_3d, device, [(2, 2, 2)], MAIN)

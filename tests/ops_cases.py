"""The operations, what each computes in plain torch, and chains of them: for the tests of te_dist.ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_dist import ops, recipe
from te_dist.comm import Comm
from te_dist.plan import Move
from te_dist.transport import Done
from te_dist.values import value_type

K = 64
BF16 = torch.bfloat16


def parameter(module: nn.Module, name: str) -> Tensor:
    return module.get_parameter(name).double()


def gated(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    def compute(op: nn.Module, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return function(a) * b

    return compute


def plain(function: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda op, x: function(x)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def qgelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def srelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@dataclasses.dataclass
class Case:
    """An operation, its float64 reference, and whether it is exact on small whole numbers."""

    make: Callable[..., nn.Module]
    reference: Callable[[Any, Tensor], Tensor]
    exact: bool = False


CASES: dict[str, Case] = {
    "GELU": Case(ops.GELU, plain(gelu)),
    "GEGLU": Case(ops.GEGLU, gated(gelu)),
    "QGELU": Case(ops.QGELU, plain(qgelu)),
    "QGEGLU": Case(ops.QGEGLU, gated(qgelu)),
    "ReLU": Case(ops.ReLU, plain(F.relu), True),
    "ReGLU": Case(ops.ReGLU, gated(F.relu), True),
    "SReLU": Case(ops.SReLU, plain(srelu), True),
    "SReGLU": Case(ops.SReGLU, gated(srelu), True),
    "SiLU": Case(ops.SiLU, plain(F.silu)),
    "SwiGLU": Case(ops.SwiGLU, gated(F.silu)),
    "Identity": Case(ops.Identity, plain(lambda x: x), True),
    "Reshape": Case(lambda: ops.Reshape((-1, K // 2)), plain(lambda x: x.reshape(-1, K // 2)), True),
    "ConstantScale": Case(lambda: ops.ConstantScale(-0.5), plain(lambda x: -0.5 * x), True),
    "Bias": Case(lambda **kw: ops.Bias(K, **kw), lambda op, x: x + parameter(op, "bias"), True),
    "LayerNorm": Case(
        lambda **kw: ops.LayerNorm(K, **kw),
        lambda op, x: F.layer_norm(x, (K,), parameter(op, "weight"), parameter(op, "bias"), 1e-5),
    ),
    "LayerNorm 2-D": Case(
        lambda **kw: ops.LayerNorm((2, K), zero_centered_gamma=True, **kw),
        lambda op, x: F.layer_norm(x, (2, K), 1 + parameter(op, "weight"), parameter(op, "bias"), 1e-5),
    ),
    "RMSNorm": Case(
        lambda **kw: ops.RMSNorm(K, **kw), lambda op, x: F.rms_norm(x, (K,), parameter(op, "weight"), 1e-5)
    ),
    "L2Normalization": Case(
        ops.L2Normalization, plain(lambda x: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6))
    ),
    "Dropout off": Case(lambda: ops.Dropout(0.4).eval(), plain(lambda x: x), True),
    "AllGather": Case(ops.AllGather, plain(lambda x: x), True),
    "ReduceScatter": Case(ops.ReduceScatter, plain(lambda x: x), True),
    "AllReduce": Case(ops.AllReduce, plain(lambda x: x), True),
    "Quantize off": Case(lambda: ops.Sequential(ops.Quantize(), ops.Identity()), plain(lambda x: x), True),
}
WITH_PARAMETERS = {name for name in CASES if name.split()[0] in ("Bias", "LayerNorm", "RMSNorm")}


def make_op(name: str, dtype: torch.dtype = BF16, device: str = "cpu") -> nn.Module:
    op = CASES[name].make(**({"dtype": dtype, "device": device} if name in WITH_PARAMETERS else {}))
    with torch.no_grad():
        torch.manual_seed(3)
        for p in op.parameters():
            p.add_(torch.randint(-2, 3, p.shape, device=device) * 0.5)
    return op


def whole_numbers(*shape: int, largest: int = 2, seed: int = 0, dtype: torch.dtype = BF16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, shape, generator=generator).to(dtype)


RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
# Where -1, 0 and 1 are exact in every operand: without the Hadamard transform.


def without_chance(name: str, device: str) -> recipe.Recipe | None:
    """The recipe; on a GPU without stochastic rounding, where one draw of two seeds is not two draws of one."""
    if name == "nvfp4" and device == "cuda":
        return recipe.NVFP4BlockScaling(fp8_quant_bwd_grad=recipe.QParams(stochastic_rounding=False))
    return RECIPES[name]


EXACT_RECIPES = {**RECIPES, "nvfp4": recipe.NVFP4BlockScaling(disable_rht=True)}


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Norms and biases that are not ones and zeros, which would hide a missing factor."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.2)
    return module


def unfused(chain: ops.Sequential) -> Callable[..., Any]:
    """The same operations, each run by a fuser of its own, with extra inputs and outputs handed through. A Linear
    stays whole: its bias is added before the product is rounded."""

    def run(x: Tensor, *extra: Tensor) -> Any:
        outputs: list[Tensor] = []
        given = list(extra)
        for op in chain:
            own = [given.pop(0) for basic in op.basic_operations for _ in range(basic.num_extra_inputs)]
            made = op(x, *own)
            if isinstance(made, tuple):
                x = made[0]
                outputs.extend(made[1:])
            else:
                x = made
        return (x, *outputs) if outputs else x

    return run


def run(
    call: Callable[..., Any], params: Any, *inputs: Tensor, seed: int = 7, scale: float = 1.0
) -> list[Tensor | None]:
    """All outputs and gradients of one step."""
    torch.manual_seed(seed)
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    params = list(params)
    for p in params:
        p.grad = None
    made = call(*leaves)
    outputs = made if isinstance(made, tuple) else (made,)
    grads = [whole_numbers(*y.shape, seed=20 + i, dtype=y.dtype).to(y.device) * scale for i, y in enumerate(outputs)]
    torch.autograd.backward(list(outputs), grads)
    return [*[y.detach() for y in outputs], *[x.grad for x in leaves], *[p.grad for p in params]]


def assert_equal(actual: list[Any], expected: list[Any], what: str = "") -> None:
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert (a is None) == (b is None), f"{what}: result {i}"
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, f"{what}: result {i}"
            assert torch.equal(a, b), f"{what}: result {i} differs by {(a.double() - b.double()).abs().max()}"


# ------------------------------------------------------------------------------------------------- chains
def linear(k: int, n: int, chosen: recipe.Recipe | None, **options: Any) -> ops.Linear:
    return ops.Linear(k, n, recipe=chosen, **({"dtype": BF16} | options))


def chains(chosen: recipe.Recipe | None = None, **options: Any) -> dict[str, tuple[ops.Sequential, int]]:
    """Sequentials that meet each fused operation, and how many extra inputs of the output's shape each takes."""
    kw = {"dtype": BF16} | options

    def lin(k: int, n: int, bias: bool = True) -> ops.Linear:
        return ops.Linear(k, n, bias=bias, recipe=chosen, **kw)

    built = {
        "mlp": (
            ops.Sequential(ops.RMSNorm(K, **kw), lin(K, 160), ops.SwiGLU(), lin(80, K)),
            0,
        ),
        "ForwardLinearBiasAdd": (ops.Sequential(lin(K, 96), ops.AddExtraInput()), 1),
        "ForwardLinearScaleAdd": (ops.Sequential(lin(K, 96, False), ops.ConstantScale(0.3), ops.AddExtraInput()), 1),
        "ForwardLinearBiasActivation": (ops.Sequential(lin(K, 96), ops.GELU()), 0),
        "BackwardActivationBias": (ops.Sequential(ops.ConstantScale(0.5), ops.Bias(K, **kw), ops.SiLU()), 0),
        "BackwardLinearAdd": (ops.Sequential(ops.MakeExtraOutput(), lin(K, 96)), 0),
        "BackwardLinearScale": (ops.Sequential(ops.ConstantScale(0.5), lin(K, 96, False)), 0),
        "BackwardAddRMSNorm": (ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(K, **kw), lin(K, 96)), 0),
        "BackwardAddRMSNorm alone": (ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(K, **kw)), 0),
        "residual block": (
            ops.Sequential(
                ops.MakeExtraOutput(), ops.LayerNorm(K, **kw), lin(K, 128), ops.GELU(), lin(128, K), ops.AddExtraInput()
            ),
            1,
        ),
        "Quantize": (ops.Sequential(ops.ReLU(), ops.Quantize(), lin(K, 96)), 0),
        "three": (ops.Sequential(lin(K, 96), ops.LayerNorm(96, **kw), lin(96, 80), lin(80, K)), 0),
    }
    for chain, _ in built.values():
        filled(chain)
    return built


# ------------------------------------------------------------------------------------------------- communication
@value_type
@dataclasses.dataclass(frozen=True)
class TwinComm(Comm):
    """Two ranks that hold the same: the other's shard is a copy of ours. So one process can run what two would."""

    size: int = 2

    @property
    def is_local(self) -> bool:
        return False

    def start_gather(self, operands: list[Any], beside: str = "") -> Done[list[Any]]:
        return Done([self._twice(operand) for operand in operands])

    def _twice(self, operand: Any) -> Any:
        if isinstance(operand, Tensor):
            return torch.cat([operand] * self.size)
        # Quantized bytes, put together by quantizing what they stand for: exact on whole numbers.
        return operand.quantizer.quantize(torch.cat([operand.dequantize()] * self.size))

    def start_reduce(self, move: Move, result: Tensor, beside: str = "") -> Done[Tensor]:
        if move is Move.ALL_REDUCE:
            return Done(result.mul_(self.size))  # in place, as NCCL does
        if move is Move.REDUCE_SCATTER:
            return Done(result[: result.shape[0] // self.size] * self.size)
        return Done(result)

    def sum_gradient(self, partial: Tensor) -> Tensor:
        return partial * self.size

"""LayerNorm and RMSNorm: against torch in fp64, compiled against eager, and the norm inside LayerNormLinear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.utils.checkpoint
from cases import DTYPES, varied
from gemm_cases import SQNR
from layer_cases import assert_close, assert_equal, compiled, run
from torch import Tensor

import te_dist
from te_dist.dynamo.norm import NormSpec

NORMS = {"LayerNorm": te_dist.LayerNorm, "RMSNorm": te_dist.RMSNorm}
SHAPES = ((1, 16), (33, 96), (3, 50, 200), (7,), (0, 32), (130, 1))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def make(name: str, size: Any, **options: Any) -> torch.nn.Module:
    torch.manual_seed(5)
    module = NORMS[name](size, **options)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return module


def reference(module: torch.nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """torch's own, in fp64."""
    exact = type(module)(module.normalized_shape, dtype=torch.float64)
    exact.load_state_dict(module.state_dict())

    def call(x: Tensor) -> Tensor:
        gain = exact.weight + 1 if module.zero_centered_gamma else exact.weight
        if module.bias is None:
            return torch.nn.functional.rms_norm(x, module.normalized_shape, gain, module.eps)
        return torch.nn.functional.layer_norm(x, module.normalized_shape, gain, exact.bias, module.eps)

    return run(exact, x.double(), dy=dy.double(), call=call)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(NORMS))
def test_close_to_torch_in_fp64(name: str, dtype: torch.dtype, zero_centered: bool, device: str) -> None:
    for shape in SHAPES[1:3]:
        module = make(name, shape[-1], zero_centered_gamma=zero_centered)
        x, dy = (varied(shape, dtype, seed) + seed for seed in (1, 2))
        expected = reference(module, x.requires_grad_(), dy)
        actual = run(module.to(device), x.detach().to(device).requires_grad_(), dy=dy.to(device))
        actual = {key: value.cpu() for key, value in actual.items()}
        for key in ("weight", "bias"):  # float32 parameters: their gradients are rounded once
            if key in expected:
                assert_close({key: actual.pop(key)}, {key: expected.pop(key)}, SQNR[torch.float32])
        assert_close(actual, expected, SQNR[dtype])


@pytest.mark.parametrize("name", sorted(NORMS))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_equals_eager(name: str, shape: tuple[int, ...]) -> None:
    module = make(name, shape[-1], params_dtype=torch.bfloat16)
    twin, call = compiled(module)
    x, dy = (varied(shape, torch.bfloat16, seed) for seed in (1, 2))
    x.requires_grad_()
    expected = run(module, x, dy=dy)
    assert_equal(run(twin, x, dy=dy, call=call), expected)
    assert expected["y"].dtype == torch.bfloat16 and expected["y"].shape == x.shape
    with torch.no_grad():
        assert torch.equal(call(x), expected["y"])
    module.weight.requires_grad_(False), twin.weight.requires_grad_(False)
    expected.pop("weight")
    assert_equal(run(module, x, dy=dy), expected)
    assert_equal(run(twin, x, dy=dy, call=call), expected)


def test_one_graph_for_any_number_of_rows() -> None:
    module = make("LayerNorm", 64)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    for rows in (70, 100, 300):  # up to 128 rows there is one partial sum, and torch makes a one a constant
        x, dy = (varied((2, rows, 64), torch.float32, seed) for seed in (1, 2))
        x.requires_grad_()
        assert_equal(run(module, x, dy=dy, call=call), run(module, x, dy=dy))
    assert counter.frame_count == 1


def test_ops_have_right_fakes() -> None:
    x, weight, bias = varied((9, 32), torch.bfloat16), torch.ones(32), torch.zeros(32)
    tests = ("test_schema", "test_faketensor")
    for layer_norm in (True, False):
        spec = NormSpec(layer_norm, 1e-5, zero_centered=False)
        args = (x, weight, bias if layer_norm else None, spec)
        torch.library.opcheck(torch.ops.te_dist.norm_forward.default, args, test_utils=tests)
        made = torch.ops.te_dist.norm_forward(*args)
        mean, rstd = (made[1] if layer_norm else None), made[-1]
        args = (x, x, weight, mean, rstd, spec, True, layer_norm)
        torch.library.opcheck(torch.ops.te_dist.norm_backward.default, args, test_utils=tests)


@pytest.mark.parametrize("name", sorted(NORMS))
def test_is_the_norm_of_layernorm_linear(name: str) -> None:
    """The same kernel: what LayerNormLinear returns as its norm's output, bit for bit."""
    norm = make(name, 64, zero_centered_gamma=True)
    fused = te_dist.LayerNormLinear(64, 32, normalization=name, zero_centered_gamma=True, return_layernorm_output=True)
    with torch.no_grad():
        fused.layer_norm_weight.copy_(norm.weight)
        if norm.bias is not None:
            fused.layer_norm_bias.copy_(norm.bias)
    x = varied((5, 64), torch.bfloat16)
    assert torch.equal(norm(x), fused(x)[1])


def test_several_dimensions_strides_and_checkpointing() -> None:
    module = make("LayerNorm", (3, 8))
    assert module.weight.shape == (3, 8)
    x, dy = (varied((5, 3, 8), torch.float32, seed) for seed in (1, 2))
    expected = run(module, x.requires_grad_(), dy=dy)
    assert_close(expected, reference(module, x, dy), SQNR[torch.float32])
    strided = x.detach().permute(2, 1, 0).contiguous().permute(2, 1, 0).requires_grad_()
    assert_equal(run(module, strided, dy=dy), expected)
    assert_equal(
        run(module, x, dy=dy, call=lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)),
        expected,
    )


def test_autocast_and_construction() -> None:
    module = te_dist.RMSNorm(hidden_size=16, device="meta", params_dtype=torch.bfloat16, zero_centered_gamma=True)
    module.to_empty(device="cpu").reset_parameters()
    assert list(module.state_dict()) == ["weight"] and not module.weight.any()
    assert list(te_dist.LayerNorm(16).state_dict()) == ["weight", "bias"]
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(4, 16)).dtype == torch.bfloat16


def test_refusals() -> None:
    norm = te_dist.LayerNorm(16)
    with pytest.raises(ValueError, match=r"LayerNorm expects the input's last dimensions to be \[16\] but got shape"):
        norm(torch.ones(4, 8))
    with pytest.raises(TypeError, match=r"LayerNorm expects an input of float32, float16 or bfloat16 but got int64"):
        norm(torch.ones(4, 16, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"unquantized tensor"):
        norm(te_dist.MXFP8Quantizer("e4m3").quantize(torch.ones(4, 16)))
    for arguments in ({}, {"normalized_shape": 16, "hidden_size": 16}):
        with pytest.raises(ValueError, match=r"RMSNorm expects normalized_shape, or hidden_size"):
            te_dist.RMSNorm(**arguments)
    with pytest.raises(ValueError, match=r"positive sizes but got 0"):
        te_dist.RMSNorm(0)

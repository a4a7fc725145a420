"""QuantizedTensor: what it can do keeps the bytes, what it cannot do raises and says so."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from cases import QUANTIZERS, assert_same_storage, rng_for, varied

import te_dist
from te_dist import QuantizedTensor

NAMES = sorted(QUANTIZERS)


def quantized(name: str, shape=(4, 32, 64), **kwargs) -> QuantizedTensor:
    quantizer = QUANTIZERS[name]()
    x = varied(shape, torch.bfloat16).requires_grad_(kwargs.pop("requires_grad", False))
    return quantizer.make_tensor(x, rng_state=rng_for(quantizer))


@pytest.fixture(autouse=True)
def _fresh_counter():
    te_dist.reset_implicit_dequantizations()


@pytest.mark.parametrize("name", NAMES)
def test_looks_like_the_tensor_it_stands_for(name: str) -> None:
    t = quantized(name)
    assert isinstance(t, torch.Tensor) and t.shape == (4, 32, 64)
    assert (t.dtype, t.device.type, t.is_contiguous()) == (torch.bfloat16, "cpu", True)
    assert torch.equal(t.dequantize(), t.quantized_storage.dequantize())
    for method, dtype in (("float", torch.float32), ("half", torch.float16)):
        other = getattr(t, method)()
        assert type(other) is type(t) and other.dtype == other.quantized_storage.dtype == dtype
    text = repr(t)
    assert type(t).__name__ in text and "planes=row+column" in text and "shape=[4, 32, 64]" in text
    assert len(text) < 250 and t.quantizer.describe() in text


@pytest.mark.parametrize("name", NAMES)
def test_copies_keep_the_bytes(name: str) -> None:
    t = quantized(name)
    buffer = io.BytesIO()
    torch.save({"w": t}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)["w"]
    for label, other in (
        ("clone", t.clone()),
        ("detach", t.detach()),
        ("deepcopy", copy.deepcopy(t)),
        ("pickle", pickle.loads(pickle.dumps(t))),
        ("load", loaded),
        ("to cpu", t.to("cpu", copy=True)),
    ):
        assert type(other) is type(t), label
        assert_same_storage(other.quantized_storage, t.quantized_storage, label)
        assert torch.equal(other.dequantize(), t.dequantize()), label
        shares = other.quantized_storage.inner_tensors()[0].data_ptr() == (
            t.quantized_storage.inner_tensors()[0].data_ptr()
        )
        assert shares == (label == "detach"), label
    assert loaded.quantizer.describe() == t.quantizer.describe()
    assert te_dist.implicit_dequantizations() == {}


def test_a_file_with_an_unknown_quantizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dist.tensors import quantized_tensor

    buffer = io.BytesIO()
    torch.save(quantized("mxfp8_e4m3"), buffer)
    buffer.seek(0)
    monkeypatch.delitem(quantized_tensor._QUANTIZER_CLASSES, "MXFP8Quantizer")
    with pytest.raises(Exception, match="MXFP8Quantizer"):
        torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", NAMES)
def test_views_that_keep_the_last_dimension(name: str) -> None:
    t = quantized(name)
    for shape in ((128, 64), (2, 64, 64), (-1, 64), (4, -1, 64)):
        for view in (t.view(shape), t.reshape(shape)):
            assert isinstance(view, QuantizedTensor)
            assert torch.equal(view.dequantize(), t.dequantize().view(shape))
    with pytest.raises(ValueError, match=r"cannot be viewed as \[64, 128\]"):
        t.view(64, 128)
    with pytest.raises(ValueError, match="cannot be viewed"):
        t.view(-1)


@pytest.mark.parametrize("name", NAMES)
def test_to_dtype_keeps_the_bytes(name: str) -> None:
    t = quantized(name)
    other = t.to(torch.float32)
    if name == "identity":  # its bytes are the values in the nominal dtype
        assert torch.equal(other.dequantize(), t.dequantize().float())
        return
    assert type(other) is type(t) and other.dtype == torch.float32
    assert_same_storage(other.quantized_storage, t.quantized_storage, name)
    assert torch.equal(other.dequantize(), t.quantized_storage.dequantize(dtype=torch.float32))
    with pytest.raises(TypeError, match="expects a dtype"):
        t.to(torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_copy_(name: str) -> None:
    t = quantized(name)
    target = t.clone()
    source = varied((4, 32, 64), torch.bfloat16, seed=9)
    if not getattr(t.quantizer, "stochastic_rounding", False):
        target.copy_(source)
        expected = t.quantizer.copy().quantize(source)
        assert_same_storage(target.quantized_storage, expected, "from a plain tensor")
    target.copy_(t)
    assert_same_storage(target.quantized_storage, t.quantized_storage, "from a quantized one")
    plain = torch.empty(4, 32, 64)
    plain.copy_(t)
    assert torch.equal(plain, t.dequantize().float())
    assert te_dist.implicit_dequantizations() == {"aten.copy_ into a plain tensor": 1}
    with pytest.raises(ValueError, match="expects shape"):
        target.copy_(torch.ones(2, 2))


def test_copy_between_formats_raises() -> None:
    a, b = quantized("current_e4m3"), quantized("current_e5m2")
    with pytest.raises(ValueError, match="different quantizers"):
        a.copy_(b)
    with pytest.raises(ValueError, match="expects the same"):
        a.copy_(quantized("mxfp8_e4m3"))
    with pytest.raises(ValueError, match="expects the buffers"):
        a.copy_(te_dist.Float8CurrentScalingQuantizer("e4m3", columnwise=False).make_tensor(torch.ones(4, 32, 64)))


UNSUPPORTED = {
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ torch.ones(64, 8, dtype=t.dtype),
    "sum": lambda t: t.sum(),
    "transpose": lambda t: t.transpose(0, 1),
    "slice": lambda t: t[1:],
    "linear": lambda t: torch.nn.functional.linear(torch.ones(2, 64, dtype=t.dtype), t[0]),
    "equal": lambda t: torch.equal(t, t),
}


@pytest.mark.parametrize("op", UNSUPPORTED)
def test_an_unsupported_op_raises_and_names_itself(op: str) -> None:
    t = quantized("block_2d")
    with pytest.raises(
        te_dist.QuantizedOpError, match=r"aten\..* is not supported on Float8BlockwiseQTensor.*dequantize"
    ):
        UNSUPPORTED[op](t)
    assert te_dist.implicit_dequantizations() == {}


def test_implicit_dequantization_is_allowed_only_inside_its_block_and_counted() -> None:
    t = quantized("block_2d")
    with te_dist.implicit_dequantization():
        result = t + 1
        t.sum()
        t.sum()
        with pytest.raises(te_dist.QuantizedOpError, match="would write self into"):
            t.add_(1)
    assert torch.equal(result, t.dequantize() + 1) and type(result) is torch.Tensor
    assert sum(te_dist.implicit_dequantizations().values()) == 3
    with pytest.raises(te_dist.QuantizedOpError, match="not supported"):
        t + 1


@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_straight_through(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    x = varied((16, 32), torch.float32).requires_grad_()
    t = quantizer.make_tensor(x, rng_state=rng_for(quantizer))
    assert t.requires_grad
    y = t.dequantize()
    weight = torch.arange(512.0).view(16, 32)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_as_a_parameter_in_a_module() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(quantized("mxfp8_e4m3", (64, 32)), requires_grad=False)
    state = module.state_dict()
    assert isinstance(state["weight"], te_dist.MXFP8Tensor)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = torch.nn.Module()
    other.weight = torch.nn.Parameter(
        te_dist.MXFP8Quantizer("e4m3").make_tensor(torch.zeros(64, 32, dtype=torch.bfloat16)), requires_grad=False
    )
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.weight.dequantize(), module.weight.dequantize())
    assert isinstance(module.to(torch.float32).weight, te_dist.MXFP8Tensor)
    assert module.weight.dtype == torch.float32
    assert isinstance(copy.deepcopy(module).weight, te_dist.MXFP8Tensor)


def test_wrapping_something_else_raises() -> None:
    with pytest.raises(TypeError, match="expects a QuantizedStorage"):
        QuantizedTensor(torch.ones(3))


def test_identity() -> None:
    x = torch.randn(8, 16)
    storage = te_dist.IdentityQuantizer().quantize(x)
    assert torch.equal(storage.dequantize(), x)
    half = te_dist.IdentityQuantizer(dtype=torch.bfloat16)
    assert half.quantize(x)._hp_data.dtype == torch.bfloat16
    assert half == te_dist.IdentityQuantizer(dtype="bf16") != te_dist.IdentityQuantizer()
    function = torch.compile(lambda x: half.quantize(x).dequantize() + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(function(x), x.bfloat16().float() + 1)
    out = half.quantize(x)
    half.quantize(x * 2, out=out)
    assert torch.equal(out.dequantize(), (x * 2).bfloat16().float())


@pytest.mark.parametrize("name", NAMES)
def test_a_storage_owns_its_data(name: str) -> None:
    """Writing into a storage or a tensor never reaches what it was made from."""
    quantizer = QUANTIZERS[name]()
    rng = rng_for(quantizer)
    w1, w2 = (varied((32, 64), torch.bfloat16, seed) for seed in (1, 2))
    before, version = w1.clone(), w1._version
    workspace = quantizer.quantize(w1, rng_state=rng)
    quantizer.quantize(w2, out=workspace, rng_state=rng)
    quantizer.quantize(w1.t(), rng_state=rng)
    quantizer.quantize(w1[:1].expand(32, 64), rng_state=rng)
    workspace.dequantize().zero_()
    assert torch.equal(w1, before) and w1._version == version


def test_module_casts_keep_wrapper_and_storage_in_step() -> None:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(quantized("mxfp8_e4m3", (64, 32)), requires_grad=False)
    for cast, dtype in (("float", torch.float32), ("half", torch.float16), ("bfloat16", torch.bfloat16)):
        getattr(module, cast)()
        weight = module.weight
        assert isinstance(weight, te_dist.MXFP8Tensor) and isinstance(weight, torch.nn.Parameter)
        assert weight.dtype == weight.quantized_storage.dtype == weight.dequantize().dtype == dtype
    with pytest.raises(te_dist.QuantizedOpError, match="data cannot be replaced"):
        module.weight.data = torch.ones(64, 32)
    assert isinstance(module.weight.data, te_dist.MXFP8Tensor)


def test_deepcopy_keeps_parameters_and_separates_state() -> None:
    module = torch.nn.Module()
    quantizer = QUANTIZERS["delayed_e4m3"]()
    module.weight = torch.nn.Parameter(quantizer.make_tensor(torch.ones(4, 4)), requires_grad=False)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert twin.weight.quantizer is not quantizer
    assert twin.weight.quantizer.scale.data_ptr() != quantizer.scale.data_ptr()


def test_copy_from_a_wider_dtype_rounds_once() -> None:
    t = quantized("block_1d", (32, 64))
    source = varied((32, 64), torch.float32, seed=3) * 1.001
    t.copy_(source)
    assert_same_storage(t.quantized_storage, t.quantizer.quantize(source), "fp32 source")


def test_implicit_dequantization_may_write_into_plain_tensors() -> None:
    t, plain = quantized("block_2d"), torch.zeros(4, 32, 64, dtype=torch.bfloat16)
    with te_dist.implicit_dequantization():
        plain.add_(t)
    assert torch.equal(plain, t.dequantize())


def broken_storages():
    """Storages whose buffers are not what the quantizer describes."""
    good = te_dist.MXFP8Quantizer("e4m3").quantize(torch.ones(64, 64))
    buffers = dict(zip(good.inner_names(), good.inner_tensors(), strict=True))
    one = torch.zeros(1, dtype=torch.uint8)
    for label, change in (
        ("short data", {"_rowwise_data": one}),
        ("short scale", {"_columnwise_scale_inv": one}),
        ("dtype", {"_rowwise_scale_inv": buffers["_rowwise_scale_inv"].to(torch.int32)}),
        ("strides", {"_rowwise_data": torch.zeros(64, 64, dtype=torch.uint8).t()}),
        ("missing", {"_columnwise_data": None}),
    ):
        if label == "strides":
            change["_rowwise_data"] = torch.zeros(64, 128, dtype=torch.uint8)[:, ::2]
        yield (
            label,
            te_dist.MXFP8TensorStorage(buffers | change, shape=(64, 64), dtype=torch.float32, quantizer=good.quantizer),
        )


def test_wrong_buffers_are_refused_before_a_kernel_sees_them() -> None:
    quantizer = te_dist.MXFP8Quantizer("e4m3")
    for label, storage in broken_storages():
        with pytest.raises(ValueError, match="expects"):
            quantizer.quantize(torch.ones(64, 64), out=storage)
            pytest.fail(label)
        with pytest.raises(ValueError, match="expects"):
            storage.dequantize()
            pytest.fail(label)
        if label in ("short data", "short scale"):
            with pytest.raises(ValueError, match="expects"):
                torch.ops.te_dist.quantize_out(
                    torch.ones(64, 64), storage.inner_tensors(), quantizer, quantizer, None, None
                )
            buffer = io.BytesIO()
            torch.save(te_dist.tensors.quantized_tensor.wrap(storage), buffer)
            buffer.seek(0)
            with pytest.raises(Exception, match="expects"):
                torch.load(buffer, weights_only=True)

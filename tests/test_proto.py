"""SPEC E7-E10: TensorProto describes exactly what the kernels return."""

from __future__ import annotations

import pytest
import torch
from cases import DTYPES, PLANES, QUANTIZERS, SHAPES, delayed, fits, rng_for, varied

import te_dist
from te_dist import QuantizedStorage, TensorProto, to_tensor_proto

NAMES = sorted(QUANTIZERS)


def layout(storage: QuantizedStorage) -> dict[str, tuple]:
    return {
        name: (tuple(t.shape), t.dtype, t.device, t.stride())
        for name, t in zip(storage.inner_names(), storage.inner_tensors(), strict=True)
    }


@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", NAMES)
def test_fake_layout_is_the_real_one(name: str, planes: str, device: str) -> None:
    rowwise, columnwise = PLANES[planes]
    for dtype in DTYPES:
        for shape in SHAPES:
            quantizer = QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)
            if not fits(quantizer, shape):
                continue
            if isinstance(quantizer, te_dist.Float8Quantizer):
                quantizer = quantizer.replace(scale=quantizer.scale.to(device), amax=quantizer.amax.to(device))
            x = varied(shape, dtype).to(device)
            real = quantizer.quantize(x, rng_state=rng_for(quantizer, device))
            proto = TensorProto(shape, dtype, quantizer, device=x.device)
            made = proto.create_tensor()
            assert type(made) is type(real)
            assert layout(made) == layout(real), (name, planes, shape)
            assert proto.inner_names() == real.inner_names() == list(layout(real))
            assert made.shape == real.shape and made.dtype == real.dtype
            assert to_tensor_proto(real) == proto


@pytest.mark.parametrize("name", NAMES)
def test_flatten_round_trip(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    storage = quantizer.quantize(varied((64, 96), torch.bfloat16), rng_state=rng_for(quantizer))
    names, metadata = storage.__tensor_flatten__()
    assert names == [n for n in type(storage).BUFFERS if getattr(storage, n) is not None]
    inner = {n: getattr(storage, n) for n in names}
    back = type(storage).__tensor_unflatten__(inner, metadata)
    assert type(back) is type(storage) and back.shape == storage.shape
    assert all(getattr(back, n) is getattr(storage, n) for n in names)
    assert back.quantizer == storage.quantizer
    assert metadata == TensorProto((64, 96), torch.bfloat16, quantizer).create_metadata()


def test_proto_of_plain_and_wrapper() -> None:
    plain = torch.empty(2, 3, requires_grad=True)
    proto = to_tensor_proto(plain)
    assert proto == TensorProto((2, 3), torch.float32, None, True, torch.device("cpu"))
    assert not proto.is_quantized and proto.create_tensor().requires_grad
    with pytest.raises(ValueError, match="no inner tensors"):
        proto.inner_names()
    wrapper = te_dist.MXFP8Quantizer("e4m3").make_tensor(torch.ones(4, 32))
    proto = to_tensor_proto(wrapper)
    assert proto.is_quantized and proto.quantizer == wrapper.quantizer
    made = TensorProto((4, 32), torch.bfloat16, proto.quantizer, True).create_wrapper()
    assert isinstance(made, te_dist.MXFP8Tensor) and made.requires_grad
    with pytest.raises(TypeError, match="to_tensor_proto expects"):
        to_tensor_proto([1.0])
    with pytest.raises(TypeError, match="expects a Quantizer"):
        TensorProto((2, 3), torch.float32, "e4m3")


@pytest.mark.parametrize("problem", ["undeclared", "order"])
def test_a_quantizer_that_contradicts_its_storage_raises(problem: str) -> None:
    class Wrong(te_dist.MXFP8Quantizer):
        def _describe_buffers(self, shape, dtype=torch.bfloat16):
            specs = super()._describe_buffers(shape, dtype)
            if problem == "undeclared":
                return specs | {"_mystery": ((1,), torch.float32)}
            return dict(reversed(specs.items()))

    with pytest.raises(ValueError, match="names and order must agree"):
        TensorProto((32, 32), torch.bfloat16, Wrong("e4m3")).create_tensor()


def test_storage_refuses_a_buffer_it_does_not_declare() -> None:
    with pytest.raises(ValueError, match="no buffer '_mystery'"):
        te_dist.MXFP8TensorStorage(
            {"_mystery": torch.ones(1)},
            shape=(1,),
            dtype=torch.float32,
            quantizer=te_dist.MXFP8Quantizer("e4m3"),
        )
    with pytest.raises(ValueError, match="no quantized storage class is named"):
        QuantizedStorage.__tensor_unflatten__({}, {"cls": "Nothing"})


def test_saving_for_backward_survives_two_walks() -> None:
    """prepare_for_saving empties nothing, so a graph can be walked twice."""
    quantizer = te_dist.Float8BlockQuantizer("e4m3")
    storage = quantizer.quantize(varied((130, 70), torch.bfloat16))
    plain = torch.ones(3)
    tensors, specs = te_dist.prepare_for_saving(storage, None, plain)
    assert all(isinstance(t, torch.Tensor) for t in tensors)
    for _ in range(2):
        back, nothing, same = te_dist.restore_from_saved(specs, tensors)
        assert nothing is None and same is plain
        assert back.inner_names() == storage.inner_names()
        assert torch.equal(back.dequantize(), storage.dequantize())
    with pytest.raises(ValueError, match="expects 5 tensors but got 6"):
        te_dist.restore_from_saved(specs, [*tensors, plain])


def test_meta_device_needs_no_data() -> None:
    proto = TensorProto((256, 512), torch.bfloat16, delayed(), device=torch.device("meta"))
    assert proto.create_tensor().device.type == "meta"

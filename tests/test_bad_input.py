"""Wrong arguments: each a TypeError or ValueError that says what was given and what is needed."""

from __future__ import annotations

import pytest
import torch
from cases import QUANTIZERS, rng_for, varied

import te_dist
from te_dist import kernels

NAMES = sorted(QUANTIZERS)


@pytest.mark.parametrize("name", NAMES)
def test_input(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    for x, error, message in (
        (torch.ones(4, 16, dtype=torch.float64), TypeError, "expects float32.* but got float64"),
        (torch.ones(4, 16, dtype=torch.int32), TypeError, "but got int32"),
        (torch.ones(4, 16, dtype=torch.bool), TypeError, "but got bool"),
        (torch.ones(4, 16, dtype=torch.complex64), TypeError, "but got complex64"),
        (torch.ones(4, 16).to(torch.float8_e4m3fn), TypeError, "but got float8_e4m3fn"),
        (torch.tensor(1.0), ValueError, "at least one dimension but got a 0-d tensor"),
        (torch.ones(16, 16, device="meta"), ValueError, "needs data but x is on the meta device"),
        ([1.0, 2.0], TypeError, "expects a tensor but got list"),
        (None, TypeError, "expects a tensor but got NoneType"),
        (torch.ones(16, 16).to_sparse(), TypeError, "strided tensor"),
        (QUANTIZERS["mxfp8_e4m3"]().make_tensor(torch.ones(16, 16)), TypeError, "quantized already"),
    ):
        with pytest.raises(error, match=message) as caught:
            quantizer.quantize(x)
        assert type(quantizer).__name__ in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_out(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    x = varied((32, 64), torch.bfloat16)
    rng = rng_for(quantizer)
    good = quantizer.make_empty((32, 64))
    other_format = "mxfp8_e4m3" if "mxfp8" not in name else "block_2d"
    bad = {
        "another format": (QUANTIZERS[other_format]().make_empty((32, 64)), TypeError, "out expects a"),
        "another shape": (quantizer.make_empty((64, 32)), ValueError, r"out expects shape \[32, 64\]"),
        "another device": (quantizer.make_empty((32, 64), device="meta"), ValueError, "out expects device"),
        "other planes": (
            quantizer.with_usage(columnwise=False).make_empty((32, 64)), ValueError, "another quantizer",
        ),
        "a tensor": (torch.empty(32, 64), TypeError, "out expects a"),
    }  # fmt: skip
    for label, (out, error, message) in bad.items():
        with pytest.raises(error, match=message):
            quantizer.quantize(x, out=out, rng_state=rng)
            pytest.fail(label)
    assert quantizer.quantize(x, out=good, rng_state=rng) is good
    with pytest.raises(TypeError, match="quantized_storage"):
        quantizer.quantize(x, out=quantizer.make_tensor(x, rng_state=rng), rng_state=rng)


def test_out_of_another_option() -> None:
    x = torch.ones(32, 64)
    out = te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=1).make_empty((32, 64))
    with pytest.raises(ValueError, match="another quantizer"):
        te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2).quantize(x, out=out)


@pytest.mark.parametrize("name", NAMES)
def test_noop(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    x = varied((32, 64), torch.bfloat16)
    for noop, error in (
        (1.0, TypeError),
        (torch.ones(1, dtype=torch.float64), ValueError),
        (torch.ones(2), ValueError),
        (torch.ones(1, device="meta"), ValueError),
    ):
        with pytest.raises(error, match="noop expects"):
            quantizer.quantize(x, out=quantizer.make_empty((32, 64)), noop=noop, rng_state=rng_for(quantizer))


def test_rng_state() -> None:
    x = torch.ones(16, 32)
    with pytest.raises(ValueError, match="rng_state has no effect"):
        te_dist.NVFP4Quantizer().quantize(x, rng_state=torch.tensor([1, 2]))
    stochastic = te_dist.NVFP4Quantizer(stochastic_rounding=True)
    for rng in (torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0])):
        with pytest.raises(ValueError, match="rng_state expects"):
            stochastic.quantize(x, rng_state=rng)
    with pytest.raises(TypeError, match="rng_state expects a tensor"):
        stochastic.quantize(x, rng_state=(1, 2))


def test_dimensions_that_nvfp4_cannot_take() -> None:
    for kwargs, shape, message in (
        ({"columnwise": False}, (4, 31), "even last dimension"),
        ({"rowwise": False}, (3, 32), "M is 3"),
        ({"with_rht": True}, (24, 32), "multiple of 16 but M is 24"),
    ):
        quantizer = te_dist.NVFP4Quantizer(**kwargs)
        with pytest.raises(ValueError, match=message):
            quantizer.quantize(torch.ones(shape))
        with pytest.raises(ValueError, match=message):
            quantizer.make_empty(shape)
        torch._dynamo.reset()
        with pytest.raises(Exception, match=message):
            torch.compile(lambda x, q=quantizer: q.quantize(x).dequantize(), fullgraph=True, backend="eager")(
                torch.ones(shape)
            )


def test_constructor_arguments() -> None:
    for make, message in (
        (lambda: te_dist.Float8CurrentScalingQuantizer("e3m4"), "but got 'e3m4'"),
        (lambda: te_dist.Float8CurrentScalingQuantizer("bf16"), "e4m3 or e5m2 but got bf16"),
        (lambda: te_dist.Float8CurrentScalingQuantizer(torch.float64), "but got torch.float64"),
        (lambda: te_dist.Float8CurrentScalingQuantizer("e4m3", amax_epsilon=-1.0), "amax_epsilon"),
        (lambda: te_dist.Float8CurrentScalingQuantizer("e4m3", amax_epsilon=float("nan")), "amax_epsilon"),
        (lambda: te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=3), "block_scaling_dim 1 .* got 3"),
        (lambda: te_dist.NVFP4Quantizer("e4m3"), "fp4_dtype e2m1"),
        (lambda: te_dist.NVFP4Quantizer(with_rht=True, with_2d_quantization=True), "choose one"),
        (lambda: te_dist.MXFP8Quantizer("e4m3", rowwise=False, columnwise=False), "rowwise or columnwise"),
        (lambda: te_dist.IdentityQuantizer(dtype="e4m3"), "float32, float16, bfloat16 or None"),
        (lambda: te_dist.Float8Quantizer(torch.ones(2), torch.zeros(1), "e4m3"), "scale expects"),
        (lambda: te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1).double(), "e4m3"), "amax expects"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="scale expects a tensor"):
        te_dist.Float8Quantizer(1.0, torch.zeros(1), "e4m3")
    with pytest.raises(TypeError, match="its fields are"):
        te_dist.MXFP8Quantizer("e4m3").replace(margin=1)


@pytest.mark.parametrize("name", NAMES)
def test_group(name: str) -> None:
    quantizer = QUANTIZERS[name]()
    x = varied((32, 64), torch.bfloat16)
    with pytest.raises(ValueError, match="not initialized"):
        quantizer.quantize(x, amax_reduction_group="0", rng_state=rng_for(quantizer))


def test_group_of_the_wrong_kind(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name, make in QUANTIZERS.items():
            quantizer = make()
            x = varied((32, 64), torch.bfloat16)
            rng = rng_for(quantizer)
            with pytest.raises(ValueError, match="no process group is named 'nobody'"):
                quantizer.quantize(x, amax_reduction_group="nobody", rng_state=rng)
            with pytest.raises(TypeError, match=r"expects a ProcessGroup.* but got int"):
                quantizer.quantize(x, amax_reduction_group=3, rng_state=rng)
            with pytest.raises(ValueError, match="not a member"):
                outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
                quantizer.quantize(x, amax_reduction_group=outside, rng_state=rng)
            assert name
    finally:
        torch.distributed.destroy_process_group()


def test_dtensor_is_told_to_go_local(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        from torch.distributed.tensor import distribute_tensor

        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.ones(16, 32), mesh)
        with pytest.raises(TypeError, match="to_local"):
            te_dist.MXFP8Quantizer("e4m3").quantize(x)
    finally:
        torch.distributed.destroy_process_group()


def test_planes_that_cannot_be_derived() -> None:
    x = torch.ones(32, 64)
    for name in ("block_1d", "mxfp8_e4m3", "nvfp4", "nvfp4_rht"):
        row = QUANTIZERS[name](columnwise=False).quantize(x)
        with pytest.raises(ValueError, match="scaled independently"):
            row.with_usage(rowwise=True, columnwise=True)


def test_kernel_entry_points_raise_value_error() -> None:
    """What slips past Python is still refused, by name, instead of reading out of bounds."""
    with pytest.raises(ValueError, match="multiples of 128"):
        kernels.swizzle_scales(torch.zeros(3, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="even number of rows"):
        kernels.transpose_nibbles(torch.zeros(3, 4, dtype=torch.uint8))
    if kernels.has_extension():
        cpu = kernels.extension.cpu
        with pytest.raises(ValueError, match="rows"):
            cpu.amax(0, 0, -1, 4, 4, torch.zeros(1).data_ptr(), False, 0, 1)
        with pytest.raises(ValueError, match="stride"):
            cpu.amax(torch.ones(8).data_ptr(), 0, 2, 4, 2, torch.zeros(1).data_ptr(), False, 0, 1)
        with pytest.raises(ValueError):
            cpu.amax(0, 0, 1, 4, 4, torch.zeros(1).data_ptr(), False, 0, 1)
        with pytest.raises(ValueError):
            cpu.amax(torch.ones(4).data_ptr(), 9, 1, 4, 4, torch.zeros(1).data_ptr(), False, 0, 1)


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="use_backend expects one of"), te_dist.use_backend("gpu"):
        pass


def test_noop_without_out() -> None:
    with pytest.raises(ValueError, match="noop needs out="):
        te_dist.MXFP8Quantizer("e4m3").quantize(torch.ones(32, 32), noop=torch.ones(1))


def test_a_lazily_negated_view() -> None:
    x = varied((32, 64), torch.float32)
    storage = te_dist.MXFP8Quantizer("e4m3").quantize(torch._neg_view(x))
    assert torch.equal(storage.dequantize(), -te_dist.MXFP8Quantizer("e4m3").quantize(x).dequantize())


def test_small_things_are_named() -> None:
    with pytest.raises(ValueError, match="block_scaling_dim"):
        te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2.0)
    with pytest.raises(ValueError, match="e4m3 or e5m2 but got bf16"):
        te_dist.delayed_scaling.update_scale(torch.zeros(2, 1), torch.ones(1), "bf16")
    with pytest.raises(ValueError, match=r"\[3, -1, 64\] does not fit"):
        te_dist.MXFP8Quantizer("e4m3").make_tensor(torch.ones(4, 64)).view(3, -1, 64)
    with pytest.raises(ValueError, match="even last dimension"):
        te_dist.TensorProto((4, 5), torch.bfloat16, te_dist.NVFP4Quantizer(columnwise=False)).create_tensor()
    with pytest.raises(ValueError, match="at least one dimension"):
        te_dist.TensorProto((), torch.bfloat16, te_dist.MXFP8Quantizer("e4m3")).create_tensor()
    live = te_dist.Float8Quantizer(torch.ones(1), torch.zeros(1), "e4m3")
    with pytest.raises(ValueError, match="scale expects"):
        live.scale = torch.ones(1, dtype=torch.float64)

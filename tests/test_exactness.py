"""Compiled kernels against the torch reference: every buffer equal bit for bit, on every device there is."""

from __future__ import annotations

import pytest
import torch
from cases import (
    DTYPES,
    PLANES,
    QUANTIZERS,
    SHAPES,
    assert_same_storage,
    check_against_reference,
    fits,
    on,
    rng_for,
    special_values,
    varied,
)

import te_dist
from te_dist import QuantizedStorage, kernels, reference

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("planes", PLANES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_shapes(name: str, planes: str, dtype: torch.dtype, device: str) -> None:
    for shape in SHAPES:
        check_against_reference(QUANTIZERS[name], varied(shape, dtype), planes, device, f"{name} {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_special_values(name: str, dtype: torch.dtype, device: str) -> None:
    for label, x in special_values(dtype):
        check_against_reference(QUANTIZERS[name], x, "both", device, f"{name} {label} {dtype}")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_non_contiguous_input(name: str, device: str) -> None:
    base = varied((288, 288), torch.bfloat16)
    for label, x in (
        ("transposed", base.t()),
        ("every other row", base[::2, :272]),
        ("every other column", base[:144, ::2]),
        ("offset", base[1:145, 3:275]),
        ("expanded", base[:1, :64].expand(32, 64)),
        ("3-D view", base[:, :256].reshape(2, 144, 256)[:, :128]),
    ):
        check_against_reference(QUANTIZERS[name], x, "both", device, f"{name} {label}")


@pytest.mark.parametrize("shape", [(64, 96), (256, 1024)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_noop_flag_keeps_everything(name: str, shape: tuple[int, int], device: str) -> None:
    quantizer = on(device, QUANTIZERS[name]())
    rng = rng_for(quantizer, device)
    first, second = (varied(shape, torch.bfloat16, seed).to(device) for seed in (1, 2))
    out = quantizer.quantize(first, rng_state=rng)
    before = out.clone()
    recorded = quantizer.amax.clone() if isinstance(quantizer, te_dist.Float8Quantizer) else None
    quantizer.quantize(second, out=out, noop=torch.ones(1, device=device), rng_state=rng)
    assert_same_storage(out, before, "noop")
    if recorded is not None:
        assert torch.equal(quantizer.amax, recorded)
    quantizer.quantize(second, out=out, noop=torch.zeros(1, device=device), rng_state=rng)
    assert_same_storage(out, quantizer.quantize(second, rng_state=rng), "no noop")
    assert not torch.equal(out.inner_tensors()[0], before.inner_tensors()[0])


@pytest.mark.parametrize("shape", [(144, 272), (272, 1040)], ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_out_buffers_are_written_whole(name: str, shape: tuple[int, int], device: str) -> None:
    """Poisoned buffers end up like fresh ones: nothing, padding included, is left unwritten."""
    quantizer = on(device, QUANTIZERS[name]())
    x = varied(shape, torch.bfloat16).to(device)
    rng = rng_for(quantizer, device)
    expected = quantizer.quantize(x, rng_state=rng)
    out = quantizer.make_empty(x.shape, dtype=x.dtype, device=device)
    for buffer in out.inner_tensors():
        buffer.view(torch.uint8).fill_(0xAB)
    assert quantizer.quantize(x, out=out, rng_state=rng) is out
    assert_same_storage(out, expected, name)


def test_threads_do_not_change_bytes() -> None:
    x = varied((1000, 1040), torch.bfloat16)
    before = torch.get_num_threads()
    try:
        for name, make in QUANTIZERS.items():
            quantizer = make()
            if not fits(quantizer, (1000, 1040)):
                quantizer = make(columnwise=False)
            results: list[QuantizedStorage] = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                results.append(quantizer.copy().quantize(x, rng_state=rng_for(quantizer)))
            assert_same_storage(results[0], results[1], name)
    finally:
        torch.set_num_threads(before)


def test_transposes_and_swizzle(device: str) -> None:
    for rows, cols in ((128, 4), (256, 12), (384, 8)):
        scale = torch.randint(256, (rows, cols), dtype=torch.uint8)
        swizzled = kernels.swizzle_scales(scale.to(device)).cpu().flatten()
        for row in range(0, rows, 7):
            for col in range(cols):
                i, j = row % 128, col % 4
                index = (row // 128 * (cols // 4) + col // 4) * 512 + (i % 32) * 16 + (i // 32) * 4 + j
                assert swizzled[index] == scale[row, col]
        assert torch.equal(swizzled, reference.swizzle_scales(scale).flatten())
    for rows, cols in ((0, 4), (1, 1), (2, 6), (130, 66), (128, 128), (384, 192), (34, 250)):
        data = torch.randint(256, (rows, cols), dtype=torch.uint8)
        assert torch.equal(kernels.transpose_bytes(data.to(device)).cpu(), data.t())
        if rows % 2 == 0:
            turned = kernels.transpose_nibbles(data.to(device)).cpu()
            assert torch.equal(turned, reference.transpose_nibbles(data))
            assert torch.equal(kernels.transpose_nibbles(turned.to(device)).cpu(), data)


@pytest.mark.parametrize("name", ["current_e4m3", "block_2d", "mxfp8_2d", "nvfp4_2d"])
def test_derived_planes_equal_quantized_ones(name: str, device: str) -> None:
    """Where a plane can be made from the other, it equals the one that quantize makes."""
    x = varied((144, 272), torch.bfloat16).to(device)
    both = QUANTIZERS[name]().quantize(x)
    for rowwise in (True, False):
        one = QUANTIZERS[name](rowwise=rowwise, columnwise=not rowwise).quantize(x)
        derived = one.with_usage(rowwise=True, columnwise=True)
        assert_same_storage(derived, both, name)
        assert derived.quantizer == both.quantizer
        assert both.with_usage(rowwise=rowwise, columnwise=not rowwise).inner_names() == one.inner_names()

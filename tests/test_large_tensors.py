"""More than 2**31 elements: indices that wrap at 32 bits would corrupt the end of the tensor."""

from __future__ import annotations

import pytest
import torch
from cases import VALUE_QUANTIZERS, assert_same_bytes, rng_for

import te_dist

ROWS, COLS, TAIL = 513 * 128, 32768, 128
NAMES = ["current_e4m3", "block_1d", "block_2d", "mxfp8_e4m3", "nvfp4_rht"]


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    assert ROWS * COLS > 2**31
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free GPU memory")
    x = torch.randn(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    # The tail alone decides every global amax, so its own quantization is the slice of the whole's.
    x[-TAIL:] *= 64
    return x


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_the_end_of_a_large_tensor(name: str, large: torch.Tensor) -> None:
    quantizer = VALUE_QUANTIZERS[name]()
    whole = quantizer.quantize(large, rng_state=rng_for(quantizer, "cuda"))
    tail = quantizer.quantize(large[-TAIL:], rng_state=rng_for(quantizer, "cuda"))
    if isinstance(whole, te_dist.Float8TensorStorage):
        assert_same_bytes(whole._data[-TAIL:], tail._data, name)
        assert_same_bytes(whole._transpose[:, -TAIL:].contiguous(), tail._transpose, name)
        assert_same_bytes(whole._scale_inv, tail._scale_inv, name)
        head = whole._data[:TAIL].view(torch.float8_e4m3fn).float() * whole._scale_inv
    else:
        assert_same_bytes(whole._rowwise_data[-TAIL:], tail._rowwise_data, name)
        if name == "mxfp8_e4m3":
            assert_same_bytes(whole._columnwise_data[-TAIL:], tail._columnwise_data, name)
        else:
            width = tail._columnwise_data.shape[1]
            assert_same_bytes(whole._columnwise_data[:, -width:].contiguous(), tail._columnwise_data, name)
        head = None
    values = whole.dequantize()
    assert_same_bytes(values[-TAIL:], tail.dequantize(), f"{name} dequantized")
    if head is not None:
        assert torch.equal(values[:TAIL], head.to(torch.bfloat16))


@pytest.mark.cuda
def test_amax_sees_the_last_element(large: torch.Tensor) -> None:
    large = large.clone()
    large[-1, -1] = 1e6
    storage = te_dist.Float8CurrentScalingQuantizer("e4m3", columnwise=False).quantize(large)
    expected = te_dist.Float8CurrentScalingQuantizer("e4m3").quantize(large[-1:, -1:])
    assert torch.equal(storage._scale_inv, expected._scale_inv)

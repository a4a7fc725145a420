"""Golden vectors: what Transformer Engine's and torchao's own kernels made of the same inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import assert_same_bytes

import te_dist
from te_dist.formats import ceil_div

GOLDEN = np.load(Path(__file__).parent / "data" / "peers.npz")
KEYS = frozenset(GOLDEN.files)
BACKENDS = ("auto", "reference")
# The smallest normal E4M3 number: torchao floors NVFP4 block scales there, Transformer Engine and we do not.
TORCHAO_SCALE_FLOOR = 0x08


def golden(key: str) -> torch.Tensor:
    return torch.from_numpy(GOLDEN[key])


def cases(prefix: str) -> Iterator[tuple[str, str]]:
    """(case, key prefix) of every input for which `prefix` has results."""
    for key in sorted(KEYS):
        if key.startswith("in/bf16/"):
            case = key.removeprefix("in/bf16/")
            if any(k.startswith(f"out/{prefix}/bf16/{case}/") for k in KEYS):
                yield case, f"out/{prefix}/bf16/{case}/"


def load(case: str, device: str) -> torch.Tensor:
    return golden(f"in/bf16/{case}").view(torch.bfloat16).to(device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pow2", [0, 1])
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_current_scaling(fp8: str, pow2: int, backend: str, device: str) -> None:
    found = list(cases(f"current_{fp8}_pow2{pow2}"))
    assert len(found) >= 7
    quantizer = te_dist.Float8CurrentScalingQuantizer(fp8, force_pow_2_scales=bool(pow2))
    for case, key in found:
        with te_dist.use_backend(backend):
            storage = quantizer.quantize(load(case, device))
        for name in ("_data", "_transpose", "_scale_inv"):
            assert_same_bytes(getattr(storage, name), golden(key + name), key + name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pow2", [0, 1])
@pytest.mark.parametrize("dim", [1, 2])
def test_blockwise(dim: int, pow2: int, backend: str, device: str) -> None:
    found = list(cases(f"block{dim}d_e4m3_pow2{pow2}"))
    assert len(found) >= 7
    quantizer = te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=dim, force_pow_2_scales=bool(pow2))
    for case, key in found:
        x = load(case, device)
        with te_dist.use_backend(backend):
            storage = quantizer.quantize(x)
        for plane, (rows, cols) in (("rowwise", x.shape), ("columnwise", x.shape[::-1])):
            assert_same_bytes(getattr(storage, f"_{plane}_data"), golden(f"{key}_{plane}_data"), f"{key}{plane}")
            blocks = ceil_div(cols, 128)
            valid = (slice(ceil_div(rows, 128)), slice(blocks)) if dim == 2 else (slice(blocks), slice(rows))
            scale = getattr(storage, f"_{plane}_scale_inv")
            expected = golden(f"{key}_{plane}_scale_inv")
            assert scale.shape == expected.shape
            assert_same_bytes(scale[valid], expected[valid], f"{key}{plane} scale")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fp8", ["e4m3", "e5m2"])
def test_mxfp8(fp8: str, backend: str, device: str) -> None:
    found = list(cases(f"mxfp8_{fp8}"))
    assert len(found) >= 6
    for case, key in found:
        x = load(case, device)
        rows, cols = x.shape
        with te_dist.use_backend(backend):
            storage = te_dist.MXFP8Quantizer(fp8).quantize(x)
        assert_same_bytes(storage._rowwise_data, golden(key + "row_data"), key + "row")
        assert_same_bytes(storage._columnwise_data, golden(key + "col_data"), key + "column")
        row_scale = storage._rowwise_scale_inv[:rows, : cols // 32]
        assert_same_bytes(row_scale, golden(key + "row_scale"), key + "row scale")
        col_scale = storage._columnwise_scale_inv[: rows // 32, :cols]
        assert_same_bytes(col_scale, golden(key + "col_scale"), key + "column scale")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nvfp4(backend: str, device: str) -> None:
    found = list(cases("nvfp4_1d"))
    assert len(found) >= 2
    blocks_seen = floored_seen = 0
    for case, key in found:
        x = load(case, device)
        rows, cols = x.shape
        with te_dist.use_backend(backend):
            storage = te_dist.NVFP4Quantizer(columnwise=False).quantize(x)
        assert_same_bytes(storage._amax_rowwise, golden(key + "amax"), key + "amax")
        scale = storage._rowwise_scale_inv[:rows, : cols // 16].cpu()
        expected = golden(key + "row_scale")
        floored = scale < TORCHAO_SCALE_FLOOR
        assert torch.equal(expected[floored], torch.full_like(expected[floored], TORCHAO_SCALE_FLOOR))
        assert torch.equal(scale[~floored], expected[~floored])
        blocks = storage._rowwise_data.cpu().view(rows, cols // 16, 8)
        wanted = golden(key + "row_data").view(rows, cols // 16, 8)
        assert torch.equal(blocks[~floored], wanted[~floored])
        blocks_seen += scale.numel()
        floored_seen += int(floored.sum())
    assert floored_seen <= blocks_seen // 1000, "nearly every block is compared"

"""Compiled kernels against the torch reference on shapes and values that hypothesis draws."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DTYPES, PLANES, QUANTIZERS, check_against_reference, fits, varied

from te_dist import kernels

pytest.importorskip("hypothesis")
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(not kernels.has_extension(), reason="the extension is not built")

finite_or_not = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 448.0, 464.0, 57344.0, 6.0, 5.0, 2.5, 1e-45]),
)


@pytest.mark.parametrize("name", QUANTIZERS)
@given(
    rows=st.integers(0, 70),
    cols=st.integers(0, 140),
    values=st.lists(finite_or_not, min_size=1, max_size=8),
    seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from(DTYPES),
    planes=st.sampled_from(sorted(PLANES)),
)
@example(rows=16, cols=32, values=[math.nan], seed=0, dtype=torch.float32, planes="both")
def test_random_tensors(name, rows, cols, values, seed, dtype, planes) -> None:
    """Random shapes and scales with arbitrary floats sprinkled in."""
    rowwise, columnwise = PLANES[planes]
    quantizer = QUANTIZERS[name](rowwise=rowwise, columnwise=columnwise)
    # The format's own constraints, met by rounding down: an even K, M in pairs or in groups of 16.
    cols -= 0 if fits(quantizer, (16, cols)) else 1
    rows = next(r for r in (rows, rows // 2 * 2, rows // 16 * 16) if fits(quantizer, (r, cols)))
    x = varied((rows, cols), torch.float32, seed)
    if x.numel():
        positions = torch.randint(x.numel(), (len(values),), generator=torch.Generator().manual_seed(seed))
        x.view(-1)[positions] = torch.tensor(values)
    x = x.to(dtype)
    check_against_reference(QUANTIZERS[name], x, planes, "cpu", f"{name} {rows}x{cols} {dtype}")

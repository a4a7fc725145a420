"""The random bytes of NVFP4's stochastic rounding: what is independent of what (csrc/numerics/philox.h), and that
rounding does to products and sums what bytes drawn one by one would do to them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

import te_dist
from te_dist import reference

LINES, BLOCKS = 256, 16  # two by two tiles


def plane(seed: int, columnwise: bool = False, lines: int = LINES, blocks: int = BLOCKS) -> Tensor:
    return reference.random_bytes(torch.tensor([seed, 4]), lines, blocks, columnwise)


def test_tiles_planes_seeds_and_offsets_have_bytes_of_their_own() -> None:
    """Of two independent bytes, one pair in 256 is the same."""
    tiles = []
    for state in ([3, 4], [4, 3], [3, 2**40 + 4], [2**40 + 3, 4]):
        for columnwise in (False, True):
            whole = reference.random_bytes(torch.tensor(state), LINES, BLOCKS, columnwise)
            tiles += [tile for half in whole.split(128) for tile in half.split(128, 1)]
    assert len(tiles) == 32
    for i, tile in enumerate(tiles):
        for other in tiles[:i]:
            same = (tile == other).float().mean().item()
            # Bytes of two tiles are equal by whole lines, as it were: 256 chances a place, not 16384.
            assert abs(same - 1 / 256) < 0.004


def test_sizes_change_no_byte() -> None:
    for columnwise in (False, True):
        whole = plane(5, columnwise)
        for lines, blocks in [(0, 3), (3, 0), (1, 1), (3, 7), (130, 9), (256, 16)]:
            assert torch.equal(plane(5, columnwise, lines, blocks), whole[:lines, : 16 * blocks])


def test_every_byte_is_as_frequent() -> None:
    counts = sum(torch.bincount(plane(seed).flatten(), minlength=256) for seed in range(40)).double()
    expected = counts.sum() / 256
    # Of independent ones 255, give or take 23; those of a tile are sums of few.
    assert ((counts - expected) ** 2 / expected).sum() < 2 * 255


def rank(bits: Tensor) -> int:
    """Of a matrix of zeros and ones, modulo two."""
    rows = [int("".join(map(str, row)), 2) for row in bits.tolist()]
    found = 0
    while rows:
        pivot = rows.pop()
        if pivot != 0:
            found += 1
            lowest = pivot & -pivot
            rows = [row ^ pivot if row & lowest else row for row in rows]
    return found


def test_what_is_independent() -> None:
    """By 180 seeds: whether there are bytes of which the XOR of a bit is always the same. In a line there are none, and
    none at one place of the lines of a tile. Of a tile there are: it has 128 bytes of lines and 128 of places.
    """
    draws = [plane(seed, lines=128, blocks=8) for seed in range(180)]

    def is_independent(part: Tensor, bit: int) -> bool:
        bits = (part >> bit) & 1  # [seeds, bytes]
        constant = torch.ones(len(bits), 1, dtype=bits.dtype)
        return rank(torch.cat([bits, constant], 1)) == bits.shape[1] + 1

    for bit in (0, 7):
        assert is_independent(torch.stack([draw[77] for draw in draws]), bit)
        assert is_independent(torch.stack([draw[:, 50] for draw in draws]), bit)
        corners = torch.stack([draw[[[3], [99]], [8, 25]].flatten() for draw in draws])
        assert all(is_independent(corners[:, some], bit) for some in ([0, 1], [0, 2], [0, 3], [1, 2], [0, 1, 2]))
        assert not is_independent(corners, bit)


def rounded(x: Tensor, count: int) -> Iterator[Tensor]:
    quantizer = te_dist.NVFP4Quantizer(columnwise=False, stochastic_rounding=True)
    for seed in range(count):
        yield quantizer.quantize(x, rng_state=torch.tensor([seed, 0])).dequantize().double()


def test_noise_of_products_and_sums() -> None:
    """Their variances are what they would be of independent bytes. 500 draws tell a variance up to 6 %."""
    x = torch.full((128, 128), 0.3) + 0.5 * torch.rand(128, 128, generator=torch.Generator().manual_seed(1))
    x[:, ::16] = 6.0  # every block has the same scale, by which x is multiplied with 1
    x[:64, 1] = x[0, 1]  # lines that are alike where that could matter
    weight = torch.randn(128, 64, generator=torch.Generator().manual_seed(2)).double()
    made = torch.stack(list(rounded(x, 500)))
    parts = (x.double() * 512).floor() / 512  # a byte cannot tell more
    share = parts * 2 % 1
    variance = 0.25 * share * (1 - share)
    assert (made.mean(0) - parts)[:, 1:16].abs().max() < 6 * 0.25 / 500**0.5

    def check(values: Tensor, expected: Tensor, tolerance: float) -> None:
        some = expected > 0  # sixes are what they are
        found = (values.var(0)[some] / expected[some]).mean().item()
        assert abs(found - 1) < tolerance, found

    check(made @ weight, variance @ weight**2, 0.01)  # along lines
    check(weight.t() @ made, weight.t() ** 2 @ variance, 0.01)  # across them
    check(made.sum((1, 2)), variance.sum(), 0.25)
    check(made[:, :64, 1].sum(1), variance[:64, 1].sum(), 0.25)
    check((weight.t() @ made @ weight).flatten(1), (weight.t() ** 2 @ variance @ weight**2).flatten(), 0.03)

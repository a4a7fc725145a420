"""``te-dist formats``: every format on a transformer-like weight and activation: size, accuracy and speed."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import te_dist
from te_dist import kernels
from te_dist.launch.doctor import table


@dataclasses.dataclass(frozen=True)
class Result:
    """One row of the table."""

    tensor: str
    format: str
    bytes_ratio: float  # row plane with its scales, against bf16
    sqnr_db: float
    max_error: float  # relative to the tensor's amax
    kernel_ms: float  # nan: there is no compiled kernel here
    reference_ms: float


def transformer_weight(rows: int, cols: int) -> Tensor:
    """Gaussian weights whose output channels differ in scale, as trained ones do."""
    generator = torch.Generator().manual_seed(0)
    channel = torch.exp(0.3 * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, cols, generator=generator) * channel * 0.02).to(torch.bfloat16)


def transformer_activation(tokens: int, cols: int) -> Tensor:
    """Heavy-tailed values with a few outlier channels: what a residual stream looks like."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, cols, generator=generator)
    x = x * torch.exp(0.5 * torch.randn(tokens, 1, generator=generator))
    outliers = torch.randperm(cols, generator=generator)[: max(1, cols // 256)]
    x[:, outliers] *= 20.0
    return x.to(torch.bfloat16)


def formats(is_weight: bool) -> dict[str, Callable[[Tensor], te_dist.Quantizer]]:
    """The five formats as their recipes use them: 2-D blocks for weights where there are any."""

    def delayed(x: Tensor) -> te_dist.Quantizer:
        # The scale of a previous step whose amax was a little smaller, as in training.
        amax = x.float().abs().amax().reshape(1)
        return te_dist.Float8Quantizer(448.0 / (amax * 0.9), torch.zeros(1), "e4m3")

    return {
        "FP8 delayed scaling": delayed,
        "FP8 current scaling": lambda x: te_dist.Float8CurrentScalingQuantizer("e4m3"),
        "FP8 blockwise": lambda x: te_dist.Float8BlockQuantizer("e4m3", block_scaling_dim=2 if is_weight else 1),
        "MXFP8": lambda x: te_dist.MXFP8Quantizer("e4m3"),
        "NVFP4": lambda x: te_dist.NVFP4Quantizer(with_2d_quantization=is_weight),
    }


def sqnr_db(x: Tensor, y: Tensor) -> float:
    """Signal to quantization noise in dB."""
    noise = (x.double() - y.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(x.double().square().sum().item() / noise)


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of a call, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e3


def measure(size: int, repeats: int, show: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Every format on both tensors."""
    results = []
    for tensor, x in (
        ("weight", transformer_weight(size, size)),
        ("activation", transformer_activation(size, size)),
    ):
        for name, make in formats(tensor == "weight").items():
            show(f"{tensor}: {name}")
            quantizer = make(x)
            row = quantizer.with_usage(columnwise=False)
            storage = row.quantize(x)
            y = storage.dequantize()
            kernel_ms = math.nan
            quantize = functools.partial(row.quantize, x)
            if kernels.backend_name(x.device) != "reference":
                kernel_ms = milliseconds(quantize, repeats)
            with te_dist.use_backend("reference"):
                reference_ms = milliseconds(quantize, repeats)
            results.append(
                Result(
                    tensor,
                    name,
                    storage.nbytes() / (2 * x.numel()),
                    sqnr_db(x, y),
                    ((x.float() - y.float()).abs().max() / x.float().abs().max()).item(),
                    kernel_ms,
                    reference_ms,
                )
            )
    return results


def as_table(results: list[Result]) -> str:
    rows = [
        (
            r.tensor,
            r.format,
            f"{r.bytes_ratio:.3f}x",
            f"{r.sqnr_db:.1f} dB",
            f"{100 * r.max_error:.2f} %",
            "-" if math.isnan(r.kernel_ms) else f"{r.kernel_ms:.1f} ms",
            f"{r.reference_ms:.1f} ms",
        )
        for r in results
    ]
    header = ("tensor", "format", "bytes vs bf16", "SQNR", "max error", "C++ kernel", "torch reference")
    return table(header, list(rows))


def plot(results: list[Result], path: Path) -> None:
    """The same numbers as bars, one panel per column of the table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r.format for r in results))
    panels = (
        ("bytes, relative to bf16 (1.0)", lambda r: r.bytes_ratio, "{:.2f}"),
        ("SQNR in dB (higher is better)", lambda r: r.sqnr_db, "{:.0f}"),
        ("largest error, % of the amax", lambda r: 100 * r.max_error, "{:.1f}"),
        ("speed-up of the kernel over torch", lambda r: r.reference_ms / r.kernel_ms, "{:.0f}x"),
    )
    figure, axes = plt.subplots(2, 2, figsize=(12, 7.5), layout="constrained")
    for axis, (title, value, label) in zip(axes.flat, panels, strict=True):
        for offset, tensor in ((-0.2, "weight"), (0.2, "activation")):
            values = [value(r) for name in names for r in results if (r.tensor, r.format) == (tensor, name)]
            places = [i + offset for i in range(len(names))]
            bars = axis.bar(places, values, width=0.38, label=tensor)
            if not any(math.isnan(v) for v in values):
                axis.bar_label(bars, labels=[label.format(v) for v in values], fontsize=8, padding=2)
        axis.set_title(title, fontsize=11)
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n", 1) for name in names], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(y=0.12)
    axes.flat[0].legend(frameon=False, fontsize=9)
    figure.suptitle("te_dist: one transformer-like weight and activation in every format")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, save the plot."""
    parser = argparse.ArgumentParser(prog="te-dist formats", description=__doc__)
    parser.add_argument("--size", type=int, default=2048, help="rows and columns of the tensors (default 2048)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions (default 5)")
    parser.add_argument("--plot", type=Path, default=Path("demo_output/quantization.png"), help="where the plot goes")
    options = parser.parse_args(argv)
    if options.size < 32 or options.size % 16:
        parser.error(f"--size expects a multiple of 16, at least 32, but got {options.size}")
    if options.repeats < 1:
        parser.error(f"--repeats expects at least 1 but got {options.repeats}")

    print(f"te_dist {te_dist.__version__} on torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"quantizing {options.size} x {options.size} bf16 tensors, row plane\n")
    results = measure(options.size, options.repeats, lambda text: print(f"  {text}", flush=True))
    print(f"\n{as_table(results)}\n")
    if not kernels.has_extension():
        print("The C++ kernels are not built here; `te-dist doctor` says why.")
    try:
        plot(results, options.plot)
    except ImportError:
        print("matplotlib is not installed, so there is no plot: pip install 'te-dist[plots]'")
    else:
        print(f"plot: {options.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

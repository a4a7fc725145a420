"""``te-dist doctor``: what is installed, what was built, and what runs natively, emulated or in the reference here."""

from __future__ import annotations

import os
import platform
import sys

import torch

import te_dist
from te_dist import capability, kernels, torch_compat
from te_dist.gemm import dispatch_table

# The kernel that quantizes for each recipe.
QUANTIZE_KERNEL = {
    "DelayedScaling": "cast_scaled",
    "Float8CurrentScaling": "cast_current",
    "Float8BlockScaling": "quantize_block",
    "MXFP8BlockScaling": "quantize_mxfp8",
    "NVFP4BlockScaling": "quantize_nvfp4",
}


def devices() -> list[tuple[str, str]]:
    """(torch device, what it is) for every device te_dist can use here."""
    cpu = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads"
    if torch.bfloat16 in torch_compat.SLOW_CPU_DTYPES:
        cpu += ", slow in bfloat16: torch multiplies it without instructions for it"
    found = [("cpu", cpu)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        found.append(
            (
                f"cuda:{index}",
                f"{properties.name}, compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB",
            )
        )
    return found


def recipe_rows() -> list[tuple[str, str, str, str]]:
    """(device, recipe, what quantizes, what multiplies) for every device and recipe."""
    rows = []
    for device, _ in devices():
        for recipe, kernel in QUANTIZE_KERNEL.items():
            backend = kernels.backend_name(device, kernel)
            quantize = "reference (pure torch)" if backend == "reference" else f"native ({backend} kernel)"
            native, reason = capability.gemm_support(recipe, device)
            gemm = f"native ({reason})" if native else f"emulated ({reason})"
            rows.append((device, recipe, quantize, gemm))
    return rows


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns aligned with spaces."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in [header, *rows]]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def gemm_rows() -> list[tuple[str, str, str, str]]:
    """The GEMM dispatch table of every kind of device here."""
    rows = []
    for device in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        for row in dispatch_table(device):
            pair = row.a if row.a == row.b else f"{row.a} x {row.b}"
            rows.append((device, pair, row.implementation, row.reason))
    return rows


def report() -> str:
    """The whole report as text."""
    versions = {
        "te_dist": f"{te_dist.__version__} ({os.path.dirname(te_dist.__file__)})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda (torch)": torch.version.cuda or "none",
        **kernels.extension_info(),
        "torch.compile": "quantizers are graph constants"
        if torch_compat.supports_value_types()
        else "this torch has no opaque value types: quantizers cannot enter compiled graphs",
        "distributed": "available" if torch.distributed.is_available() else "not built into this torch",
    }
    width = max(len(name) for name in versions)
    parts = ["te-dist doctor", ""]
    parts += [f"{name.ljust(width)}  {value}" for name, value in versions.items()]
    if not kernels.has_extension():
        parts += ["", "The kernel extension is missing, so the slow pure-torch reference runs: pip install te-dist, "
                      "or build it from a checkout with: pip install -e ."]  # fmt: skip
    elif kernels.backend_name("cpu") == "reference":
        parts += ["", "TE_DIST_BACKEND=reference is set: the compiled kernels are not used."]
    parts += ["", table(("device", "description"), list(devices()))]
    parts += ["", table(("device", "recipe", "quantize", "GEMM"), list(recipe_rows()))]
    parts += ["", table(("device", "product of", "is computed by", "because"), list(gemm_rows()))]
    implicit = te_dist.implicit_dequantizations()
    parts += ["", f"implicit dequantizations in this process: {sum(implicit.values())}"]
    parts += [f"  {op}: {count}" for op, count in sorted(implicit.items())]
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Print the report."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        print("usage: te-dist doctor\n\nPrints versions, devices, and what runs natively here.")
        return 0 if arguments[0] in ("-h", "--help") else 2
    print(report())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

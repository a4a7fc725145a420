"""Writes the tables of the README from the results in benchmarks/results/, so that no figure is ever typed.

python benchmarks/readme_tables.py           # rewrite the README
python benchmarks/readme_tables.py --check   # exit 1 if it is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(report: dict[str, Any]) -> str:
    return f"{report['device']}, torch {report['torch']}, CUDA {report['cuda']}."


PLANES = ("row", "column", "row+column")


def kernels(report: dict[str, Any]) -> str:
    """Each kernel at the largest shape that all of them were measured at, the planes that it writes side by side."""
    shape = max((tuple(row["shape"]) for row in report["results"]), key=lambda s: (s == (16384, 8192), s))
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in report["results"]:
        if tuple(row["shape"]) != shape or "limit_us" not in row:
            continue
        name, _, plane = row["kernel"].rpartition(", ")
        if plane in PLANES:
            found.setdefault(name, {})[plane] = row
        else:  # it writes no planes
            found[row["kernel"]] = {PLANES[0]: row}
    plain = {name: rows for name, rows in found.items() if " + " not in name or name.startswith("torch.compile")}

    def cell(row: dict[str, Any] | None) -> str:
        return f"{row['us']:.0f} ({100 * row['fraction']:.0f} %)" if row else ""

    first = [[name, *(cell(rows.get(plane)) for plane in PLANES)] for name, rows in plain.items()]
    fused = {name.rpartition(" + ")[::2]: rows for name, rows in found.items() if name not in plain}
    formats = list(dict.fromkeys(format for _, format in fused))

    def shares(producer: str, format: str) -> str:
        rows = fused[producer, format]
        return " / ".join(f"{100 * rows[plane]['fraction']:.0f}" for plane in (PLANES[0], PLANES[2]))

    copies = sorted({row.get("copy_bandwidth_tb_s", report["copy_bandwidth_tb_s"]) for row in report["results"]})
    bandwidth = " to ".join(dict.fromkeys(f"{copies[i]:.2f}" for i in (0, -1)))
    producers = dict.fromkeys(producer for producer, _ in fused)
    second = [[producer, *(shares(producer, format) for format in formats)] for producer in producers]
    return (
        f"Microseconds for {shape[0]} x {shape[1]} bf16, and in parentheses the share of the copy bandwidth of the "
        f"same run, {bandwidth} TB/s, at which the bytes move that have to (a first pass for the amax included, where "
        f"there is one). {origin(report)}\n\n{markdown(['kernel', *PLANES], first)}\n\n"
        "What a norm or an activation makes, quantized without a pass of its own: the same share in percent, of the "
        f"row plane alone / of both.\n\n{markdown(['made by', *formats], second)}"
    )


def gemm(report: dict[str, Any]) -> str:
    rows = [
        [
            "x".join(map(str, row["shape"])),
            row["format"],
            row["kind"],
            f"{row['tflops']:.0f}",
            f"{row['speedup']:.2f}",
        ]
        for row in report["results"]
        if row["format"] != "bf16"
    ]
    text = markdown(["M x N x K", "format", "product", "TFLOP/s", "times bf16"], rows)
    return f"Against torch's bf16 matmul in the same run. {origin(report)}\n\n{text}"


def modules(report: dict[str, Any]) -> str:
    names = ["delayed", "current", "block", "current compiled"]
    rows = []
    for result in report["results"]:
        shape = "x".join(map(str, result["shape"]))
        found = [result["rows"][name] for name in names]
        relative = [f"{row['relative']:.2f} ({row['relative_device']:.2f})" for row in found]
        floor = result.get("floor", {}).get("current")
        rows.append([f"{result['case']} {shape}", *relative, "-" if floor is None else f"{floor:.2f}"])
    header = ["forward + backward, bf16 = 1.00", *names, "floor (current)"]
    host = report["host"]["host_us"]
    peaks = next(result["peak_mib"] for result in report["results"] if "peak_mib" in result)
    lines = [
        "Time as a training loop sees it, and in parentheses that of the device alone, relative to bf16 torch modules "
        f"in the same run; weights are quantized anew in every step. {origin(report)}",
        "",
        markdown(header, rows),
        "",
        "Host time of a 128x256x256 Linear, forward + backward: "
        + ", ".join(f"{name} {us:.0f} us" for name, us in host.items())
        + ". Peak memory of the MLP: "
        + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in peaks.items())
        + ".",
    ]
    return "\n".join(lines)


def ops(report: dict[str, Any]) -> str:
    def ratio(times: dict[str, float]) -> str:
        return f"{times['chain'] / times['module']:.3f}"

    host = {row["recipe"]: row["host_us"] for row in report["host"]}
    rows = [
        [row["recipe"], ratio(row["wall_us"]), ratio(row["device_us"]), ratio(host[row["recipe"]])]
        for row in report["results"]
    ]
    large, small = ("x".join(map(str, report[key][0]["shape"])) for key in ("results", "host"))
    text = markdown(["recipe", f"time, {large}", "device alone", f"host time, {small}"], rows)
    return (
        "`ops.Sequential` of RMSNorm, Linear, SwiGLU, Linear relative to the LayerNormMLP that it equals bit for bit, "
        f"forward + backward in the same run. {origin(report)}\n\n{text}"
    )


def train(report: dict[str, Any]) -> str:
    first = report["runs"][0]
    rows = [
        [
            run["recipe"],
            f"{run['tokens_per_s']:,.0f}",
            f"{run['tokens_per_s_ratio']:.2f}",
            "-" if run["mfu"] is None else f"{100 * run['mfu']:.0f} %",
            f"{run['peak_memory_bytes'] / 2**30:.1f} GiB",
        ]
        for run in report["runs"]
    ]
    config = first["config"]
    text = markdown(["recipe", "tokens/s", "times bf16", "of the bf16 peak", "peak memory"], rows)
    return (
        f"`te-dist train`: {config['layers']} blocks of the {config['preset']} Llama, sequences of "
        f"{config['seq_len']}, {'compiled, ' if config['compile'] else ''}{first['steps']} steps; the whole step, "
        f"optimizer included. MXFP8 has products of its own on Blackwell; elsewhere they are emulated. "
        f"{origin(report)}\n\n{text}"
    )


def fsdp(report: dict[str, Any]) -> str:
    def micros(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.0f}" if key in row else "-"

    rows = [
        [
            name,
            f"{row['gathered_of_bf16']:.2f}",
            f"{row['peak_of_bf16']:.2f}",
            *[micros(row, key) for key in ("pre_us", "post_us", "amax_us")],
        ]
        for name, row in report["recipes"].items()
    ]
    sizes = report["sizes"]
    header = ["recipe", "bytes gathered, bf16 = 1.00", "peak memory, bf16 = 1.00", "before the gather, us"]
    text = markdown([*header, "behind it, us", "amaxes, us"], rows)
    return (
        f"FSDP2 over {sizes['ranks']} ranks, blocks of {sizes['width']} x {sizes['ffn']}; peak memory of a step above "
        f"parameters and optimizer state; device time of the hooks of one block. {origin(report['machine'])}\n\n{text}"
    )


def overlap(report: dict[str, Any]) -> str:
    """A row per shape and format: products in chunks, and what copies beside them expose."""
    cases: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["results"]:
        key = str(row["chunks"]) if row["what"] == "chunks" else "copies"
        cases.setdefault((row["shape"], row["format"]), {})[key] = row
    chunks = ["2", "4", str(report["ranks"])]
    rows = [
        [
            f"{shape}, {form}",
            *[f"{100 * case[count]['efficiency']:.0f} %" for count in chunks],
            f"{100 * case['copies']['exposed']:.1f} %",
        ]
        for (shape, form), case in cases.items()
    ]
    text = markdown(["product", *[f"in {count} chunks" for count in chunks], "copies exposed"], rows)
    return (
        f"One GPU, TP {report['ranks']} chunk sizes of {report['tokens']} tokens: the speed of a product in chunks "
        f"against whole, and how much of the time of a ring's copies is seen beside the products (on copy engines, "
        f"from the host's memory: one GPU has no peer). {origin(report)}\n\n{text}"
    )


TABLES = {
    "kernels": kernels,
    "gemm": gemm,
    "modules": modules,
    "ops": ops,
    "train": train,
    "fsdp": fsdp,
    "overlap": overlap,
}


def filled_in(readme: str) -> str:
    """The README with every ``<!-- table: name -->`` section replaced by what the results say."""

    def section(match: re.Match[str]) -> str:
        name = match.group(1)
        results = RESULTS / f"{name}.json"
        if not results.exists():  # not measured yet: the section stays as it is
            return match.group(0)
        report = json.loads(results.read_text())
        return f"<!-- table: {name} -->\n{TABLES[name](report)}\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", section, readme, flags=re.DOTALL)


def main() -> int:
    path = ROOT / "README.md"
    old = path.read_text()
    new = filled_in(old)
    if "--check" in sys.argv[1:]:
        if old != new:
            print("README.md does not show benchmarks/results/; run python benchmarks/readme_tables.py")
        return int(old != new)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The report of one run, or of several beside each other: one HTML file that opens anywhere, and PNG plots."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from te_dist.launch.charts import COLOURS, Line, bars, line_chart, plain
from te_dist.launch.page import Cell, page, table
from te_dist.launch.progress import short, size_text
from te_dist.launch.runs import Run, read_runs

# From here on a statistic is worth a look: what it is, and which side is bad.
WORTH_A_LOOK = {"underflow_percent": 30.0, "saturation_percent": 0.1}
ROLES = ("input", "weight", "grad_output")


def summary_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """A row per run; losses are also given against the first one."""
    header = ["run", "recipe", "layout", "steps", "loss", "against first", "held-out loss", "tokens/s", "peak memory"]
    header += ["wire bytes/step"]
    rows = []
    base = runs[0].final_loss
    for run in runs:
        rows.append(
            [
                run.name,
                run.recipe,
                str(run.start.get("layout", "-")),
                str(run.steps),
                f"{run.final_loss:.4f}",
                "-" if run is runs[0] else f"{run.final_loss - base:+.4f}",
                "-" if run.eval_loss is None else f"{run.eval_loss:.4f}",
                short(run.tokens_per_s),
                size_text(run.memory),
                size_text(run.wire_bytes) if run.wire else "-",
            ]
        )
    return header, rows


def looks(runs: Sequence[Run]) -> list[tuple[int, bool]]:
    """(colour, dashed) of each run. Where the same recipes were trained in two layouts, a recipe keeps its colour, and
    the second layout is dashed."""
    kinds = [(run.recipe, run.start.get("layout")) for run in runs]
    layouts, recipes = list(dict.fromkeys(k[1] for k in kinds)), list(dict.fromkeys(k[0] for k in kinds))
    if len(layouts) != 2 or len(set(kinds)) < len(kinds):
        return [(index, False) for index in range(len(runs))]
    return [(recipes.index(recipe), layout != layouts[0]) for recipe, layout in kinds]


def against(run: Run, base: Run) -> list[tuple[int, float]]:
    """How much a run's loss is above another's at the same step."""
    other = dict(base.series("loss"))
    return [(step, loss - other[step]) for step, loss in run.series("loss") if step in other]


def _chart(runs: Sequence[Run], title: str, key: str, label: str, show: Callable[[float], str] = plain) -> str:
    lines = [Line(run.name, run.series(key), *look) for run, look in zip(runs, looks(runs), strict=True)]
    return line_chart(title, lines, label, show=show)


def _losses(runs: Sequence[Run]) -> str:
    lines = [Line(run.name, run.series("loss"), *look) for run, look in zip(runs, looks(runs), strict=True)]
    if len(runs) == 1 or any(len(run.series("loss", "eval")) > 1 for run in runs):  # else the table has them all
        lines += [
            Line(f"{run.name}, held out", run.series("loss", "eval"), colour, dashed=True, marks=True)
            for run, (colour, _) in zip(runs, looks(runs), strict=True)
        ]
    return line_chart("Loss", lines, "cross entropy, nats per token")


def _differences(runs: Sequence[Run]) -> str:
    base = runs[0]
    lines = [Line(run.name, against(run, base), *look) for run, look in zip(runs, looks(runs), strict=True)][1:]
    return line_chart(f"Difference from {base.name}", lines, "loss at the same step, on the same data")


def _wire(run: Run) -> str:
    if not run.wire:
        return ""
    by_kind: dict[str, int] = {}
    for row in run.wire:
        label = f"{row['kind']}, {row['payload'] or row['dtype']}"
        by_kind[label] = by_kind.get(label, 0) + row["bytes"]
    step = run.of("wire")[-1]["step"]
    shown = [(name, float(size), size_text(size)) for name, size in sorted(by_kind.items(), key=lambda p: -p[1])]
    rows = [
        (r["kind"], r["payload"] or "-", r["dtype"], r["phase"] or "-", r["count"], f"{r['bytes']:,}") for r in run.wire
    ]
    header = ("collective", "payload", "dtype", "phase", "count", "bytes")
    return (
        bars(f"Bytes on the wire: {run.name}", shown, f"what rank 0 handed to te_dist's collectives in step {step}")
        + f"<details><summary>every collective of {html.escape(run.name)}</summary>"
        + f"{table(header, rows, (4, 5))}</details>"
    )


def _gathers(run: Run) -> str:
    if not run.gathers:
        return ""
    rows = []
    for g in run.gathers:
        share = f"{g['bytes'] / g['bf16_bytes']:.2f}" if g["bf16_bytes"] else "-"
        rows.append((g["name"], g["how"], g["format"], f"{g['bytes']:,}", share, g["reason"]))
    quantized = sum(1 for g in run.gathers if g["how"] == "quantized")
    return (
        f"<h3>{html.escape(run.name)}: {quantized} of {len(rows)} weights are gathered as quantized bytes</h3>"
        + table(("weight", "gathered", "format", "bytes a rank sends per step", "of bf16", "why not"), rows, (3, 4))
    )


def _quantization(run: Run) -> str:
    found = run.quantization
    if found is None:
        return ""
    step, layers = found
    header = ["layer", "role", "SQNR dB", "underflow %", "saturation %", "amax", "scale min", "scale max"]
    rows: list[list[object]] = []
    for layer, roles in layers.items():
        for role in ROLES:
            if role not in roles:
                continue
            s = roles[role]
            row: list[object] = [layer, role, f"{s['sqnr_db']:.1f}"]
            for key, worth in WORTH_A_LOOK.items():
                text = f"{s[key]:.3f}"
                row.append(Cell(text) if s[key] > worth else text)
            rows.append([*row, *(f"{s[key]:.3g}" for key in ("amax", "scale_min", "scale_max"))])
    return f"<h3>{html.escape(run.name)}, step {step}</h3>{_quantization_charts(run)}{table(header, rows, range(2, 8))}"


def _quantization_charts(run: Run) -> str:
    """The worst layer of each role over the steps: where to look first."""
    charts = []
    for title, key, label, worst in (
        ("Lowest SQNR of any layer", "sqnr_db", "dB", min),
        ("Highest underflow of any layer", "underflow_percent", "% of values", max),
    ):
        lines = []
        for index, role in enumerate(ROLES):
            points = [
                (float(e["step"]), worst(values))
                for e in run.of("quantization")
                if (values := [roles[role][key] for roles in e["layers"].values() if role in roles])
            ]
            lines.append(Line(role, points, index, marks=len(points) < 40))
        charts.append(line_chart(title, lines, label))
    return f'<div class="grid2">{"".join(charts)}</div><br>'


def _layers(run: Run) -> str:
    if not run.layers:
        return ""
    rows = [
        (
            layer["name"] or "(the model)",
            " x ".join(map(str, layer["shape"])),
            layer["recipe"] or "high precision",
            "" if layer["recipe"] else layer["reason"],
        )
        for layer in run.layers
    ]
    quantized = sum(1 for layer in run.layers if layer["recipe"])
    return (
        f"<h3>{html.escape(run.name)}: {quantized} of {len(run.layers)} linear layers quantized</h3>"
        f"{table(('layer', 'out x in', 'recipe', 'why not'), rows)}"
    )


def _title(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"te_dist run {runs[0].name}"
    return "te_dist: " + (", ".join(run.name for run in runs) if len(runs) < 5 else f"{len(runs)} runs")


def _subtitle(runs: Sequence[Run]) -> str:
    first = runs[0]
    start = first.start
    counts = sorted({run.start.get("ranks", 1) for run in runs})
    ranks = " and ".join(map(str, counts)) + (" rank" if counts == [1] else " ranks")
    return (
        f"{first.config.get('hf_config') or first.config.get('preset', '')}, {short(start.get('parameters', 0))} "
        f"parameters, {ranks} on {start.get('device', '?')}, "
        f"te_dist {start.get('te_dist', '?')}, torch {start.get('torch', '?')}"
    )


def report_html(runs: Sequence[Run], title: str | None = None) -> str:
    header, rows = summary_rows(runs)
    charts = [_losses(runs)]
    if len(runs) > 1:
        charts.append(_differences(runs))
    charts += [
        _chart(runs, "Throughput", "tokens_per_s", "tokens per second, all ranks", short),
        _chart(runs, "Model FLOPs utilisation", "mfu", "of the bf16 peak"),
        _chart(runs, "Peak memory", "memory", "of rank 0, so far", size_text),
        _chart(runs, "Gradient norm", "grad_norm", "before clipping"),
    ]
    resumed = [f"{run.name} resumed from step {', '.join(map(str, run.resumes))}" for run in runs if run.resumes]
    body = [
        "<h2>Summary</h2>",
        table(header, rows, range(3, len(header))),
        f"<p class=soft>{html.escape('; '.join(resumed))}</p>" if resumed else "",
        "<h2>Curves</h2>",
        f'<div class="grid2">{"".join(charts)}</div>',
        _section("Bytes on the wire", [_wire(run) for run in runs]),
        _section("FSDP2's weight gathers", [_gathers(run) for run in runs]),
        _section("Quantization statistics", [_quantization(run) for run in runs]),
        _section("Layers", [_layers(run) for run in runs]),
        "<h2>Config</h2>",
        *(
            f"<details><summary>{html.escape(run.name)}</summary><pre>{html.escape(_config(run))}</pre></details>"
            for run in runs
        ),
    ]
    return page(title or _title(runs), _subtitle(runs), "".join(body))


def _section(title: str, parts: list[str]) -> str:
    parts = [part for part in parts if part]
    return f"<h2>{title}</h2>{'<br>'.join(parts)}" if parts else ""


def _config(run: Run) -> str:
    path = run.folder / "config.yaml"
    return path.read_text() if path.exists() else "no config.yaml"


def write_report(folders: Sequence[str | Path], path: Path | None = None, title: str | None = None) -> Path:
    """report.html (and report.png, if matplotlib is there) in the first run's folder, or at `path`."""
    runs = read_runs(folders)
    path = path or runs[0].folder / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report_html(runs, title))
    write_png(runs, path.with_suffix(".png"))
    return path


def write_png(runs: Sequence[Run], path: Path) -> Path | None:
    """The curves as a picture; None without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [("loss", "loss"), ("tokens_per_s", "tokens per second")]
    if len(runs) > 1:
        panels.insert(1, ("", f"loss, difference from {runs[0].name}"))
    else:
        panels.append(("grad_norm", "gradient norm"))
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), layout="constrained")
    for axis, (key, title) in zip(axes, panels, strict=True):
        for run, (colour, dashed) in zip(runs, looks(runs), strict=True):
            if points := run.series(key) if key else against(run, runs[0]):
                style = {"color": COLOURS[colour % len(COLOURS)], "linestyle": "--" if dashed else "-"}
                axis.plot(*zip(*points, strict=True), linewidth=1.3, label=run.name, **style)
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("step")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path

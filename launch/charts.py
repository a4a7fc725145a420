"""Line charts and bars as SVG text: no library, no network, sharp at every size."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Callable, Sequence

# Told apart by people who see colours differently too; the first is drawn strongest.
COLOURS = ("#1f2937", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3fbf")
WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 34


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve; points that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    dashed: bool = False
    marks: bool = False  # a dot at each point, for few of them


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that cover a range."""
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def plain(value: float) -> str:
    return f"{value:.4g}"


def _thinned(points: Sequence[tuple[float, float]], most: int = 800) -> list[tuple[float, float]]:
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if len(finite) <= most:
        return finite
    stride = len(finite) / most
    return [finite[int(i * stride)] for i in range(most - 1)] + [finite[-1]]


def line_chart(
    title: str, lines: Sequence[Line], y_label: str, x_label: str = "step", show: Callable[[float], str] = plain
) -> str:
    """A <figure>; the page's script shows the values under the pointer, from the data it carries."""
    kept = [(line, _thinned(line.points)) for line in lines]
    kept = [(line, points) for line, points in kept if points]
    if not kept:
        return ""
    xs = [x for _, points in kept for x, _ in points]
    ys = [y for _, points in kept for _, y in points]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    margin = (y1 - y0) * 0.06 or abs(y1) * 0.05 or 1.0
    y0, y1 = y0 - margin, y1 + margin
    if min(ys) >= 0 > y0:
        y0 = 0.0
    x1 = x1 if x1 > x0 else x0 + 1

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">']
    for y in ticks(y0, y1, 8):
        _, down = at(x0, y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{down + 3.5:.1f}" text-anchor="end">{html.escape(show(y))}</text>')
    for x in ticks(x0, x1, 10):
        across, _ = at(x, y0)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{plain(x)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{x_label}</text>')
    legend = []
    for line, points in kept:
        colour = COLOURS[line.colour % len(COLOURS)]
        place = [at(x, y) for x, y in points]
        path = "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in place)
        dash = ' stroke-dasharray="5 3"' if line.dashed else ""
        css = ' class="ink"' if line.colour == 0 else f' stroke="{colour}"'
        parts.append(f'<path d="{path}" fill="none"{css} stroke-width="1.6"{dash}/>')
        if line.marks or len(place) == 1:
            fill = ' class="inkfill"' if line.colour == 0 else f' fill="{colour}"'
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6"{fill}/>' for a, b in place]
        swatch = ' class="ink"' if line.colour == 0 else f' stroke="{colour}"'
        legend.append(
            f'<span><svg class="key" viewBox="0 0 18 6"><line x1="0" x2="18" y1="3" y2="3"{swatch} '
            f'stroke-width="2"{dash}/></svg>{html.escape(line.name)}</span>'
        )
    data = {
        "box": [LEFT, RIGHT, TOP, BOTTOM, WIDTH, HEIGHT],
        "range": [x0, x1],
        "lines": [{"name": line.name, "points": [[x, float(f"{y:.6g}")] for x, y in p]} for line, p in kept],
    }
    parts.append('<line class="cursor" y1="12" y2="236" visibility="hidden"/></svg>')
    keys = f'<div class="legend">{"".join(legend)}</div>' if len(kept) > 1 else ""
    payload = html.escape(json.dumps(data), quote=True)
    return (
        f'<figure class="chart" data-chart="{payload}"><figcaption>{html.escape(title)} '
        f'<small>{html.escape(y_label)}</small></figcaption>{"".join(parts)}<div class="tip" hidden></div>{keys}'
        f"</figure>"
    )


def bars(title: str, rows: Sequence[tuple[str, float, str]], note: str = "") -> str:
    """Horizontal bars: (label, length, what is written beside it)."""
    if not rows:
        return ""
    longest = max(value for _, value, _ in rows) or 1.0
    lines = [
        f'<div class="bar"><span>{html.escape(label)}</span><i style="width:{max(0.3, 55 * value / longest):.1f}%"></i>'
        f"<b>{html.escape(text)}</b></div>"
        for label, value, text in rows
    ]
    return (
        f'<figure class="bars"><figcaption>{html.escape(title)} <small>{html.escape(note)}</small></figcaption>'
        f"{''.join(lines)}</figure>"
    )

"""The frame of an HTML report: style and script inside, nothing loaded from anywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

STYLE = """
:root { --bg: #fff; --fg: #1f2937; --soft: #6b7280; --rule: #e5e7eb; --panel: #f9fafb; --ink: #1f2937; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #111418; --fg: #e5e7eb; --soft: #9ca3af; --rule: #2a2f37; --panel: #181c22; --ink: #f3f4f6; } }
* { box-sizing: border-box } body { margin: 0 auto; max-width: 1200px; padding: 24px; background: var(--bg);
  color: var(--fg); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 24px; margin: 0 0 4px } h2 { font-size: 18px; margin: 36px 0 10px; border-bottom: 1px solid var(--rule);
  padding-bottom: 4px } p.soft, small { color: var(--soft); font-weight: 400 }
.grid2 { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 18px }
figure { margin: 0; padding: 12px; background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  position: relative } figcaption { font-weight: 600; margin-bottom: 6px }
figure svg:not(.key) { width: 100%; height: auto; display: block } svg text { font: 11px system-ui; fill: var(--soft) }
.grid { stroke: var(--rule); stroke-width: 1 } .cursor { stroke: var(--soft); stroke-dasharray: 2 2 }
.ink { stroke: var(--ink) } .inkfill { fill: var(--ink) }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 13px } .key { width: 18px; height: 6px;
  margin-right: 5px; vertical-align: middle }
.tip { position: absolute; pointer-events: none; background: var(--bg); border: 1px solid var(--rule);
  border-radius: 6px; padding: 6px 9px; font-size: 12px; white-space: pre; z-index: 2 }
.scroll { overflow-x: auto; max-height: 560px; overflow-y: auto; border: 1px solid var(--rule); border-radius: 8px }
table { border-collapse: collapse; width: 100%; font-size: 13px } th { text-align: left; position: sticky; top: 0;
  background: var(--panel) } th, td { padding: 4px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.warn { background: #d55e0033 }
.bar { display: flex; align-items: center; gap: 8px; font-size: 13px; margin: 3px 0 }
.bar span { width: 32%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap } .bar i { height: 12px;
  background: #0072b2; border-radius: 3px } .bar b { font-weight: 500 }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 12px; overflow-x: auto;
  font-size: 12px } details summary { cursor: pointer }
"""

SCRIPT = """
for (const figure of document.querySelectorAll('.chart')) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector('svg');
  const tip = figure.querySelector('.tip'), cursor = svg.querySelector('.cursor');
  const [left, right, , , width] = data.box, [x0, x1] = data.range;
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    const x = x0 + (at - left) / (width - left - right) * (x1 - x0);
    if (x < x0 || x > x1) { tip.hidden = true; cursor.setAttribute('visibility', 'hidden'); return; }
    let step = null; const rows = [];
    for (const line of data.lines) {
      let best = line.points[0];
      for (const point of line.points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      step = step === null ? best[0] : step;
      rows.push(line.name + '  ' + best[1] + (best[0] === step ? '' : '  (step ' + best[0] + ')'));
    }
    tip.textContent = 'step ' + step + '\\n' + rows.join('\\n'); tip.hidden = false;
    const place = event.clientX - figure.getBoundingClientRect().left;
    tip.style.left = Math.min(place + 14, figure.clientWidth - tip.offsetWidth - 6) + 'px'; tip.style.top = '44px';
    const line = left + (step - x0) / (x1 - x0) * (width - left - right);
    cursor.setAttribute('x1', line); cursor.setAttribute('x2', line); cursor.setAttribute('visibility', 'visible');
  });
  svg.addEventListener('pointerleave', () => { tip.hidden = true; cursor.setAttribute('visibility', 'hidden'); });
}
"""


class Cell(str):
    """A table's cell that is marked."""


def table(header: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """`numbers`: the columns that are aligned right."""

    def cell(tag: str, column: int, value: object) -> str:
        classes = ["n"] if column in numbers else []
        if isinstance(value, Cell):
            classes.append("warn")
        attribute = f' class="{" ".join(classes)}"' if classes else ""
        return f"<{tag}{attribute}>{html.escape(str(value))}</{tag}>"

    head = "".join(cell("th", i, name) for i, name in enumerate(header))
    body = "".join("<tr>" + "".join(cell("td", i, v) for i, v in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, subtitle: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p class=soft>{html.escape(subtitle)}</p>"
        f"{body}<script>{SCRIPT}</script></body></html>"
    )

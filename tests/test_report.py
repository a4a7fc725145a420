"""Reports: what they say, te-dist compare, and the page in a real browser."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, look_at
from patience import HUNG

from te_dist.launch import cli
from te_dist.launch.charts import COLOURS, Line, line_chart, ticks
from te_dist.launch.metrics import MetricsLog
from te_dist.launch.page import SCRIPT
from te_dist.launch.report import write_report
from te_dist.launch.runs import read_run, read_runs


def made_run(folder: Path, shift: float = 0.0, steps: int = 30, name: str = "fp8_current") -> Path:
    """A run's folder as the trainer leaves it."""
    log = MetricsLog(folder, True)
    log.write("start", te_dist="0", torch="0", device="cpu", ranks=4, layout="dp_shard=2 x tp=2", parameters=10**6)
    for step in range(1, steps + 1):
        log.write("step", step=step, loss=5.0 / step + shift, grad_norm=1.0, lr=1e-3, tokens=step, mfu=0.4,
                  tokens_per_s=1000.0 + step, memory=2**20 * step)  # fmt: skip
    log.write("eval", step=steps, loss=0.5 + shift)
    row = {
        "kind": "all_gather",
        "payload": "e4m3 <row>",
        "dtype": "uint8",
        "phase": "forward",
        "count": 3,
        "bytes": 4096,
    }
    log.write("wire", step=2, collectives=[row])
    entry = {"underflow_percent": 55.5, "saturation_percent": 0.0, "sqnr_db": 31.2, "scale_min": 0.1, "scale_max": 0.2,
             "amax": 3.0}  # fmt: skip
    for step in (1, 11):
        log.write("quantization", step=step, layers={"layers.0.fc1": {"input": entry, "weight": entry}})
    log.write("resume", step=steps)
    log.close()
    (folder / "config.yaml").write_text(f'preset: "1m"\nsteps: {steps}\nrecipe: {{"*": "{name}"}}\n')
    layers = [{"name": "layers.0.fc1", "shape": [64, 32], "recipe": "MXFP8BlockScaling()", "reason": ""},
              {"name": "head", "shape": [320, 64], "recipe": None, "reason": "'head' is None & <kept>"}]  # fmt: skip
    (folder / "layers.json").write_text(json.dumps(layers))
    return folder


class Checked(html.parser.HTMLParser):
    """Balanced, and nothing that is loaded from elsewhere."""

    VOID = ("meta", "link", "br", "line", "circle", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_a_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    page = write_report([made_run(tmp_path / "run")]).read_text()
    parsed = Checked()
    parsed.feed(page)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        for key in ("src", "href"):
            assert attributes.get(key, "data:").startswith("data:"), (tag, attributes)
    for text in ("Loss", "Throughput", "Peak memory", "Bytes on the wire", "e4m3 &lt;row&gt;", "layers.0.fc1", "55.500",
                 "MXFP8BlockScaling()", "&amp; &lt;kept&gt;", "1 of 2 linear layers quantized", "resumed from step 30",
                 "Model FLOPs utilisation", "Lowest SQNR"):  # fmt: skip
        assert text in page, text
    charts = [json.loads(a["data-chart"]) for t, a in parsed.tags if t == "figure" and "data-chart" in a]
    losses = next(c for c in charts if c["lines"][0]["points"][0] == [1, 5.0])
    assert len(losses["lines"][0]["points"]) == 30
    assert 'class="n warn">55.500' in page  # worth a look


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = write_report([made_run(tmp_path / "run")])
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(tmp_path / "a", name="bf16")
    made_run(tmp_path / "b", shift=0.25)
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    assert "+0.2500" in out and "what differs" in out and "fp8_current" in out
    assert f"report: {tmp_path / 'compare.html'}" in out
    assert "Difference from a" in (tmp_path / "compare.html").read_text()
    kept = tmp_path / "numbers.json"
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(kept)]) == 0
    numbers = json.loads(kept.read_text())
    assert [run["recipe"] for run in numbers["runs"]] == ["bf16", "fp8_current"]
    assert numbers["runs"][1]["tokens_per_s_ratio"] == 1.0 and numbers["runs"][1]["peak_memory_bytes"] == 30 * 2**20
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["compare", str(tmp_path / "a")])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "empty")]) == 2
    assert "has no step" in capsys.readouterr().err


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    runs = read_runs([made_run(tmp_path / "one" / "run"), made_run(tmp_path / "two" / "run")])
    assert [run.name for run in runs] == ["one/run", "two/run"]
    assert runs[0].final_loss == pytest.approx(sum(5.0 / s for s in range(25, 31)) / 6)  # the last fifth


def test_numbers_of_a_run(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "run"))
    assert (run.steps, run.wire_bytes, run.memory, run.recipe) == (30, 4096, 30 * 2**20, "fp8_current")
    assert run.tokens_per_s == 1016.0 and run.mfu == 0.4 and run.resumes == [30]
    assert run.quantization is not None and run.quantization[0] == 11


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.2, 3.3), (-5.0, 12345.0), (1e-9, 2e-9), (7.0, 7.0)])
def test_ticks_are_inside_and_few(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 8 and all(low - 1e-12 <= t <= high + 1e-12 for t in found)


def test_charts_leave_out_what_is_not_finite() -> None:
    chart = line_chart("loss", [Line("a", [(1, 2.0), (2, float("nan")), (3, float("inf")), (4, 1.0)])], "nats")
    path = re.search(r'<path d="M([^"]+)"', chart)
    assert path is not None and path.group(1).count("L") == 1 and "nan" not in chart
    assert line_chart("nothing", [Line("a", [])], "nats") == ""
    assert len(set(COLOURS)) == len(COLOURS)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """It loads, the plots are drawn and answer the pointer, and the console has no error."""
    answer = look_at(write_report([made_run(tmp_path / "a"), made_run(tmp_path / "b", 0.1)]), tmp_path)
    assert answer["charts"] >= 9 and answer["tables"] >= 5
    assert answer["tip"].startswith("step ") and "a  " in answer["tip"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_that_meets_an_error_fails(tmp_path: Path) -> None:
    page = write_report([made_run(tmp_path / "a")])
    page.write_text(page.read_text().replace("const data =", "const data = missing +"))
    with pytest.raises(AssertionError):
        look_at(page, tmp_path)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_of_the_page_answers_the_pointer(tmp_path: Path) -> None:
    """Where there is no browser: the page's own script and data, with just enough of a document around them."""
    page = Checked()
    page.feed(write_report([made_run(tmp_path / "a"), made_run(tmp_path / "b", 0.1)]).read_text())
    chart = next(a["data-chart"] for t, a in page.tags if t == "figure" and "data-chart" in a)
    program = tmp_path / "page.js"
    program.write_text(DOCUMENT.replace("CHART", json.dumps(chart)).replace("SCRIPT", SCRIPT))
    done = subprocess.run(["node", str(program)], capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "step 16|a  0.3125|b  0.4125"


DOCUMENT = """
const handlers = {}, cursor = {setAttribute() {}}, tip = {hidden: true, style: {}, offsetWidth: 10, textContent: ''};
const box = {left: 0, top: 0, width: 560};
const svg = {querySelector: () => cursor, getBoundingClientRect: () => box,
             addEventListener: (name, handler) => { handlers[name] = handler; }};
const figure = {dataset: {chart: CHART}, querySelector: name => name === 'svg' ? svg : tip,
                getBoundingClientRect: () => box, clientWidth: 560};
const document = {querySelectorAll: () => [figure]};
SCRIPT
handlers.pointermove({clientX: 313, clientY: 40});
if (tip.hidden) throw new Error('no tip');
console.log(tip.textContent.split('\\n').join('|'));
handlers.pointerleave();
if (!tip.hidden) throw new Error('the tip stays');
"""

"""A page in headless Chromium: what it shows, and what its console says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from patience import HUNG

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
# Runs in the page: every chart must have drawn its curves, and answer the pointer.
PROBE = """
<script>
window.addEventListener('load', () => {
  const charts = [...document.querySelectorAll('.chart')];
  const drawn = charts.map(c => [...c.querySelectorAll('svg path')].some(p => p.getTotalLength() > 10));
  const svg = charts[0].querySelector('svg'), box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2, clientY: box.top + 40}));
  const tip = charts[0].querySelector('.tip');
  document.body.setAttribute('data-probe', JSON.stringify({
    charts: charts.length, drawn: drawn.every(Boolean), width: box.width, tip: tip.hidden ? '' : tip.textContent,
    tables: document.querySelectorAll('table').length, errors: window.failures }));
});
</script>
"""
CATCH = "<script>window.failures = []; window.onerror = m => window.failures.push(String(m));</script>"


def look_at(page: Path, folder: Path) -> dict[str, Any]:
    """Load a report, see that its charts are drawn and the console is silent; what there is, and the tip's text."""
    text = page.read_text().replace("<head>", "<head>" + CATCH).replace("</body>", PROBE + "</body>")
    probed = folder / "probed.html"
    probed.write_text(text)
    assert CHROMIUM is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
             "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0",
             f"--user-data-dir={folder / 'profile'}", "--window-size=1200,2000",
             "--virtual-time-budget=3000"]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", probed.as_uri()], capture_output=True, text=True, timeout=HUNG
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r'data-probe="([^"]+)"', done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr
    answer = json.loads(found.group(1).replace("&quot;", '"'))
    assert answer["errors"] == [] and answer["drawn"] and answer["width"] > 300, answer
    assert "CONSOLE" not in done.stderr, done.stderr
    return answer

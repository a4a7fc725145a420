"""The documentation: its examples run, its commands parse, its links lead somewhere, what it quotes is said."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool

from te_dist.launch.options import config_from, ranks_from

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROOT = DOCS.parent
PAGES = ("quickstart", "recipes", "compile", "accelerate", "checkpoints", "numerics", "troubleshooting", "migrating")


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page == "accelerate":
        pytest.importorskip("accelerate", reason="accelerate is not installed")
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, f"{page}.md", "exec"), {"__name__": "docs"})


def examples_run(rank: int, world: int, page: str, folder: str) -> dict[str, Any]:
    """One after the other, as one program. What they leave behind that a reader was promised."""
    examples = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "docs"}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for example in examples:
            exec(compile(example, f"{page}.md", "exec"), names)
    finally:
        os.chdir(before)
    return {name: names.get(name) for name in ("step", "extra", "sizes")} | {"examples": len(examples)}


@pytest.mark.parametrize(
    ("page", "left"),
    [
        ("parallel", {"step": None, "extra": None, "sizes": (19, 18)}),
        ("fsdp", {"step": 1, "extra": {"tokens": 64}, "sizes": None}),
    ],
)
def test_examples_for_several_ranks_run(
    page: str, left: dict[str, Any], tmp_path: Path, rank_pools: Callable[[int], RankPool]
) -> None:
    for seen in rank_pools(2).run(examples_run, page, str(tmp_path)):
        assert seen == left | {"examples": 2}


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```console\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL):
            lines = [line for line in block.splitlines() if "accelerate launch" not in line]
            found += [(page, line) for line in lines if "train" in line]
    return found


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda text: text[:60])
def test_commands_are_ones_that_te_dist_train_takes(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("yaml")
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)
    start = words.index("train") if "train" in words else words.index("te_dist.launch.train")
    _, options = ranks_from(words[start + 1 :])
    config_from(options)  # raises for an option that does not exist


def test_commands_were_found() -> None:
    assert len(commands()) >= 6


@pytest.mark.parametrize("page", sorted(path.stem for path in DOCS.glob("*.md")))
def test_links_and_paths_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (DOCS / target).exists(), target
    for path in re.findall(r"`(launch/examples/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


def test_troubleshooting_quotes_what_te_dist_says() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "launch").rglob("*.py"))
    sources = re.sub(r'"\s*\n\s*f?"', "", sources)  # strings over several lines
    for quote in re.findall(r'\*\*"([^"]+)"', (DOCS / "troubleshooting.md").read_text()):
        for part in re.split(r" \.\.\. ?|bfloat16|kv_heads|hidden", quote):
            words = part.strip().rstrip(".")
            assert words in sources, words


def test_every_option_in_the_text_exists() -> None:
    from te_dist.launch.config import TrainConfig

    known = {"--" + name.replace("_", "-") for name in TrainConfig().as_dict()}
    known |= {"--config", "--nproc-per-node", "--max-restarts"}
    for page in ("quickstart", "recipes", "compile", "checkpoints", "troubleshooting"):
        for flag in re.findall(r"`(--[a-z][a-z0-9-]*)", (DOCS / f"{page}.md").read_text()):
            assert flag in known or flag.replace("--no-", "--") in known, (page, flag)

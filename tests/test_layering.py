"""Imports go down the floors only: launch -> parallel -> te_dist -> _kernels, and one door to _kernels."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import HUNG

from te_dist.torch_compat import constant_in_graphs

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"te_dist": "te_dist", "parallel": "te_dist.parallel", "launch": "te_dist.launch"}


def module_of(path: Path) -> str:
    top, *rest = path.relative_to(ROOT).with_suffix("").parts
    parts = [FOLDERS[top], *rest]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str, is_package: bool) -> set[str]:
    """Every module that a file imports, anywhere in it; names imported from a package count as modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def python_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def violations(module: str, imported: set[str]) -> list[str]:
    problems = []
    for name in sorted(imported):
        if is_in(name, "te_dist.launch") and not is_in(module, "te_dist.launch"):
            problems.append(f"{module} imports {name}")
        below_parallel = not (is_in(module, "te_dist.parallel") or is_in(module, "te_dist.launch"))
        if is_in(name, "te_dist.parallel") and below_parallel:
            problems.append(f"{module} imports {name}")
        if is_in(name, "te_dist._kernels") and module != "te_dist.kernels.backend":
            problems.append(f"{module} imports {name}")
    return problems


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    module = module_of(path)
    imported = imports_of(path.read_text(), module, path.name == "__init__.py")
    assert violations(module, imported) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("te_dist.gemm", "from te_dist.parallel import mesh"),
        ("te_dist.gemm", "from te_dist import launch"),
        ("te_dist.gemm", "def f():\n    import te_dist.parallel.comm"),
        ("te_dist.parallel.fsdp", "from te_dist.launch.train import main"),
        ("te_dist.gemm", "from te_dist import _kernels"),
        ("te_dist.ops.linear", "from .. import _kernels"),
        ("te_dist.launch.doctor", "import te_dist._kernels as k"),
    ],
)
def test_the_rule_catches(module: str, source: str) -> None:
    assert violations(module, imports_of(source, module, False))


def test_no_import_cycles() -> None:
    graph = {}
    modules = {module_of(path): path for path in python_files()}
    for module, path in modules.items():
        tree = ast.parse(path.read_text())
        top_level = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        names = imports_of(ast.unparse(top_level), module, path.name == "__init__.py")
        # A package's __init__ re-exports its files; importing the package by name is not an edge to all of them.
        graph[module] = {n for n in names if n in modules and n != module and not is_in(module, n)}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for name in graph[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_importing_all_of_it_leaves_the_compiler_alone() -> None:
    """Which takes longer to import than all else: only who compiles waits for it."""
    program = "import sys, te_dist.launch.cli, te_dist.ops; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HUNG)
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_constants_are_marked_as_torch_marks_them() -> None:
    def ours() -> None: ...

    def theirs() -> None: ...

    assert constant_in_graphs(ours) is ours
    assert vars(ours) == vars(torch.compiler.assume_constant_result(theirs)) != {}

"""What a newcomer touches: doctor, demo, the command line, and an import without the compiled kernels."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import CHROMIUM, look_at
from patience import HUNG

from te_dist import kernels
from te_dist.launch import cli, demo, doctor, formats
from te_dist.launch.recipes import RECIPE_NAMES
from te_dist.launch.runs import read_run
from te_dist.launch.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent

# Runs a program in an interpreter that cannot import te_dist._kernels.
WITHOUT_KERNELS = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "te_dist._kernels":
            raise ImportError("not built")
sys.meta_path.insert(0, Refuse())
"""


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HUNG,
        env=os.environ | env,
        cwd="/",
    )


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for word in ("te_dist", "torch", "extension", *doctor.QUANTIZE_KERNEL, "emulated", "implicit"):
        assert word in text
    if kernels.has_extension():
        assert "native (cpu kernel)" in text
    assert doctor.main(["--help"]) == 0 and doctor.main(["--fast"]) == 2


def test_doctor_tells_of_a_cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in (frozenset[torch.dtype](), frozenset([torch.bfloat16])):
        monkeypatch.setattr(doctor.torch_compat, "SLOW_CPU_DTYPES", slow)
        assert ("slow in bfloat16" in doctor.report()) == bool(slow)


def test_doctor_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "te_dist.launch.doctor"], capture_output=True, text=True, timeout=HUNG)
    assert done.returncode == 0, done.stderr
    assert "te-dist doctor" in done.stdout


def test_without_the_extension_the_reference_serves() -> None:
    done = python(
        WITHOUT_KERNELS
        + """
import torch, te_dist
from te_dist.launch import doctor
x = torch.randn(32, 64)
y = te_dist.Float8BlockQuantizer("e4m3").quantize(x).dequantize()
assert (x - y).abs().max() < 0.5
text = doctor.report()
print(text)
assert text.count("extension is missing") == 1 and "reference (pure torch)" in text and "missing" in text
"""
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_environment_forces_the_reference() -> None:
    program = """
import te_dist
from te_dist import kernels
from te_dist.launch import doctor
assert kernels.backend_name("cpu") == "reference"
print(doctor.report())
"""
    done = python(program, TE_DIST_BACKEND="reference")
    assert done.returncode == 0, done.stderr
    assert "TE_DIST_BACKEND=reference" in done.stdout or "missing" in done.stdout
    wrong = python("import te_dist", TE_DIST_BACKEND="fast")
    assert wrong.returncode != 0 and "TE_DIST_BACKEND expects one of" in wrong.stderr


def test_a_bare_checkout_imports_with_pythonpath_alone() -> None:
    """No installation: parallel/ and launch/ lie beside te_dist/ and are found under their installed names."""
    program = """
import sys
sys.meta_path = [f for f in sys.meta_path if "editable" not in type(f).__module__.lower()
                 and "editable" not in type(f).__name__.lower() and "Redirect" not in type(f).__name__]
import te_dist, te_dist.parallel, te_dist.launch.cli
from pathlib import Path
assert Path(te_dist.launch.cli.__file__).parent.name == "launch"
print(te_dist.__file__)
"""
    done = python(program, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ROOT / "te_dist" / "__init__.py")


def test_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plots" / "q.png"
    assert formats.main(["--size", "128", "--repeats", "1", "--plot", str(path)]) == 0
    text = capsys.readouterr().out
    for name in formats.formats(True):
        assert text.count(name) >= 2
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in text


def test_formats_numbers_are_those_of_the_formats() -> None:
    """Sizes follow from the layouts, accuracy from the number of mantissa bits."""
    results = {(r.tensor, r.format): r for r in formats.measure(256, 1)}
    assert len(results) == 10
    for tensor in ("weight", "activation"):
        sizes = {name: results[tensor, name].bytes_ratio for name in formats.formats(True)}
        assert sizes["FP8 current scaling"] == pytest.approx(0.5, abs=1e-3)
        assert sizes["MXFP8"] == pytest.approx(0.5 * (1 + 1 / 32), abs=1e-3)
        assert sizes["NVFP4"] == pytest.approx(0.25 * (1 + 1 / 8), abs=1e-3)
        quality = {name: results[tensor, name].sqnr_db for name in formats.formats(True)}
        assert all(25 < quality[name] < 40 for name in quality if name != "NVFP4"), quality
        assert 12 < quality["NVFP4"] < 25


@pytest.mark.parametrize("arguments", [["--size", "100"], ["--size", "16"], ["--repeats", "0"], ["--sise", "64"]])
def test_formats_refuses_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        formats.main(arguments)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_demo_trains_every_recipe_alone_and_four_ranks(tmp_path: Path) -> None:
    """One process, then TP=2 x FSDP=2 with SP: quantized curves follow bf16's, the ranks' follow those of one process,
    one run is resumed, and the page is there."""
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, "-m", "te_dist.launch.demo", "--steps", "4", "--out", str(tmp_path), "--device", "cpu"],
        capture_output=True, text=True, timeout=HUNG,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folders = list(demo.folders(tmp_path))
    runs = {(stage, recipe): read_run(folder) for stage, recipe, folder in folders}
    assert [recipe for stage, recipe in runs if stage == "1-rank"] == ["bf16", *doctor_recipes()]
    assert [recipe for stage, recipe in runs if stage == "4-ranks"] == ["bf16", "fp8_current", "fp8_block", "nvfp4"]
    base = dict(runs["1-rank", "bf16"].series("loss"))
    for (stage, recipe), run in runs.items():
        losses = dict(run.series("loss"))
        assert list(losses) == list(range(1, 5)) and losses[1] > 5.0 > run.final_loss
        assert run.start["layout"] == ("1 process" if stage == "1-rank" else "dp_shard=2 x tp=2")
        # FP8 noise moves a loss of about 4 by a percent at most in so few steps, FP4's a few times that.
        limit = 0.25 if recipe == "nvfp4" else 0.06
        assert max(abs(losses[s] - base[s]) for s in base) < limit, recipe
        assert run.resumes == ([2] if (stage, recipe) == ("4-ranks", demo.RESUMED) else [])
        assert (run.wire_bytes > 0) == (stage == "4-ranks") and (recipe == "bf16") == (run.quantization is None)
    wires = [runs["4-ranks", recipe].wire_bytes for recipe in ("nvfp4", "fp8_current", "bf16")]
    assert wires == sorted(wires) and len(set(wires)) == 3
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    if CHROMIUM is not None:
        assert "1-rank/bf16  " in look_at(tmp_path / "report.html", tmp_path)["tip"]
    lines = done.stdout.strip().splitlines()
    assert lines[-1] == f"report: {tmp_path / 'report.html'}"
    assert "is resumed from the checkpoint of step 2" in done.stdout
    for stage, recipe, _ in folders:
        assert any(line.startswith(f"{stage}/{recipe} ") for line in lines)
    # What one step put on the wire, by layer: the sequence-parallel gathers are bytes.
    assert any(
        re.match(r"layers\.0\.layernorm_mlp +forward +all_gather +e4m3 per tensor, row +uint8 ", line) for line in lines
    )
    assert any(line.startswith("total ") for line in lines)


def doctor_recipes() -> list[str]:
    """The names that doctor's table of recipes has on the command line, in its order."""
    return [next(n for n, cls in RECIPE_NAMES.items() if cls.__name__ == name) for name in doctor.QUANTIZE_KERNEL]


def test_parallel_example_says_how_to_start_it(capsys: pytest.CaptureFixture[str]) -> None:
    from te_dist.launch import tensor_parallel

    assert tensor_parallel.main([]) == 2
    assert "torchrun --nproc-per-node 2" in capsys.readouterr().err


def test_demo_refuses_wrong_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "--steps" in capsys.readouterr().err


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and cli.main([]) == 2
    assert "doctor" in capsys.readouterr().out
    assert cli.main(["docter"]) == 2
    assert "did you mean 'doctor'?" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0


def test_ranks_that_are_not_ready_say_one_line_at_ctrl_c(tmp_path: Path) -> None:
    # In one piece: print() of an unbuffered process writes the end of the line by itself, and the ranks share the pipe.
    ready = "import os, time\nos.write(1, b'importing\\n')\ntime.sleep(9999)\n"
    (tmp_path / "slow_to_import.py").write_text(ready)
    start = "from te_dist.launch.ranks import run_ranks as r; raise SystemExit(r('slow_to_import', [], 2, 0, 'bye'))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["importing\n"] * 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HUNG)
    finally:
        process.kill()
    assert process.returncode == 130 and errors == "bye\n", errors


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, a process is not told of its parent's end")
@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_ranks_end_with_a_launcher_that_is_interrupted_between_two_of_them(tmp_path: Path, end: str) -> None:
    """torchrun then knows of none of them. The test waits for their end of the pipe. SIGKILL comes when they are well
    on their way, SIGINT while they start."""
    (tmp_path / "sleeps.py").write_text("import os, time\nopen(f'{__file__}.{os.getpid()}', 'w')\ntime.sleep(9999)\n")
    start = f"""
import glob, os, signal, time
from torch.distributed.elastic.multiprocessing import api
from te_dist.launch.ranks import run_ranks
started = []
def start(*arguments, handler=api.get_subprocess_handler, **options):
    started.append(handler(*arguments, **options))
    if len(started) == 3:
        while "{end}" == "SIGKILL" and len(glob.glob("{tmp_path}/sleeps.py.*")) < 3:
            time.sleep(0.1)
        os.write(1, b"three of four\\n")
        os.kill(os.getpid(), signal.{end})
        time.sleep(1)  # another thread has the signal, and this one is told
    return started[-1]
api.get_subprocess_handler = start
raise SystemExit(run_ranks("sleeps", [], 4))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, env=environment, timeout=HUNG)
    assert done.stdout == "three of four\n" and done.stderr == ""
    assert done.returncode == (128 + signal.SIGINT if end == "SIGINT" else -signal.SIGKILL)


def test_ctrl_c_while_the_demo_builds_its_model_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any) -> Trainer:
        made = Trainer(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        return made

    monkeypatch.setattr(demo, "Trainer", build)
    assert demo.train("bf16", tmp_path, 1, "cpu", None) == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler and not (tmp_path / "metrics.jsonl").exists()


def test_ctrl_c_between_two_runs_of_the_demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "show", interrupted)
    assert demo.main([]) == 130
    assert capsys.readouterr().err == "\nte-dist demo: stopped by Ctrl-C\n"


@pytest.mark.parametrize("stage", ["one process", "4 ranks", "4 ranks before their first line"])
def test_ctrl_c_ends_the_demo_with_one_line(tmp_path: Path, stage: str) -> None:
    """While this process trains, while its ranks start or train, and while their Pythons do not know of signals yet."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if "before" in stage:
        (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(2.5)\n")
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
    # Where the ranks are waited for, one recipe comes before them in place of all.
    start = "from te_dist.launch import cli, demo; demo.ALONE = demo.ALONE[:1]; raise SystemExit(cli.main())"
    alone = stage == "one process"
    process = subprocess.Popen(
        [sys.executable, *(["-m", "te_dist.launch.cli"] if alone else ["-c", start]),
         "demo", "--steps", "2000" if alone else "2", "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(stage[:7]):
                break
        while alone and not (tmp_path / "1-rank" / "bf16").exists() and process.poll() is None:
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=HUNG)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert errors.strip() == "te-dist demo: stopped by Ctrl-C"

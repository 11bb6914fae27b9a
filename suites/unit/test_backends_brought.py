"""Backends that packages bring, judged by the suites as they are: the documented example is green, a wrong one red."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from harness.store import read_run
from suites.unit.brought import interpreter, package

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "backend"
MODULE = "parity_backend_example"

#: The example with a block's output taken for that of the block after it; and with the final norm's module, of which it
#: does not say that the weight is multiplied in already.
WRONG = """
from parity_backend_example import ExampleBackend

class OffByOne(ExampleBackend):
    def hook(self, name, edit, found):
        head, block, point = name.split(".", 2)
        if point != "hook_out" or block == "0":
            return super().hook(name, edit, found)
        before = f"blocks.{int(block) - 1}.{point}"
        return super().hook(before, edit, {before: found[name]})

class Unsaid(ExampleBackend):
    capabilities = {**ExampleBackend.capabilities, "capture": ["ln_final.hook_normalized"], "edit": {}}

    def hook(self, name, edit, found):
        return self.model.model.norm.register_forward_hook(lambda m, a, out: found[name].append(out[0]))

class Said(Unsaid):
    capabilities = {**Unsaid.capabilities, "emitted": ["ln_final.hook_normalized"]}
"""


def judge(root, tmp_path, backend, *arguments, path="", mode="eager"):
    """Run suites on a backend; give back what was recorded, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    command += ["--model", "tiny-llama", "--dtype", "fp32", "--engine-mode", mode, "--backend", backend]
    done = subprocess.run(
        [*command, "--report-dir", str(tmp_path / "reports")],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    said = done.stdout + done.stderr
    folders = list((tmp_path / "reports").glob("*"))
    assert len(folders) == 1, said
    return done.returncode, read_run(folders[0]), said


def test_the_documented_example_is_green_in_an_interpreter_of_its_own(pytestconfig, tmp_path):
    source = (EXAMPLE / f"{MODULE}.py").read_text()
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    backends = {name: at.split(":")[1] for name, at in points["harness.backends"].items()}
    site = package(tmp_path / "site", MODULE.replace("_", "-"), source, backends)
    python = interpreter(tmp_path / "venv", site)
    suites = ["suites/test_activations.py", "suites/test_interventions.py"]
    code, records, said = judge(
        pytestconfig.rootpath,
        tmp_path,
        f"example@{python}",
        *suites,
        "-k",
        "ragged or decode or around or one_set",
    )
    assert code == 0, said
    outcomes = {(case.suite, case.check): (case.outcome, case.skip_class) for case in records.cases}
    assert outcomes["activations", "ragged_batch"] == ("passed", "")
    assert outcomes["interventions", "one_set_for_the_batch"] == ("passed", "")
    # What it does not declare is not applicable, and so never a pass.
    for suite, check in [
        ("activations", "decode_steps"),
        ("activations", "around_the_step_limit"),
        ("interventions", "around_a_chunk_border"),
    ]:
        assert outcomes[suite, check] == ("skipped", "not-applicable")
    assert any("declares no decode" in case.reason for case in records.cases)


def test_the_example_is_short_and_the_docs_show_it_as_it_is():
    source = (EXAMPLE / f"{MODULE}.py").read_text()
    assert sum(1 for line in source.splitlines() if line.strip()) <= 50
    assert f"```python\n{source}```" in (EXAMPLE.parents[1] / "backends.md").read_text()


def judge_wrong(pytestconfig, tmp_path, name, backend, *, elsewhere=False):
    """One case on one of the wrong ones, here or in an interpreter of its own: pytest's exit code, and the case."""
    site = package(tmp_path / "site", "parity-wrong", WRONG, {name: backend})
    (site / f"{MODULE}.py").write_text((EXAMPLE / f"{MODULE}.py").read_text())
    arguments = ("suites/test_activations.py", "-k", "prompt_length and 33")
    if elsewhere:
        named = f"{name}@{interpreter(tmp_path / 'venv', site)}"
        code, records, _ = judge(pytestconfig.rootpath, tmp_path, named, *arguments)
    else:
        code, records, _ = judge(pytestconfig.rootpath, tmp_path, name, *arguments, path=str(site))
    (case,) = records.cases
    (engine,) = records.engines
    assert ("worker_pid" in engine["describe"]) == elsewhere
    return code, case


@pytest.mark.parametrize(
    ("backend", "elsewhere", "hook", "explanation"),
    [
        ("OffByOne", True, "blocks.1.hook_out", "blocks.0.hook_out"),
        ("Unsaid", False, "ln_final.hook_normalized", "the weight is folded in"),
    ],
)
def test_a_wrong_backend_is_red_for_the_right_reason(
    pytestconfig, tmp_path, backend, elsewhere, hook, explanation
):
    code, case = judge_wrong(pytestconfig, tmp_path, "wrong", backend, elsewhere=elsewhere)
    assert (code, case.outcome) == (1, "failed"), case.message
    verdict = next(entry["verdict"] for entry in case.verdicts if entry["verdict"])
    assert verdict["divergence"]["hook"] == hook
    assert explanation in verdict["divergence"]["explanation"]


def test_a_convention_that_is_said_is_translated(pytestconfig, tmp_path):
    code, case = judge_wrong(pytestconfig, tmp_path, "said", "Said")
    assert (code, case.outcome) == (0, "passed"), case.message


def test_a_mode_that_is_not_declared_is_not_applicable(pytestconfig, tmp_path):
    """Asked for both, which is what pytest does unless it is told otherwise, the other one is judged all the same."""
    site = package(tmp_path / "site", "parity-right", WRONG, {"right": "ExampleBackend"})
    (site / f"{MODULE}.py").write_text((EXAMPLE / f"{MODULE}.py").read_text())
    arguments = ("suites/test_activations.py", "-k", "prompt_length and 33")
    code, records, said = judge(
        pytestconfig.rootpath, tmp_path, "right", *arguments, path=str(site), mode="both"
    )
    assert code == 0, said
    eager, compiled = sorted(records.cases, key=lambda case: case.mode, reverse=True)
    assert (eager.outcome, compiled.outcome, compiled.skip_class) == ("passed", "skipped", "not-applicable")
    assert "declares no compiled mode" in compiled.reason


def test_a_backend_that_cannot_be_imported_is_refused_in_one_line(pytestconfig, tmp_path):
    site = package(tmp_path / "site", "parity-broken", "import what_is_not_there", {"broken": "Backend"})
    command = [sys.executable, "-m", "harness", "audit", "--backend", "broken", "--report-dir", str(tmp_path)]
    done = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "backend 'broken' (parity_broken:Backend) cannot be imported: ModuleNotFoundError" in done.stderr
    assert "Traceback" not in done.stderr

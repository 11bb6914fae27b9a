"""What a person gets wrong on pytest's command line: one line, exit code 2, before anything boots."""

from __future__ import annotations

import subprocess
import sys

import pytest

from suites.unit import mini_suite

SUITE = "suites/test_activations.py"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "smolm2-135m"], "did you mean 'smollm2-135m'?"),
        (["--dtype", "int8"], "--dtype 'int8' is not known"),
        (["--profile", "smok"], "--profile 'smok' is not known"),
        (["--topology", "tp0"], "topology 'tp0' is not of the form"),
        (
            ["--topology", "tp3", "--model", "tiny-llama"],
            "tensor_parallel_size=3 does not divide the 2 attention heads",
        ),
        (
            ["--topology", "pp5", "--model", "tiny-llama"],
            "pipeline_parallel_size=5 is more than the model's 4 layers",
        ),
        (["--backend", "vlm", "--model", "tiny-llama"], "no backend 'vlm' is installed"),
        (["--report-dir", "LICENSE/below", "--model", "tiny-llama"], "LICENSE/below"),
    ],
)
def test_wrong_options_are_refused(arguments, message, pytestconfig, tmp_path):
    done = subprocess.run(
        mini_suite.command(tmp_path, *arguments),
        env=mini_suite.environment(),
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stdout + done.stderr
    assert "booting" not in done.stdout


def test_no_vllm_is_said_with_the_install_line(pytestconfig, tmp_path):
    """An environment without vLLM: the unit tests of the vocabulary still run, the suites say what to install."""
    blocker = tmp_path / "novllm.py"
    blocker.write_text(
        "import importlib.util as u\nreal = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            SUITE,
            "-p",
            "novllm",
            "--model",
            "tiny-llama",
            "--report-dir",
            str(tmp_path),
        ],
        cwd=pytestconfig.rootpath,
        env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "vLLM is not installed" in done.stdout + done.stderr
    assert "nox -s env" in done.stdout + done.stderr


def test_a_run_that_every_test_was_narrowed_out_of_is_not_green(pytestconfig, tmp_path):
    """Tests that are for other engines than this plan has: nothing ran, and the exit code says so."""
    command = [sys.executable, "-m", "pytest", "suites/test_supervision.py", "-p", "no:cacheprovider", "-q"]
    done = subprocess.run(
        [*command, "--model", "smollm2-135m", "--report-dir", str(tmp_path)],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    assert "nothing ran" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "listed", "left_out"),
    [
        ([], "test_taps_hold_what_was_promised[tiny-llama-bf16-eager", "test_time_of_taps"),
        (["-m", "slow"], "test_time_of_taps[smollm2-135m-fp32-compiled", "test_nothing_grows"),
        (
            ["--profile", "full"],
            "test_taps_hold_what_was_promised[tiny-llama-bf16-eager",
            "test_time_of_taps",
        ),
        (["--profile", "nightly"], "test_time_of_taps[smollm2-135m-fp32-eager", "step16"),
    ],
)
def test_slow_cases_are_left_out_of_all_but_nightly_unless_named(pytestconfig, arguments, listed, left_out):
    done = collected(pytestconfig, "suites/test_budgets.py", *arguments)
    assert listed in done
    assert left_out not in done


def test_full_is_smoke_and_every_family(pytestconfig):
    """One profile holds the next: what a short run covers, a longer one does too."""
    smoke, full, nightly = (
        {
            line
            for line in collected(pytestconfig, "suites", "--ignore=suites/unit", "--profile", name).split(
                "\n"
            )
            if "[" in line
        }
        for name in ("smoke", "full", "nightly")
    )
    assert smoke < full
    assert {line for line in full if "test_clean_draw" not in line} < nightly  # a night draws others
    added = {line.split("::")[0] for line in full - smoke}
    assert added == {"suites/test_families.py", "suites/test_routing.py"}
    for family in ("tiny-qwen3moe", "tiny-phi3"):
        assert sum(f"test_captures[{family}-" in line for line in full) == 4


def test_engines_that_serve_every_point_are_engines_of_their_own(pytestconfig):
    done = collected(pytestconfig, "suites/test_families.py", "--model", "tiny-gpt2", "--dtype", "fp32")
    assert "test_captures[tiny-gpt2-fp32-eager-tp1-step64-hook_points=every" in done
    assert "test_captures[tiny-gpt2-fp32-eager-tp1-step64]" not in done


def collected(pytestconfig, *arguments):
    """Ids of the cases that a command line would run."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *arguments],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

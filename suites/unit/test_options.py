"""What a person gets wrong on pytest's command line: one line, exit code 2, before anything boots."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    command = [sys.executable, "-m", "pytest", SUITE, "-p", "no:cacheprovider", "--report-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, *arguments],
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
    assert "pip install 'vllm-parity[cpu]'" in done.stdout + done.stderr


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

"""The workflows of `.github`: what they call exists, and their scripts do with runs what they say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cli import VERBS
from suites.unit import mini_suite
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run

yaml = pytest.importorskip("yaml", reason="not-applicable: PyYAML is not installed")

FOLDER = mini_suite.ROOT / ".github" / "workflows"
NAMES = ("gpu", "nightly")


def steps_of(name: str) -> dict[str, dict[str, Any]]:
    jobs = yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))["jobs"]
    return {step.get("name", step.get("uses")): step for step in jobs["parity"]["steps"]}


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_read_and_its_scripts_parsed(name: str) -> None:
    for label, step in steps_of(name).items():
        assert ("run" in step) != ("uses" in step), label
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
        else:
            done = subprocess.run(
                ["bash", "-n"], input=step["run"], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, (label, done.stderr)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_calls_has_these_verbs_and_options(name: str) -> None:
    text = "\n".join(step.get("run", "") for step in steps_of(name).values()).replace("\\\n", " ")
    verbs = re.findall(r"vllm-parity (\w+)", text)
    assert verbs
    assert set(verbs) <= set(VERBS)
    options = {
        option for line in text.splitlines() if "nox -s" in line or "pytest" in line for option in flags(line)
    }
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "harness.pytest_plugin", "--help"],
        env=mini_suite.environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    known = set(re.findall(r"(?<![\w-])(--[\w-]+)", listed))
    assert {option for option in options if option != "--junit-xml"} <= known
    assert "--junit-xml" in known or "--junitxml" in known
    sessions = set(re.findall(r"nox -s (\w+)", text))
    source = (mini_suite.ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert all(f"def {session}(session" in source for session in sessions)


def flags(line: str) -> list[str]:
    return re.findall(r"(?<=\s)(--[a-z][\w-]*)", line)


# --- the nights, with the real command and a GitHub of three lines ---------------------------------------------


class Nights:
    """A checkout in which a night's scripts can run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = steps_of("nightly")
        self.uploaded = folder / "uploaded"
        environment = folder / "environment" / "bin"
        environment.mkdir(parents=True)
        (environment / "activate").touch()
        (folder / ".nox" / "cpu-1").mkdir(parents=True)
        (folder / ".nox" / "cpu-1" / "location").write_text(f"{environment.parent}\n")
        tools = folder / "bin"
        tools.mkdir()
        python = shlex.quote(sys.executable)
        self._tool(tools / "vllm-parity", f'exec {python} -m harness "$@"')
        # The run 7 left nothing, 6 left what was uploaded, if anything ever was.
        self._tool(
            tools / "gh",
            f'[[ $2 == list ]] && printf "7\\n6\\n" && exit\n'
            f"[[ $3 == 6 && -d {shlex.quote(str(self.uploaded))} ]] || exit 1\n"
            f'cp -r {shlex.quote(str(self.uploaded))}/. "${{@: -1}}"',
        )
        self.path = tools

    @staticmethod
    def _tool(path: Path, text: str) -> None:
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def run(self, step: str) -> subprocess.CompletedProcess[str]:
        """As GitHub runs a step that names no shell."""
        env = mini_suite.environment(
            HERE="main", GITHUB_STEP_SUMMARY=str(self.folder / "summary.md"), GH_TOKEN="x"
        )
        env["PATH"] = f"{self.path}:{env['PATH']}"
        return subprocess.run(
            ["bash", "-e", "-c", self.steps[step]["run"]],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def night(self, name: str | None, *, broken: bool = False) -> subprocess.CompletedProcess[str]:
        """One night: fetch, run (or not), compare, tidy, upload. What the comparison gave."""
        for old in ("reports", "before", "compare.txt", "summary.md"):
            path = self.folder / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        fetched = self.run("The last nights' runs")
        assert fetched.returncode == 0, fetched.stderr
        if name is not None:
            case = declaration(1, model="tiny-llama")
            verdict = make_verdict(layers=4, broken_from="blocks.2.hook_out" if broken else None)
            outcome = result(case, "failed" if broken else "passed", [verdict])
            records = write_run(self.folder / "reports" / name, [case], [outcome]) / "results.jsonl"
            records.write_text(re.sub(r'"run_id":"[^"]*"', f'"run_id":"{name}"', records.read_text()))
            (self.folder / "reports" / "junit.xml").write_text("<x/>")
        compared = self.run("Against the last night")
        assert self.run("Keep the last thirty nights").returncode == 0
        shutil.rmtree(self.uploaded, ignore_errors=True)
        shutil.copytree(self.folder / "reports", self.uploaded)
        return compared

    @property
    def summary(self) -> str:
        path = self.folder / "summary.md"
        return path.read_text() if path.exists() else ""


def test_nights_are_compared_one_with_the_other(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    first = nights.night("20261201-012300-nightly")
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "reports" / "history.html").is_file()
    assert not (tmp_path / "reports" / "compare.html").exists()
    assert nights.summary == ""

    second = nights.night("20261202-012300-nightly", broken=True)
    assert second.returncode == 1, second.stdout + second.stderr
    assert "20261201-012300-nightly" in nights.summary
    assert "### Against the last night" in nights.summary
    assert (tmp_path / "reports" / "compare.html").is_file()

    none = nights.night(None)
    assert none.returncode == 0, none.stdout + none.stderr
    assert "this night left no run" in none.stdout

    fourth = nights.night("20261204-012300-nightly")
    assert fourth.returncode == 0, fourth.stdout + fourth.stderr
    assert "20261202-012300-nightly" in nights.summary, "the last one that left a run"
    runs = sorted(path.name[:8] for path in nights.uploaded.glob("*-nightly"))
    assert runs == ["20261201", "20261202", "20261204"]


def test_a_comparison_that_cannot_be_made_is_red_and_says_why(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    nights.night("20261201-012300-nightly")
    results = nights.uploaded / "20261201-012300-nightly" / "results.jsonl"
    results.write_text(results.read_text().replace('"schema":1', '"schema":99'))
    compared = nights.night("20261202-012300-nightly")
    assert compared.returncode == 2, compared.stdout + compared.stderr
    assert "results of schema 99" in nights.summary


def test_only_the_last_thirty_nights_are_kept(tmp_path: Path) -> None:
    nights = Nights(tmp_path)
    for day in range(1, 33):
        (tmp_path / "reports" / f"202612{day:02}-012300-nightly").mkdir(parents=True)
    assert nights.run("Keep the last thirty nights").returncode == 0
    kept = sorted(path.name for path in (tmp_path / "reports").iterdir())
    assert (len(kept), kept[0]) == (30, "20261203-012300-nightly")

"""A run on several workers: cases stay with their engine, the records are whole, and there is one report."""

from __future__ import annotations

import html
import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from harness.store import is_green, read_run
from harness.workers import engine_of
from suites.unit import mini_suite

pytest.importorskip("xdist", reason="not-applicable: pytest-xdist is not installed")

SUITE = """
import json, os, pathlib, signal

def note(parity, name):
    path = pathlib.Path(os.environ["NOTES"]) / f"{parity.config.id}-{name}.json"
    path.write_text(json.dumps([parity.config.id, os.environ["PYTEST_XDIST_WORKER"]]))

def test_one(parity):
    note(parity, "one")

def test_two(parity):
    note(parity, "two")
    if os.environ.get("DIE") == parity.config.short_dtype:
        os.kill(os.getpid(), signal.SIGKILL)

def test_three(parity):
    note(parity, "three")

def test_without_an_engine():
    pass
"""
TWO_ENGINES = ("--model", "tiny-llama", "--engine-mode", "eager", "--backend", "hf")
SPREAD = ("-n", "2", "--dist", "loadgroup", "-p", "xdist")


def spread(folder: Path, *arguments: str, source: str = SUITE, **env: str):
    notes = folder / "notes"
    notes.mkdir(exist_ok=True)
    return mini_suite.run(folder, *SPREAD, *arguments, source=source, env={"NOTES": str(notes), **env})


@pytest.fixture(autouse=True)
def _two_engines(monkeypatch) -> None:
    monkeypatch.setattr(mini_suite, "ONE_ENGINE", TWO_ENGINES)


def test_a_run_on_two_workers_is_one_run(tmp_path: Path) -> None:
    done = spread(tmp_path, "--junit-xml", str(tmp_path / "junit.xml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parity holds") == 1
    assert "6 cases declared, 6 executed, 0 failed" in done.stdout
    run = read_run(mini_suite.only_run(tmp_path))
    assert is_green(run)
    assert run.damaged == ()
    assert all(case.declared and not case.earlier and "@" not in case.id for case in run.cases)
    assert all("@" not in case.rerun for case in run.cases)
    lines = (run.folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    kinds = Counter(json.loads(line)["type"] for line in lines)
    assert (kinds["run"], kinds["started"], kinds["case"], kinds["end"]) == (1, 6, 6, 1)
    assert (run.folder / "index.html").is_file()

    where = [json.loads(path.read_text()) for path in (tmp_path / "notes").iterdir()]
    workers = {engine: {worker for one, worker in where if one == engine} for engine, _ in where}
    assert len(workers) == 2
    assert all(len(owners) == 1 for owners in workers.values()), "an engine belongs to one worker"
    assert 'name="worst_hook"' not in (tmp_path / "junit.xml").read_text()
    assert 'name="engine"' in (tmp_path / "junit.xml").read_text()


def test_sigterm_ends_all_workers_with_a_report(tmp_path: Path) -> None:
    """What a CI sends that cancels a job: no process is left, and what had ended is in the report."""
    stop = tmp_path / "stopped"
    going = subprocess.Popen(
        mini_suite.command(tmp_path, *mini_suite.ONE_ENGINE, *SPREAD),
        env=mini_suite.environment(STOP=str(stop)),
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    for _ in range(600):
        if stop.exists() and stop.read_text():
            break
        time.sleep(0.1)
    worker = psutil.Process(int(stop.read_text()))
    going.terminate()
    out, _ = going.communicate(timeout=60)
    assert going.returncode == pytest.ExitCode.INTERRUPTED, out
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    run = read_run(mini_suite.only_run(tmp_path))
    assert next(case for case in run.cases if "test_one" in case.id).outcome == "passed"
    assert (run.folder / "index.html").is_file()


def test_a_case_that_kills_its_worker_costs_itself_and_nothing_else(tmp_path: Path) -> None:
    done = spread(tmp_path, "--junit-xml", str(tmp_path / "junit.xml"), DIE="bf16")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    run = read_run(mini_suite.only_run(tmp_path))
    assert run.damaged == ()
    assert Counter(case.outcome for case in run.cases) == {"passed": 5, "error": 1}
    (fatal,) = (case for case in run.cases if case.outcome == "error")
    assert fatal.id == "test_mini.py::test_two[hf-tiny-llama-bf16-eager-tp1-step64]"
    assert fatal.declared
    assert not fatal.earlier
    assert fatal.message.startswith("worker 'gw")
    assert f"crashed while running '{fatal.id}'" in fatal.message
    assert "run it alone to see why" in fatal.message
    assert "not green: 1 case could not be judged (error)" in done.stdout
    assert done.stdout.count("replacing crashed worker") == 1
    assert fatal.message in html.unescape((tmp_path / "junit.xml").read_text())

    again = spread(tmp_path, "--resume", "last")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "5 of 6 cases keep their result" in again.stdout
    assert "parity holds" in again.stdout
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {run.folder.name}


@pytest.mark.parametrize("which", ["one", "three", "without_an_engine"])
def test_wherever_it_stands_among_the_cases_of_a_worker(tmp_path: Path, which: str) -> None:
    """The first, the last and one with no engine: the run ends, and all the others are done."""
    head = f"def test_{which}(parity):" if which in ("one", "three") else f"def test_{which}():"
    source = SUITE.replace(head, f"{head}\n    os.kill(os.getpid(), signal.SIGKILL)")
    done = spread(tmp_path, source=source)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "maximum crashed workers reached" not in done.stdout
    run = read_run(mini_suite.only_run(tmp_path))
    fatal = {case.check for case in run.cases if case.outcome == "error"}
    assert fatal == ({which} if "(parity)" in head else set())
    assert {case.outcome for case in run.cases if case.check not in fatal} == {"passed"}
    assert f"test_{which}" in done.stdout


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        ("s/t.py::test_a[tiny-llama-fp32-eager-tp1-step64]", "tiny-llama-fp32-eager-tp1-step64"),
        (
            "s/t.py::test_a[tiny-llama-bf16-compiled-tp2pp2-step16-33]",
            "tiny-llama-bf16-compiled-tp2pp2-step16",
        ),
        (
            "s/t.py::test_a[m~1a-fp16-eager-pp2-step64-hook_points=every-max_edit_programs=48-x]",
            "m~1a-fp16-eager-pp2-step64-hook_points=every-max_edit_programs=48",
        ),
        ("s/t.py::test_a", None),
        ("s/t.py::test_a[eager-step64]", None),
    ],
)
def test_the_engine_is_read_from_the_id(case: str, engine: str | None) -> None:
    assert engine_of(case) == engine


def test_a_refusal_in_a_worker_is_heard(tmp_path: Path) -> None:
    done = spread(tmp_path, "--backend", "nope")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no backend 'nope' is installed" in done.stdout + done.stderr
    assert list((tmp_path / "reports").iterdir()) == []


def test_tests_without_engines_leave_no_run(tmp_path: Path) -> None:
    done = spread(tmp_path, source="def test_a(): pass\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= parity =" not in done.stdout
    assert list((tmp_path / "reports").iterdir()) == []


def test_spreading_an_engine_is_advised_against(tmp_path: Path) -> None:
    done = mini_suite.run(tmp_path, "-n", "2", "--collect-only")
    assert "add --dist loadgroup" in done.stdout

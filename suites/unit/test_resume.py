"""A run that stopped early: its report can be built, and ``--resume`` runs the rest of it and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import UsageError
from harness.options import asked_for
from harness.plan import Plan
from harness.resume import find_run, has_result, resume
from harness.store import CaseResult, RunStore, is_green, read_run, why_not_green
from suites.unit import mini_suite

if TYPE_CHECKING:
    from collections.abc import Mapping

JOINED = {"run_id": "joined", "started": "2026-11-29T17:44:55+00:00"}
VERSIONS = {"vllm": "0.32.0", "torch": "2.13.0"}
PLAN = {"profile": "smoke", "models": ["tiny-llama"], "dtypes": ["fp32"], "modes": ["eager"]}


def started(folder: Path, *records: Mapping[str, Any], **run: Any) -> Path:
    plan = {**PLAN, "topologies": ["tp1"], "backend": "vllm"}
    record = {"run_id": folder.name, "started": "2026-11-29T17:44:55+00:00", "plan": plan}
    with RunStore.create(folder, {**record, "provenance": {"versions": VERSIONS}, **run}) as store:
        for one in records:
            store.append(one)
    return folder


def stopped_by(number: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Start the suite, wait until its second case runs, and send the signal to its process alone."""
    mark = folder / "running"
    process = subprocess.Popen(
        # A shell has what it starts in the background ignore Ctrl-C, and that is handed down.
        ["env", "--default-signal=INT", *mini_suite.command(folder, *mini_suite.ONE_ENGINE)],
        env=mini_suite.environment(STOP=str(mark)),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not mark.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert mark.exists(), out
    return subprocess.CompletedProcess(process.args, process.returncode, out, "")


def outcomes(folder: Path) -> dict[str, str]:
    return {case.check: case.outcome for case in read_run(mini_suite.only_run(folder)).cases}


def test_killed_in_the_middle_it_is_readable_and_goes_on(tmp_path: Path) -> None:
    assert stopped_by(signal.SIGKILL, tmp_path).returncode == -signal.SIGKILL
    assert outcomes(tmp_path) == {"one": "passed", "two": "lost", "three": "not-run", "four": "not-run"}

    done = mini_suite.run(tmp_path, "--resume", "last", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 4 cases keep their result" in done.stdout
    assert "test_one" not in done.stdout
    assert "2 passed, 1 skipped, 1 deselected" in done.stdout
    assert outcomes(tmp_path) == {"one": "passed", "two": "passed", "three": "passed", "four": "skipped"}
    run = read_run(mini_suite.only_run(tmp_path))
    assert is_green(run)
    assert run.end["counts"]["total"]["declared"] == 4
    assert run.end["counts"]["total"]["executed"] == 3


def test_a_case_whose_time_ran_out_is_no_verdict_and_runs_again(tmp_path: Path) -> None:
    done = mini_suite.run(tmp_path, "--timeout", "3", env={"STOP": str(tmp_path / "running")})
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "from pytest-timeout" in done.stdout
    assert outcomes(tmp_path) == {"one": "passed", "two": "error", "three": "passed", "four": "skipped"}

    done = mini_suite.run(tmp_path, "--resume", "last")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(tmp_path) == {"one": "passed", "two": "passed", "three": "passed", "four": "skipped"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_told_to_stop_it_writes_the_report_of_what_ran(tmp_path: Path, number: signal.Signals) -> None:
    done = stopped_by(number, tmp_path)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout
    assert "not green: 1 case could not be judged (error); 2 cases did not run" in done.stdout
    assert f"the rest of it: pytest --resume {mini_suite.only_run(tmp_path)}" in done.stdout
    run = read_run(mini_suite.only_run(tmp_path))
    assert run.end is not None
    assert [case.message for case in run.cases if case.outcome == "error"] == [
        "interrupted (KeyboardInterrupt)"
    ]
    assert (run.folder / "index.html").is_file()


def test_a_failed_case_stays_failed_unless_asked_for(tmp_path: Path) -> None:
    first = mini_suite.run(tmp_path, env={"RED": "1"})
    assert first.returncode == pytest.ExitCode.TESTS_FAILED, first.stdout + first.stderr

    again = mini_suite.run(tmp_path, "--resume", "last")
    assert again.returncode == pytest.ExitCode.TESTS_FAILED, again.stdout + again.stderr
    assert "4 deselected" in again.stdout
    assert "not green: 1 case failed" in again.stdout

    repeated = mini_suite.run(tmp_path, "--resume", "last", "--resume-failed")
    assert repeated.returncode == pytest.ExitCode.TESTS_FAILED, repeated.stdout + repeated.stderr
    assert "passed only when repeated" in repeated.stdout


def test_a_complete_green_run_has_nothing_left_and_is_green(tmp_path: Path) -> None:
    assert mini_suite.run(tmp_path).returncode == 0
    again = mini_suite.run(tmp_path, "--resume", "last")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "parity holds" in again.stdout
    more = mini_suite.SUITE + "\ndef test_five(parity):\n    assert False\n"
    other = mini_suite.run(tmp_path, "--resume", mini_suite.only_run(tmp_path).name, source=more)
    assert other.returncode == 0, "a case that the run never declared is none of its business"
    assert "1 of these are none of its cases" in other.stdout


def test_options_that_differ_are_named_and_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "reports" / "r1")
    done = mini_suite.run(tmp_path, "--resume", "last", "--dtype", "bf16", "--profile", "full")
    assert done.returncode == 2
    assert "--dtype was fp32 and is bf16 now" in done.stdout + done.stderr
    assert "--profile was smoke and is full now" in done.stdout + done.stderr
    with pytest.raises(UsageError, match=r"torch was 2\.13\.0 and is 2\.14\.0 now"):
        resume(folder, {}, {**VERSIONS, "torch": "2.14.0"})
    with pytest.raises(UsageError, match=r"vllm was 0\.32\.0 and is absent now"):
        resume(folder, {}, {"torch": "2.13.0"})
    assert resume(folder, {"dtypes": ("fp32",)}, VERSIONS).plan.models == ("tiny-llama",)


def test_a_run_that_does_not_say_its_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say what it was asked to cover"):
        resume(started(tmp_path / "r1", plan=None), {}, VERSIONS)


def test_which_run_is_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run to go on with below"):
        find_run("last", tmp_path)
    old, new = (started(tmp_path / name) for name in ("b", "a"))
    os.utime(old / "results.jsonl", (1, 1))
    assert find_run("last", tmp_path) == new
    assert find_run("b", tmp_path) == find_run(str(old), Path("nowhere")) == old
    with pytest.raises(UsageError, match="no run 'c' here or below"):
        find_run("c", tmp_path)


@pytest.mark.parametrize(
    ("case", "kept"),
    [
        (CaseResult("a", outcome="passed"), True),
        (CaseResult("a", outcome="failed"), True),
        (CaseResult("a", outcome="skipped", skip_class="no-hardware", reason="one GPU"), True),
        (CaseResult("a", outcome="skipped", skip_class="not-installed", reason="no Ray here"), True),
        (CaseResult("a", outcome="skipped", skip_class="upstream-failed", reason="a"), False),
        (CaseResult("a", outcome="skipped", reason="just so"), False),
        (CaseResult("a", outcome="error"), False),
        (CaseResult("a", outcome="lost"), False),
        (CaseResult("a", outcome="not-run"), False),
    ],
)
def test_what_keeps_its_result(case: CaseResult, kept: bool) -> None:
    assert has_result(case) is kept


def test_a_run_killed_before_it_declared_anything_declares_now(tmp_path: Path) -> None:
    found = resume(started(tmp_path / "r1"), {}, VERSIONS)
    assert found.left(["a", "b"]) == {"a", "b"}
    assert found.foreign(["a"]) == 0


def test_options_left_out_ask_for_nothing() -> None:
    option = type("option", (), dict.fromkeys(("engine_mode", "parity_profile", "backend"), None))()
    option.model, option.dtype, option.topology = None, ["bf16"], []
    assert asked_for(option) == {"dtypes": ("bf16",)}
    option.engine_mode = "both"
    assert asked_for(option)["modes"] == Plan().modes


def test_a_folder_that_is_being_written_is_refused(tmp_path: Path) -> None:
    folder = started(tmp_path / "r1")
    with RunStore.resume(folder, {"run_id": "r1", "started": "now"}):
        with pytest.raises(UsageError, match="belongs to a run that is still going on"):
            RunStore.resume(folder, {"run_id": "r1", "started": "now"})
        with pytest.raises(UsageError, match="belongs to a run that is still going on"):
            RunStore.join(folder, JOINED)
    with RunStore.join(folder, JOINED) as one, RunStore.join(folder, JOINED) as other:
        one.append({"type": "declared", "cases": [{"id": "a"}]})
        other.append({"type": "declared", "cases": [{"id": "a"}]})
        with pytest.raises(UsageError, match="belongs to a run that is still going on"):
            RunStore.resume(folder, JOINED)
    assert why_not_green(read_run(folder)) == ["1 case did not run", "nothing ran"]
    assert read_run(folder).run["run_id"] == "r1", "it was started already"


def test_processes_that_append_at_once_lose_and_mix_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "r1"
    script = f"""
import sys
from harness.store import RunStore
with RunStore.join({str(folder)!r}, {JOINED!r}) as store:
    for i in range(40):
        store.append({{"type": "case", "id": f"{{sys.argv[1]}}-{{i}}", "outcome": "passed", "message": "x" * 20000}})
"""
    command = [mini_suite.sys.executable, "-c", script]
    writers = [
        subprocess.Popen([*command, str(n)], env=mini_suite.environment(), cwd=tmp_path) for n in range(3)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    run = read_run(folder)
    assert run.damaged == ()
    assert run.run["run_id"] == "joined"
    assert (folder / "results.jsonl").read_text().count('"type":"run"') == 1
    assert len(run.cases) == 120
    assert all(len(case.message) == 20000 and not case.earlier for case in run.cases)


@pytest.mark.parametrize(
    ("workers", "code"), [((), pytest.ExitCode.INTERRUPTED), (("-n", "2"), pytest.ExitCode.TESTS_FAILED)]
)
def test_a_module_that_cannot_be_collected_leaves_nothing_to_go_on_with(
    tmp_path: Path, workers: tuple[str, ...], code: pytest.ExitCode
) -> None:
    """Nothing of it runs: a run that knew the other modules' cases alone would be green once it is resumed."""
    (tmp_path / "test_broken.py").write_text("import what_is_not_there\n", encoding="utf-8")
    done = mini_suite.run(tmp_path, *workers, str(tmp_path / "test_broken.py"))
    assert done.returncode == code, done.stdout
    assert "what_is_not_there" in done.stdout
    assert "1 error in" in done.stdout  # and nothing else: no case ran, none complains that there is no run
    assert not list((tmp_path / "reports").glob("*"))

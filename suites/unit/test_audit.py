"""Audits: records read as findings about a backend, as Markdown, and the command around them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from harness.audit import Overhead, audit_of, audit_text, measure_overhead
from harness.backend import BootConfig
from harness.capabilities import Capabilities
from harness.cli import main
from harness.errors import UsageError
from harness.store import RunStore, read_run
from suites.unit.brought import package
from suites.unit.synthetic_run import make_verdict

CAPABILITIES = {
    "capture": ["blocks.*.hook_out", "ln_final.hook_normalized"],
    "edit": {"add": ["blocks.*.hook_out"]},
    "emitted": ["ln_final.hook_normalized"],
    "batch": True,
}
DECODE = "mine~12ab34 declares no decode (greedy tokens after the prompt, and the rows computed for them)"


def case(number, suite, outcome, **fields):
    return {"id": f"suites/test_{suite}.py::test_{number}[x]", "suite": suite, "outcome": outcome, **fields}


def run_of(folder, cases, *, boot_error=None, backend="mine@env/bin/python"):
    """The records of a made-up run."""
    labels = {
        "check": "c",
        "model": "tiny",
        "dtype": "fp32",
        "mode": "eager",
        "topology": "tp1",
        "engine": "e",
    }
    store = RunStore.create(
        folder,
        {
            "run_id": "r",
            "started": "2026-01-02T03:04:05+0000",
            "command": "pytest --backend mine",
            "k": 3.0,
            "provenance": {"versions": {"torch": "2.1", "transformers": "5.1", "numpy": "9"}},
        },
    )
    with store:
        declared = [
            {**labels, "id": c["id"], "suite": c["suite"], "title": f"Case {c['id']}", "backend": backend}
            for c in cases
        ]
        store.append({"type": "declared", "cases": declared})
        describe = None if boot_error else {"mine": "1.2", "worker_pid": 7, "capabilities": CAPABILITIES}
        config = {"model": "tiny", "dtype": "float32"}
        store.append(
            {"type": "engine", "id": "e", "config": config, "describe": describe, "error": boot_error}
        )
        for one in cases:
            store.append({"type": "started", "id": one["id"]})
            rest = {key: value for key, value in one.items() if key != "suite"}
            store.append({"type": "case", "seconds": 1.0, "verdicts": [], **rest})
    return read_run(folder)


def verdict(label="activations", **fields):
    return {"label": label, "verdict": make_verdict("fp32", layers=2, **fields).to_json(), "detail": {}}


def test_what_was_declared_and_what_was_found_stand_side_by_side(tmp_path):
    records = run_of(
        tmp_path / "run",
        [
            case(1, "activations", "passed", verdicts=[verdict()]),
            case(2, "activations", "skipped", skip_class="not-applicable", reason=DECODE),
            case(3, "generation", "skipped", skip_class="not-applicable", reason=DECODE),
            case(4, "interventions", "passed", verdicts=[verdict("edits: values"), verdict("edits: change")]),
        ],
    )
    audit = audit_of(records)
    assert audit.verdict == "parity holds wherever the backend declares that it can be judged"
    points = {point.template: point for point in audit.points}
    out = points["blocks.{i}.hook_out"]
    assert (out.capture, out.ops, out.emitted) == (True, ("add",), False)
    assert (out.captured.comparisons, out.edited.comparisons, out.captured.failed) == (2, 4, 0)
    assert 0 < out.captured.share <= 1
    assert points["ln_final.hook_normalized"].emitted
    assert not points["blocks.{i}.attn.hook_q"].capture
    flags = {flag.name: flag for flag in audit.flags}
    assert (flags["decode"].declared, flags["decode"].skipped) == (False, 2)
    assert (flags["batch"].declared, flags["batch"].skipped) == (True, 0)
    suites = {suite.name: suite for suite in audit.suites}
    assert suites["generation"].verdict == "not applicable"
    assert suites["activations"].verdict == "holds"
    assert "worker_pid" not in audit.boots[0]["describe"]
    assert audit.versions == {
        "vllm-parity": audit.versions["vllm-parity"],
        "torch": "2.1",
        "transformers": "5.1",
    }
    text = audit_text(audit)
    assert "| `blocks.{i}.hook_out` | yes | 2 compared, worst " in text
    assert "| `ln_final.hook_normalized` | as the module has it |" in text
    assert "| decode | not applicable | greedy tokens" in text
    assert "Not declared, and so not applicable: `blocks.{i}.hook_in`" in text
    assert "mine 1.2" in text


def test_a_failure_says_where_it_begins_and_how_to_see_it(tmp_path):
    records = run_of(
        tmp_path / "run",
        [
            case(
                1,
                "activations",
                "failed",
                message="long story",
                rerun="pytest that --backend mine",
                verdicts=[verdict(broken_from="blocks.1.hook_out")],
            ),
            case(2, "logits", "error", message="EngineError: backend mine: its worker died <b>\nlog"),
        ],
    )
    audit = audit_of(records)
    assert audit.verdict == "parity is broken in activations"
    points = {point.template: point for point in audit.points}
    assert points["blocks.{i}.hook_out"].captured.failed == 1
    assert points["blocks.{i}.hook_out"].captured.share > 1
    failed, error = audit.failures
    assert failed.begins.startswith("blocks.1.hook_out is the first hook over its bound")
    assert error.begins == "EngineError: backend mine: its worker died <b>"
    text = audit_text(audit)
    assert "its worker died \\<b\\>" in text
    assert "**1 failed**, 2 compared, worst" in text
    upstream = text.partition("## For an issue of the library")[2]
    assert "> pytest that --backend mine" in upstream
    assert "> - activations: 0 passed, 1 failed, 0 could not be judged, 0 not applicable" in upstream


def test_one_that_did_not_boot_is_listed_with_its_error(tmp_path):
    records = run_of(
        tmp_path / "run",
        [case(1, "activations", "error", message="EngineError: no such *module*")],
        boot_error="no such *module*\nlast lines of /somewhere/engines/e.log:\n  Traceback",
    )
    audit = audit_of(records)
    assert audit.verdict == "nothing could be judged"
    assert not any(flag.declared for flag in audit.flags)
    assert "**did not boot**: no such \\*module\\*\n" in audit_text(audit)


def test_cases_that_fail_alike_are_told_once(tmp_path):
    cases = [case(n, "activations", "error", message="EngineError: no accelerator") for n in range(30)]
    text = audit_text(audit_of(run_of(tmp_path / "run", cases, boot_error="no accelerator")))
    assert "- 30 cases (error): EngineError: no accelerator\n" in text


def test_nothing_but_what_is_not_applicable_is_no_pass(tmp_path):
    skipped = case(1, "generation", "skipped", skip_class="not-applicable", reason=DECODE)
    assert audit_of(run_of(tmp_path / "run", [skipped])).verdict == "nothing could be judged"


def test_what_capturing_costs_stands_beside(tmp_path):
    audit = audit_of(run_of(tmp_path / "run", [case(1, "activations", "passed", verdicts=[verdict()])]))
    audit.overhead.append(Overhead("mine", "tiny", 100, 14, 0.010, 0.012, 1.2, (1.1, 1.3)))
    assert "| mine | tiny | 100 | 14 | 10.0 ms | 12.0 ms | 1.20 (1.10 to 1.30) |" in audit_text(audit)
    assert json.loads(json.dumps(audit.to_json()))["overhead"][0]["ratio"] == 1.2


def test_a_run_of_no_backend_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has cases of no backend; an audit is of one"):
        audit_of(run_of(tmp_path / "run", []))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "nobody"], "no backend 'nobody' is installed"),
        (["--backend", "nnsight"], "as NAME@path/to/python: transformer-lens"),
        (["--backend", "hf", "--suites", "nowhere.py"], "there is no nowhere.py: run this where"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_line(arguments, message, capsys, tmp_path):
    assert main(["audit", *arguments, "--report-dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_an_interpreter_that_is_not_there_ends_the_audit_before_a_boot(
    capfd, tmp_path, pytestconfig, monkeypatch
):
    monkeypatch.chdir(pytestconfig.rootpath)
    arguments = ["--backend", f"nnsight@{tmp_path / 'none'}", "--report-dir", str(tmp_path)]
    assert main(["audit", *arguments]) == 2
    said = "".join(capfd.readouterr())
    assert "there is no program" in said
    assert "booting" not in said


FAILING = """
class Failing:
    capabilities = {"capture": ["embed.hook_out"], "batch": True}

    @classmethod
    def boot(cls, config):
        raise RuntimeError("the library's own words")
"""


def test_the_command_writes_an_audit_of_what_cannot_even_boot(pytestconfig, tmp_path):
    site = package(tmp_path / "site", "parity-failing", FAILING, {"failing": "Failing"})
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "harness",
                "audit",
                "--backend",
                "failing",
                "--report-dir",
                str(tmp_path / "out"),
            ),
            *("--suites", "suites/test_activations.py", "-k", "twice"),
        ],
        cwd=pytestconfig.rootpath,
        env={**__import__("os").environ, "PYTHONPATH": f"{site}:{pytestconfig.rootpath}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 4, done.stdout + done.stderr
    (text,) = (tmp_path / "out").rglob("audit.md")
    assert "**did not boot**: the library's own words" in text.read_text()
    kept = json.loads(text.with_suffix(".json").read_text())
    assert kept["command"] == (
        "vllm-parity audit --backend failing --model tiny-llama --dtype fp32 "
        "--suites suites/test_activations.py -k twice"
    )
    assert (kept["schema"], kept["verdict"]) == (1, "nothing could be judged")


def test_capturing_is_timed_beside_the_same_forward_without():
    """By the backend's own clock, with the points it declares, and one prompt where it takes no batch."""
    calls = []

    class Engine:
        capabilities = Capabilities.read({"capture": ["blocks.*.hook_out"]}, "mine")

        def forward(self, prompts, *, capture):
            calls.append((len(prompts), len(capture)))
            return SimpleNamespace(stats={"seconds": 0.010 + 0.005 * bool(capture)})

    config = BootConfig("mine@env/bin/python", "tiny", "path", mode="eager")
    found = measure_overhead(SimpleNamespace(get=lambda _: Engine()), config, layers=3, vocab=50)
    assert (found.plain, found.captured, found.points, found.rows) == (0.010, 0.015, 3, 120)
    assert found.ratio == pytest.approx(1.5)
    assert found.backend == config.backend_name
    assert set(calls) == {(1, 0), (1, 3)}


SLOW_TO_END = """
import signal, sys, time
def end(number, frame):
    time.sleep(1)
    print("wrote the report", flush=True)
    sys.exit(2)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
print("runs", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_an_audit_that_is_told_to_end_lets_pytest_write_its_report(told):
    """SIGTERM reaches this process alone, Ctrl-C the whole group; pytest takes its time either way."""
    program = "import sys; from harness.audit.suites import _run; "
    program += f"sys.exit(_run([sys.executable, '-c', {SLOW_TO_END!r}]))"
    running = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert running.stdout.readline() == "runs\n"
    if told == signal.SIGINT:
        os.killpg(running.pid, told)
    else:
        running.send_signal(told)
    out, _ = running.communicate(timeout=30)
    assert (running.returncode, out) == (2, "wrote the report\n")

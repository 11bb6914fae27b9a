"""The command: exit codes, one line per error, and nothing heavy loaded for a list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import cli
from harness.cli import doctor
from harness.models.cache import CACHE_ENV
from harness.vllm.internals import relied
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import json, sys, harness.cli; harness.cli._parser(); "
        "print(json.dumps([name for name in ('torch', 'vllm', 'transformers', 'pandas') if name in sys.modules]))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=root, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == []


def test_as_a_module() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "harness", "--version"]
    done = subprocess.run(command, check=True, cwd=root, capture_output=True, text=True)
    assert done.stdout.startswith("vllm-parity ")


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["report"], ["models", "surplus"], ["report", "no/such/run"]]
)
def test_what_the_caller_can_put_right_is_one_line(argv, capsys):
    assert cli.main(argv) == cli.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vllm-parity: ")
    assert err.count("\n") == 1


def test_a_reader_that_has_enough_is_no_error():
    """``vllm-parity … | head -1`` ends without a traceback."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "harness", "models"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.stderr == ""


def test_help_names_the_verbs(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("models", "doctor", "report"))


def test_models(cache, capsys):
    assert cli.main(["models"]) == cli.OK
    before = capsys.readouterr().out.splitlines()
    assert before[0].startswith("smollm2-135m")
    assert before[1].startswith("tiny-llama")
    assert "no tokenizer" in before[1]
    assert all("built on first use" in line for line in before[:2])
    entry = cache / "models" / "tiny-llama-v1"
    entry.mkdir(parents=True)
    (entry / "MANIFEST.json").write_text("{}")
    assert cli.main(["models"]) == cli.OK
    after = capsys.readouterr().out.splitlines()
    assert "in the cache" in after[1]
    assert "in the cache" not in after[0]


# --- doctor, on machines made up


def _machine(monkeypatch, *, absent=(), broken=(), device="cpu", vllm="0.32.0", moved=()):
    """Importing these packages gives stand-ins; what is not named is there and fine, torchvision apart."""
    absent = {"torchvision", "torchaudio", *absent} - set(broken)
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False), get_num_threads=lambda: 2)
    platforms = SimpleNamespace(current_platform=SimpleNamespace(device_type=device))

    def attempt(name):
        if name.split(".")[0] in broken:
            return None, "RuntimeError: operator does not exist"
        return {"torch": torch, "vllm.platforms": platforms}.get(name, object()), ""

    monkeypatch.setattr(relied, "missing", lambda _: list(moved))
    monkeypatch.setattr(doctor, "_attempt", attempt)
    monkeypatch.setattr(doctor, "_installed", lambda name: name not in absent)
    monkeypatch.setattr(doctor, "_version", lambda *names: vllm if names[0] == "vllm" else "1.0")


def test_doctor_where_all_is_well(cache, monkeypatch, capsys):
    _machine(monkeypatch)
    assert cli.main(["doctor"]) == cli.OK
    out = capsys.readouterr().out
    assert "broken" not in out
    assert "cpu, model runner V1" in out
    assert str(cache) in out
    assert out.splitlines()[-1] == "engines can boot here"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"absent": ["vllm"]}, "nox -s env"),
        ({"absent": ["torch"]}, "torch         not installed"),
        ({"broken": ["vllm"]}, "cannot be imported (RuntimeError"),
        ({"broken": ["transformers"]}, "not imported, as what it needs is broken"),
        ({"broken": ["torchvision"]}, "pip uninstall torchvision"),
        ({"device": "tpu"}, "no capture worker"),
        (
            {"moved": ["vllm.LLM has no generate, for calling"]},
            "broken  internals     vllm.LLM has no generate, for",
        ),
    ],
)
def test_doctor_says_what_is_in_the_way(cache, monkeypatch, capsys, options, says):
    _machine(monkeypatch, **options)
    assert cli.main(["doctor"]) == cli.NO_ENGINE
    out = capsys.readouterr().out
    assert says in out
    assert out.splitlines()[-1].startswith("engines cannot boot here: 1 broken")


@pytest.mark.parametrize("options", [{"vllm": "0.40.0"}, {"device": "cuda"}])
def test_doctor_notes_what_is_untried(cache, monkeypatch, capsys, options):
    _machine(monkeypatch, **options)
    assert cli.main(["doctor"]) == cli.OK
    assert "\nnote " in capsys.readouterr().out


def test_doctor_on_a_cache_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    _machine(monkeypatch)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "file" / "below"))
    assert cli.main(["doctor"]) == cli.NO_ENGINE
    assert CACHE_ENV in capsys.readouterr().out


def test_a_package_that_breaks_on_import_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('first\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._attempt("breaks_on_import") == (None, "RuntimeError: first")


# --- report


def _run(folder: Path, outcomes, *, end=True, **more) -> Path:
    cases = [declaration(n) for n in range(len(outcomes))]
    results = []
    for case, outcome in zip(cases, outcomes, strict=True):
        if outcome == "lost":
            results.append({"type": "started", "id": case["id"]})
        elif outcome != "not-run":
            results.append({"type": "case", **result(case, outcome, [make_verdict(layers=2)], **more)})
    return write_run(folder / "run", cases, results, end=end)


@pytest.mark.parametrize(
    ("outcomes", "status", "says"),
    [
        (["passed", "passed"], cli.OK, "parity holds"),
        (["passed", "failed"], cli.BROKEN, "1 case failed"),
        (["failed", "lost"], cli.BROKEN, "1 case lost"),
        (["passed", "lost"], cli.INCOMPLETE, "1 case lost"),
        (["passed", "not-run"], cli.INCOMPLETE, "1 case did not run"),
        (["passed", "error"], cli.INCOMPLETE, "could not be judged"),
        (["error"], cli.INCOMPLETE, "could not be judged"),
        (["not-run"], cli.NOTHING_RAN, "nothing ran"),
        ([], cli.NOTHING_RAN, "nothing ran"),
    ],
)
def test_report(tmp_path, capsys, outcomes, status, says):
    folder = _run(tmp_path, outcomes)
    assert cli.main(["report", str(folder)]) == status
    verdict, path = capsys.readouterr().out.splitlines()
    assert says in verdict
    assert Path(path) == folder / "index.html"
    assert all((folder / name).is_file() for name in ("index.html", "cases.parquet", "results.parquet"))


def test_a_killed_run_is_rebuilt(tmp_path, capsys):
    """Killed in the middle of a record: what was on disk before it is reported, the running case is lost."""
    folder = _run(tmp_path, ["passed"] * 3, end=False)
    records = folder / "results.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    before = records.read_bytes()
    assert cli.main(["report", str(folder)]) == cli.INCOMPLETE
    assert "1 case lost" in capsys.readouterr().out
    page = (folder / "index.html").read_text()
    assert "1 line of results.jsonl cannot be read" in page
    assert "the run has not ended" in page
    assert records.read_bytes() == before
    assert cli.main(["report", str(folder)]) == cli.INCOMPLETE  # and again, over what is there


@pytest.mark.parametrize("kept", [1, 2, 3, 4, 5])
def test_a_run_killed_early_is_rebuilt(tmp_path, capsys, kept):
    """After the run record, the declaration, the boot, the first start, the first case."""
    folder = _run(tmp_path, ["passed"] * 3, end=False)
    records = folder / "results.jsonl"
    records.write_bytes(b"".join(records.read_bytes().splitlines(keepends=True)[:kept]))
    assert cli.main(["report", str(folder)]) == (cli.INCOMPLETE if kept >= 4 else cli.NOTHING_RAN)
    assert (folder / "index.html").is_file()


def test_a_verb_is_a_module_with_four_names():
    assert {"models", "doctor", "plan", "report", "compare", "history", "families"} <= set(cli.VERBS)
    for verb in cli.VERBS.values():
        assert verb.HELP
        assert not verb.HELP.endswith(".")

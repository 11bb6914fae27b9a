"""Around peers side by side: what each is given, the environment it runs in, and the table, page and figure."""

from __future__ import annotations

import json
import signal
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.errors import EngineError, UsageError
from harness.peers import PEERS, PeerRecord, Round, Run, read_run, write_run
from harness.peers.__main__ import main
from harness.peers.figure import bar_figure
from harness.peers.process import LAUNCH
from harness.peers.text import markdown_table
from harness.peers.venvs import make_venv, read_pins
from harness.peers.work import make_task, peer_environment, ragged_lengths

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "peers"

# --- what is given to them


def test_the_batch_is_ragged_and_the_same_every_time():
    lengths = ragged_lengths()
    assert (len(lengths), min(lengths), max(lengths)) == (64, 5, 120)
    assert any(b < a for a, b in pairwise(lengths))
    options = {"dtype": "float32", "threads": 2, "micro_batch": 8, "vocabulary": 50}
    task = make_task(Path("x"), **options)
    assert task == make_task(Path("x"), **options)
    assert [len(prompt) for prompt in task["prompts"]["ragged"]] == lengths
    assert len(task["prompts"]["prefill"][0]) == 511
    assert max(max(prompt) for prompt in task["prompts"]["ragged"]) < 50
    json.dumps(task)


def test_every_peer_gets_the_same_cores_and_only_its_own_plugin():
    plain, lens = peer_environment(1), peer_environment(1, "activations")
    assert plain.pop("VLLM_PLUGINS") == ""
    assert lens.pop("VLLM_PLUGINS") == "activations"
    assert plain == lens
    assert len(plain["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


def test_every_peer_has_its_runner_and_its_pins():
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for peer in PEERS:
        assert (LAUNCH.parent / f"{peer.runner}.py").is_file(), peer.name
        if peer.requirements:
            names = [pin.split("==")[0] for pin in read_pins(REQUIREMENTS / f"{peer.requirements}.txt")]
            assert set(peer.forced) <= set(names)
    used = {peer.requirements for peer in PEERS if peer.requirements}
    assert used == {file.stem for file in REQUIREMENTS.glob("*.txt")}


# --- environments

UV = """#!{python}
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    print(*arguments, file=log)
if arguments[0] == "venv":
    folder = Path(arguments[-1])
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "lib" / "python{version}" / "site-packages").mkdir(parents=True)
elif any(word.startswith("torch==") for word in arguments) or (
    "picky==1" in arguments and "--python-version" not in arguments
):
    print("  \N{MULTIPLICATION SIGN} No solution found when resolving dependencies:", file=sys.stderr)
    print("  ╰─▶ Because it is picky, we can conclude that your requirements are unsatisfiable.", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def uv(tmp_path):
    log, script = tmp_path / "uv.log", tmp_path / "uv"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    script.write_text(UV.format(python=sys.executable, log=str(log), version=version))
    script.chmod(0o755)
    return script


def peer_with(tmp_path, pins, forced=()):
    from harness.peers import Peer

    (tmp_path / "p.txt").write_text("# a peer\n" + "\n".join(pins) + "\n")
    return Peer("p", "p", "hf_hooks", "p", forced=forced)


def test_an_environment_is_made_once_and_sees_the_shared_one(tmp_path, uv):
    peer = peer_with(tmp_path, ["easy==2"])
    venv = make_venv(peer, tmp_path, tmp_path / "venvs", uv=str(uv))
    assert venv.python.is_file()
    (shared,) = venv.python.parent.parent.rglob("_shared.pth")
    assert Path(shared.read_text().strip(), "torch").is_dir()
    calls = (tmp_path / "uv.log").read_text().splitlines()
    assert len(calls) == 2
    assert "--no-deps" in calls[1]
    assert make_venv(peer, tmp_path, tmp_path / "venvs", uv="nothing") == venv
    other = make_venv(peer_with(tmp_path, ["easy==3"]), tmp_path, tmp_path / "venvs", uv=str(uv))
    assert other.python != venv.python


def test_a_pin_that_refuses_this_python_is_forced_and_said(tmp_path, uv):
    peer = peer_with(tmp_path, ["easy==2", "picky==1"], forced=("picky",))
    venv = make_venv(peer, tmp_path, tmp_path / "venvs", uv=str(uv))
    assert venv.note == "installed against its own requirements (Because it is picky)"
    assert make_venv(peer, tmp_path, tmp_path / "venvs", uv=str(uv)).note == venv.note


def test_what_cannot_be_installed_is_said_in_uvs_words(tmp_path, uv):
    with pytest.raises(EngineError, match=r"^Because it is picky$"):
        make_venv(peer_with(tmp_path, ["picky==1"]), tmp_path, tmp_path / "venvs", uv=str(uv))
    with pytest.raises(EngineError, match=r"^Because it is picky \(PyTorch's own index was asked too"):
        make_venv(
            peer_with(tmp_path, ["torch==1", "easy==1"]),
            tmp_path,
            tmp_path / "venvs",
            uv=str(uv),
            torch_index="https://example.org",
        )
    assert "easy==1" not in (tmp_path / "uv.log").read_text()


@pytest.mark.parametrize("pin", ["torch>=2", "x @ https://example.org/x", "--index-url x"])
def test_pins_are_names_and_exact_versions(tmp_path, pin):
    (tmp_path / "p.txt").write_text(pin + "\n")
    with pytest.raises(UsageError, match="names and exact versions only"):
        read_pins(tmp_path / "p.txt")
    with pytest.raises(UsageError, match="cannot read"):
        read_pins(tmp_path / "none.txt")


# --- what is written


def a_run() -> Run:
    def record(name, title, seconds, **fields):
        rounds = [Round(n, "collect", "ragged", seconds + n / 10) for n in range(3)]
        rounds += [Round(n, "plain", "ragged", seconds / 2) for n in range(2)]
        return PeerRecord(name, title, rounds=rounds, **fields)

    ours = record("harness", "ours", 4.0, worst_row=1e-6, blocks=3, versions={"torch": "1"})
    limit = PeerRecord("vllm", "plain", state="limit", rounds=[Round(0, "plain", "ragged", 1.5)])
    wrong = record("w", "<script>alert(1)</script>", 1.0, state="wrong", error="wrong from block 2 on")
    failed = PeerRecord("f", "absent | peer", state="failed", error="could not start")
    return Run(
        started="2026-01-01T00:00:00+00:00",
        model="m",
        dtype="float32",
        threads=2,
        lengths={"ragged": [5, 6], "prefill": [9]},
        micro_batch=8,
        step=64,
        bound=1e-3,
        machine={"cpu": "a CPU"},
        peers=[limit, ours, record("b", "other", 8.0), wrong, failed],
    )


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    write_run(a_run(), tmp_path / "peers.json")
    assert read_run(tmp_path / "peers.json") == a_run()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 99}', '{"schema": 1, "peers": [{"rounds": 3}]}'])
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "peers.json").write_text(text)
    with pytest.raises(UsageError, match=r"peers\.json"):
        read_run(tmp_path / "peers.json")
    with pytest.raises(UsageError, match="cannot read"):
        read_run(tmp_path / "none.json")


def test_the_table_has_every_peer_and_escapes_them():
    text = markdown_table(a_run())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 4  # a failed one has no row
    assert (
        len({line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    )
    assert "**absent \\| peer**: could not start" in text
    assert "<script>" not in text
    assert "(wrong values)" in text
    other = next(line for line in rows if "| other" in line)
    assert "1.98" in other  # 8.1 / 4.1 in the middle round


def test_the_page_says_what_was_run_and_holds_table_and_figure(tmp_path):
    run = a_run()
    run.machine["waiting_percent"] = 3.2
    write_run(run, tmp_path / "peers.json")
    assert main(["--from", str(tmp_path / "peers.json"), "--page", str(tmp_path / "peers.md")]) == 0
    text = (tmp_path / "peers.md").read_text()
    assert markdown_table(run) in text
    assert "nox -s peers" in text
    assert "![seconds per peer](peers.svg)" in text
    assert "2 prompts of 5 to 6 tokens" in text
    assert "waited for a core 3 % of the time" in text
    assert "medians of 3 rounds. **That is a first look: 5 rounds were wanted" in text
    assert (tmp_path / "peers.svg").read_text() == bar_figure(run)


def test_the_figure_is_well_formed_and_escapes():
    tree = ET.fromstring(bar_figure(a_run()))
    texts = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert "<script>alert(1)</script> (wrong values)" in texts
    bars = [node.get("class") for node in tree.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars == ["bad", "ours", "bar"]  # fastest first; neither the limit nor the failed one has one
    assert "absent | peer" not in texts
    assert bar_figure(Run("", "", "", 1, {}, 1, 1, 1.0)) == ""


@pytest.mark.parametrize("top", [0.03, 0.9, 1.0, 7.4, 99.0, 1234.0])
def test_the_figures_axis_has_a_few_lines(top):
    from harness.peers.figure import _ticks

    assert 3 <= len(_ticks(top)) <= 7


def test_bad_options_are_one_line(capsys, tmp_path):
    assert main(["--from", str(tmp_path / "x")]) == 2
    assert "name it with --page" in capsys.readouterr().err
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--rounds", "0"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before, (
        "a run of pytest around it must still end as it promises"
    )
    assert "--rounds is 0" in capsys.readouterr().err

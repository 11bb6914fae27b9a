"""Peers side by side: what becomes of one that dies, hangs, prints rubbish or returns something else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from harness.errors import EngineError
from harness.peers import PeerRecord, read_run
from harness.peers.__main__ import main
from harness.peers.driver import Launch, Schedule, run_peers
from harness.peers.judge import judge_values
from harness.peers.process import LAUNCH, PeerProcess
from harness.peers.runners.launch import Answers
from harness.peers.runners.padding import in_micro_batches, rows_of
from harness.peers.work import ragged_lengths

PROMPTS = [[1, 2, 3], [4, 5], [6]]
TRUTH = {
    (prompt, block): torch.full((len(ids), 2), 1.0 + prompt + 10 * block, dtype=torch.float64)
    for prompt, ids in enumerate(PROMPTS)
    for block in range(3)
}
TASK = {"prompts": {"ragged": PROMPTS, "prefill": [[1] * 9]}}

#: Answers as a peer does, without torch; what it does wrong stands in its second argument.
FAKE = """
import json, os, signal, sys, time
import numpy
from safetensors.numpy import save_file

wrong = sys.argv[1]
task = json.loads(sys.stdin.readline())
if wrong == "boots not":
    print(json.dumps({"error": "ImportError: no such thing"}), flush=True)
    sys.exit(1)
if wrong == "silent":
    print("it hurts", file=sys.stderr)
    os._exit(7)
print(json.dumps({"boot_seconds": 0.5, "versions": {"torch": "9"}}), flush=True)
for number, line in enumerate(sys.stdin):
    command = json.loads(line)
    if "save" in command:
        values = {}
        for prompt, ids in enumerate(task["prompts"]["ragged"]):
            for block in range(3):
                value = numpy.full((len(ids), 2), 1.0 + prompt + 10 * block)
                if wrong == "shifted" and block == 2:
                    value -= 10
                if wrong == "cut" and block == 1:
                    value = value[:-1]
                values[f"{prompt}/{block}"] = value
        save_file(values if wrong != "empty" else {}, command["save"])
        print(json.dumps({"blocks": [0, 1, 2]}), flush=True)
        continue
    if number >= 2:
        if wrong == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if wrong == "hangs":
            time.sleep(600)
        if wrong == "rubbish":
            print("Loading weights: 100%", flush=True)
        if wrong == "reports":
            print(json.dumps({"error": "RuntimeError: out of tokens"}), flush=True)
            continue
        if wrong == "no number":
            print(json.dumps({"seconds": "fast"}), flush=True)
            continue
    slow = 2.0 if "collect" in command else 1.0
    print(json.dumps({"seconds": slow * len(task["prompts"][next(iter(command.values()))])}), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def launch(wrong: str = "nothing", name: str | None = None, **kwargs) -> Launch:
        record = PeerRecord(name or wrong, f"the one that {wrong}")
        return Launch(record, (sys.executable, str(script), wrong), **kwargs)

    return launch


def run(launches, folder, **schedule):
    options = {"rounds": 3, "boot_timeout": 60.0, "step_timeout": 60.0, "judged": 3, **schedule}
    return run_peers(launches, TASK, folder, truth=TRUTH, bound=1e-6, schedule=Schedule(**options))


# --- the driver


def test_good_peers_take_turns_and_are_judged(fake, tmp_path):
    first, second = run([fake(name="a"), fake(name="b")], tmp_path, plain_rounds=2)
    assert (first.state, second.state) == ("ok", "ok")
    assert (first.blocks, first.worst_row) == (3, 0.0)
    assert first.seconds("collect", "ragged") == {0: 6.0, 1: 6.0, 2: 6.0}
    assert first.seconds("plain", "ragged") == {0: 3.0, 1: 3.0}
    assert second.seconds("collect", "prefill") == {0: 2.0, 1: 2.0, 2: 2.0}
    assert second.against(first, "collect", "ragged").ratio == 1
    assert first.against(first, "collect", "ragged", base_work="plain").ratio == 2
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("boots not", "ImportError: no such thing"),
        ("silent", r"died during boot .*exit code 7.*it hurts"),
        ("dies", r"died during \w+ .*SIGKILL"),
        ("rubbish", "printed what is no reply to .*Loading weights: 100%"),
        ("reports", "RuntimeError: out of tokens"),
        ("no number", "its reply cannot be used"),
    ],
)
def test_a_peer_that_fails_is_listed_with_its_own_error(fake, tmp_path, wrong, says):
    good, bad = run([fake(), fake(wrong)], tmp_path)
    assert good.state == "ok"
    assert len(good.seconds("collect", "ragged")) == 3
    assert bad.state == "failed"
    assert re.search(says, bad.error), bad.error


def test_a_peer_that_hangs_is_killed_in_time(fake, tmp_path):
    good, bad = run([fake(), fake("hangs")], tmp_path, step_timeout=2.0)
    assert good.state == "ok"
    assert bad.state == "failed"
    assert "did not finish" in bad.error
    assert "within 2 s" in bad.error


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("shifted", "wrong values from block 2 of prompt 0 on, row 0"),
        ("cut", r"block 1 of prompt 0 has shape \(2, 2\) and should have \(3, 2\)"),
        ("empty", "it returned no values"),
    ],
)
def test_wrong_values_are_named(fake, tmp_path, wrong, says):
    (record,) = run([fake(wrong)], tmp_path)
    assert record.state == "wrong"
    assert re.search(says, record.error), record.error


def test_an_interpreter_that_is_not_there_is_said(tmp_path):
    launch = Launch(PeerRecord("x", "x"), (str(tmp_path / "none"),))
    (record,) = run([launch], tmp_path)
    assert record.state == "failed"
    assert "cannot be started" in record.error


def test_what_failed_before_is_not_started(fake, tmp_path):
    launch = fake()
    launch.record.state, launch.record.error = "failed", "cannot be installed"
    (record,) = run([launch], tmp_path)
    assert (record.error, record.rounds, record.boot_seconds) == ("cannot be installed", [], None)


def test_one_that_collects_nothing_is_the_limit(fake, tmp_path):
    (record,) = run([fake(collects=False)], tmp_path)
    assert record.state == "limit"
    assert record.seconds("collect", "ragged") == {}
    assert record.median("plain", "ragged") == 3


def test_what_there_is_can_be_kept_after_each_round(fake, tmp_path):
    launch, seen = fake(), []
    options = {"truth": TRUTH, "bound": 1e-6, "schedule": Schedule(rounds=2, judged=3)}
    keep = lambda: seen.append((len(launch.record.rounds), launch.record.worst_row))  # noqa: E731
    run_peers([launch], TASK, tmp_path, **options, after_round=keep)
    assert seen == [(4, 0.0), (8, 0.0)]


def test_time_that_is_up_ends_the_rounds_after_the_second(fake, tmp_path):
    (record,) = run([fake()], tmp_path, rounds=9, seconds=0.0)
    assert len(record.seconds("collect", "ragged")) == 2


def test_a_slow_peer_sits_out_and_the_others_go_on(fake, tmp_path):
    slow, quick = run([fake(name="slow"), fake(name="limit", collects=False)], tmp_path, peer_seconds=15.0)
    assert len(slow.seconds("collect", "ragged")) == 2
    assert len(quick.seconds("plain", "ragged")) == 3


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


def test_the_process_and_what_it_started_are_gone_after_close(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import subprocess, sys, json, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "sys.stdin.readline(); print(json.dumps({'pid': child.pid}), flush=True); time.sleep(600)\n"
    )
    process = PeerProcess("p", [sys.executable, str(script)], tmp_path / "log")
    child = process.ask({"hello": 1}, 30.0)["pid"]
    process.close(wait=0)
    process.close()
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)
    with pytest.raises(EngineError, match="was gone before"):
        process.ask({"hello": 1}, 5.0)


# --- values


def test_rows_are_judged_one_by_one(tmp_path):
    truth = {(0, 0): torch.tensor([[1000.0, 0.0], [1.0, 0.0]], dtype=torch.float64)}
    value = truth[0, 0].clone()
    value[1] *= 1.5  # nothing beside the first row's norm
    save_file({"0/0": value}, tmp_path / "v")
    worst, wrong = judge_values(tmp_path / "v", truth, 0.1)
    assert worst == pytest.approx(0.5)
    assert "block 0 of prompt 0 on, row 1" in wrong
    assert judge_values(tmp_path / "v", truth, 0.6)[1] == ""
    value[0, 0] = float("nan")
    save_file({"0/0": value}, tmp_path / "v")
    assert judge_values(tmp_path / "v", truth, 0.6)[1]
    save_file({"0/7": value}, tmp_path / "v")
    assert "block 7 of prompt 0 does not exist" in judge_values(tmp_path / "v", truth, 0.6)[1]


# --- what runs in a peer's interpreter


def test_what_a_library_prints_does_not_reach_the_replies(tmp_path):
    (tmp_path / "chatty.py").write_text(
        "import os\n"
        "class Runner:\n"
        "    packages = ('safetensors', 'no-such-thing')\n"
        "    def collect(self, prompts):\n"
        "        print('rubbish'); os.system('echo more'); return prompts\n"
        "    def plain(self, prompts):\n"
        "        raise RuntimeError('no\\nway')\n"
        "    def residuals(self, collected, prompt):\n"
        "        import torch\n"
        "        return {4: torch.ones(len(collected[prompt]), 1)}\n"
        "def boot(task):\n"
        "    print('hello'); return Runner()\n"
    )
    argv = [sys.executable, "-c", "from harness.peers.runners.launch import main; main('chatty')"]
    root = Path(__file__).resolve().parents[2]
    paths = {"PYTHONPATH": f"{tmp_path}:{root}"}
    with PeerProcess("chatty", argv, tmp_path / "log", paths) as process:
        reply = process.ask({"threads": 1, "prompts": {"p": PROMPTS}}, 60.0, "boot")
        assert reply["versions"].keys() >= {"torch", "safetensors"}
        assert process.ask({"collect": "p"}, 60.0)["seconds"] > 0
        with pytest.raises(EngineError, match="RuntimeError: no way"):
            process.ask({"plain": "p"}, 60.0)
        assert process.ask({"save": str(tmp_path / "v"), "prompts": 2}, 60.0) == {"blocks": [4]}
    assert "rubbish" in (tmp_path / "log").read_text()


def test_a_driver_that_is_gone_takes_the_peer_and_its_engine_with_it(tmp_path):
    """In the middle of a forward, and with a process that the peer has started and would leave behind."""
    (tmp_path / "busy.py").write_text(
        "import subprocess, sys, time\n"
        "class Runner:\n"
        "    packages = ()\n"
        "    def collect(self, prompts):\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"        open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(600)\n"
        "def boot(task):\n"
        "    return Runner()\n"
    )
    argv = [sys.executable, "-c", "from harness.peers.runners.launch import main; main('busy')"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
    ) as peer:
        peer.stdin.write(json.dumps({"threads": 1, "prompts": {"p": PROMPTS}}).encode() + b"\n")
        peer.stdin.write(b'{"collect": "p"}\n')
        peer.stdin.flush()
        deadline = time.monotonic() + 60
        while not (file := tmp_path / "child").exists() or not file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        child = int(file.read_text())
        peer.stdin.close()
        assert peer.wait(20) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def test_a_runner_that_is_not_there_is_an_error_of_its_own(tmp_path):
    with (
        PeerProcess("x", [sys.executable, str(LAUNCH), "no_such"], tmp_path / "log") as process,
        pytest.raises(EngineError, match="ModuleNotFoundError"),
    ):
        process.ask({"threads": 1, "prompts": {}}, 60.0, "boot")


def test_what_was_collected_before_is_let_go_first():
    held = []

    class Runner:
        packages = ()

        def collect(self, prompts):
            held.append(answers._collected)
            return prompts

    answers = Answers(Runner(), {"p": PROMPTS})
    answers.answer({"collect": "p"})
    answers.answer({"collect": "p"})
    assert held == [None, None]


def test_padding_keeps_every_prompt_and_gives_its_rows_back():
    prompts = [list(range(1, n + 1)) for n in (5, 1, 4, 2, 3)]
    batches = list(in_micro_batches(prompts, 2))
    assert sorted(number for batch in batches for number in batch.numbers) == list(range(5))
    assert [batch.ids.shape[1] for batch in batches] == [2, 4, 5]
    collected = [(batch, {7: batch.ids.unsqueeze(-1)}) for batch in batches]
    for number, prompt in enumerate(prompts):
        assert rows_of(collected, number)[7].squeeze(-1).tolist() == prompt
    with pytest.raises(KeyError):
        rows_of(collected, 9)


def test_transformers_side_by_side_end_to_end(tmp_path, capsys):
    """Both ways of reading transformers, as processes, on a tiny model: right values, all blocks but for one."""
    options = ["--model", "tiny-llama", "--only", "hf-hidden-states", "hf-hooks", "--threads", "1"]
    assert main([*options, "--rounds", "2", "--plain-rounds", "1", "--out", str(tmp_path)]) == 0
    found = read_run(tmp_path / "peers.json")
    states, hooks = found.peers
    assert (states.state, hooks.state) == ("ok", "ok")
    assert (states.blocks, hooks.blocks) == (3, 4)
    assert 0 < hooks.worst_row < 1e-5
    assert len(hooks.seconds("collect", "ragged")) == 2
    assert len(hooks.seconds("plain", "prefill")) == 1
    assert found.lengths["ragged"] == ragged_lengths()
    assert "transformers, forward hooks" in capsys.readouterr().out
    assert (tmp_path / "peers.svg").read_text().startswith("<svg")

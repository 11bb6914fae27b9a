"""Backends in interpreters of their own, as real processes: what they may do wrong is named and charged to them."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing import Pipe

import psutil
import pytest
import torch

from harness.backend import BootConfig, Topology, load_backend
from harness.elsewhere import worker
from harness.elsewhere.plain import Plain, PlainClass
from harness.elsewhere.remote import RemoteRunner
from harness.errors import CaptureError, EngineError, UndeclaredError, UsageError
from harness.pool import EnginePool
from harness.transport import PROTOCOL
from suites.unit.brought import interpreter, package

FAKES = """
import os, signal, sys, time
import torch

class Good:
    capabilities = {"capture": ["embed.hook_out", "ln_final.hook_normalized"], "edit": {"add": ["embed.hook_out"]},
                    "emitted": ["ln_final.hook_normalized"], "batch": True,
                    "edit_per_prompt": True, "edit_positions": True, "logits": True}
    def __init__(self, config):
        self.dtype = getattr(torch, config.dtype)
    @classmethod
    def boot(cls, config):
        assert "harness" not in sys.modules
        return cls(config)
    def describe(self):
        return {"fake": "1.0"}
    def run(self, prompts, *, capture, edits, new_tokens, logits):
        rows = [torch.tensor(p, dtype=self.dtype)[:, None].expand(-1, 64).clone() for p in prompts]
        for row, here in zip(rows, edits):
            for edit in here:
                at = slice(None) if edit["rows"] is None else edit["rows"]
                row[at] = row[at] * edit["scale"] + edit["bias"]
        return {"captured": {name: rows for name in capture},
                "logits": [torch.nn.functional.one_hot(torch.tensor(p), 259).float() for p in prompts]}
    def close(self):
        pass

class Prints(Good):
    @classmethod
    def boot(cls, config):
        print("booting, says stdout", flush=True)
        os.write(1, b'{"ok": true} looks like a message')
        return cls(config)

class BootFails(Good):
    @classmethod
    def boot(cls, config):
        raise ValueError("no such checkpoint, says the peer")

class BootHangs(Good):
    @classmethod
    def boot(cls, config):
        time.sleep(600)

class Raises(Good):
    def run(self, prompts, **asked):
        raise RuntimeError("out of pencils")

class Dies(Good):
    def run(self, prompts, **asked):
        os._exit(3)

class Segfaults(Good):
    def run(self, prompts, **asked):
        os.kill(os.getpid(), signal.SIGSEGV)

class Exits(Good):
    def run(self, prompts, **asked):
        sys.exit("enough")

class DiesWithAChildLeft(Good):
    def run(self, prompts, **asked):
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os._exit(3)

class Invents(Good):
    capabilities = {**Good.capabilities, "decode": True}
    def run(self, prompts, **asked):
        return {**super().run(prompts, **asked), "new_tokens": [[7], [259]]}

class Hangs(Good):
    def run(self, prompts, **asked):
        time.sleep(600)

class Narrow(Good):
    def run(self, prompts, **asked):
        found = super().run(prompts, **asked)
        return {**found, "captured": {name: [r[:, :63] for r in rows] for name, rows in found["captured"].items()}}

class Half(Good):
    def run(self, prompts, **asked):
        found = super().run(prompts, **asked)
        return {**found, "captured": {name: [r.half() for r in rows] for name, rows in found["captured"].items()}}

class Forgets(Good):
    def run(self, prompts, **asked):
        found = super().run(prompts, **asked)
        return {**found, "captured": {}}

class Short(Good):
    def run(self, prompts, **asked):
        found = super().run(prompts, **asked)
        return {**found, "captured": {name: rows[:1] for name, rows in found["captured"].items()}}

class Wordy(Good):
    def run(self, prompts, **asked):
        found = super().run(prompts, **asked)
        return {**found, "logits": [rows[:, :258] for rows in found["logits"]]}

class Misspelt(Good):
    capabilities = {"capture": ["blocks.*.hook_outt"]}
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter with the fakes, and one entry point among them."""
    folder = tmp_path_factory.mktemp("elsewhere")
    package(folder / "site", "parity-fakes", FAKES, {"good": "Good"})
    return interpreter(folder / "venv", folder / "site")


@pytest.fixture
def booted(python, tiny_folder):
    """Boots fakes, and ends them."""
    live = []

    def boot(name, **fields):
        config = configured(f"{name}@{python}", tiny_folder, **fields)
        live.append(load_backend(config.backend).boot(config))
        return live[-1]

    yield boot
    for backend in live:
        backend.close()


def configured(backend, folder, **fields):
    return BootConfig(
        **{"backend": backend, "model": "tiny-llama", "path": str(folder), "mode": "eager", **fields}
    )


def test_a_worker_serves_a_backend_that_knows_nothing_of_this_project(booted):
    backend = booted("good")
    assert backend.supported_hook_points == ["embed.hook_out", "ln_final.hook_normalized"]
    assert "does not declare it" in backend.non_fireable_hook_points["blocks.0.hook_out"]
    described = backend.describe()
    assert described["fake"] == "1.0"
    assert described["worker_pid"] != os.getpid()
    result = backend.forward([[5, 6, 7], [9]], capture=["embed.hook_out"], return_logits=True)
    assert result.captured["embed.hook_out"].shape == (2, 3, 64)
    assert result.rows("embed.hook_out", 0)[:, 0].tolist() == [5.0, 6.0, 7.0]
    assert result.new_tokens == [[7], [9]]  # what the logits say
    assert bool((result.logits[1, 1:] == -torch.inf).all())
    assert [rows.argmax(dim=1).tolist() for rows in backend.raw_logits([[5, 6]])] == [[5, 6]]


def test_edits_arrive_as_a_factor_and_a_bias_per_prompt(booted):
    backend = booted("parity_fakes:Good")
    specs = [{"embed.hook_out": {"op": "add", "value": 2.0, "pos": [1]}}, None]
    rows = backend.forward([[5, 6], [7, 8]], capture=["embed.hook_out"], intervene=specs)
    assert rows.rows("embed.hook_out", 0)[:, 0].tolist() == [5.0, 8.0]
    assert rows.rows("embed.hook_out", 1)[:, 0].tolist() == [7.0, 8.0]
    alike = {"embed.hook_out": {"op": "add", "value": [0.5] * 64}}
    rows = backend.forward([[5, 6], [7]], capture=["embed.hook_out"], intervene=alike)
    assert rows.rows("embed.hook_out", 1)[:, 0].tolist() == [7.5]


def test_what_a_module_emits_is_translated_on_this_side(booted, tiny_folder):
    from harness.reference.weights import final_norm_weight

    backend = booted("good")
    rows = backend.forward([[5]], capture=["ln_final.hook_normalized"]).rows("ln_final.hook_normalized", 0)
    torch.testing.assert_close(rows[0], 5.0 / final_norm_weight(tiny_folder).float())


def test_what_a_backend_prints_disturbs_nothing(booted, capfd):
    backend = booted("parity_fakes:Prints")
    assert backend.forward([[5]], capture=["embed.hook_out"]).lengths == [1]
    assert "booting, says stdout" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("fake", "error", "message"),
    [
        (
            "Raises",
            EngineError,
            r"backend parity_fakes:Raises, in its own interpreter: RuntimeError: out of pencils",
        ),
        ("Dies", EngineError, r"backend parity_fakes:Dies: its worker died during run \(exit code 3\)"),
        ("Segfaults", EngineError, r"its worker died during run \(signal SIGSEGV\)"),
        ("DiesWithAChildLeft", EngineError, r"its worker died during run \(exit code 3\)"),
        ("Invents", CaptureError, r"returned 259 as a new token of prompt 1, of a vocabulary of 259"),
        (
            "Narrow",
            CaptureError,
            r"returned embed.hook_out of prompt 0 with shape \(2, 63\) where \(2, 64\) was",
        ),
        ("Half", CaptureError, r"returned embed.hook_out of prompt 0 as float16 where float32 was asked for"),
        ("Forgets", CaptureError, r"returned no embed.hook_out"),
        ("Short", CaptureError, r"returned embed.hook_out of 1 prompts where 2 were run"),
        ("Wordy", CaptureError, r"returned logits of prompt 0 with shape \(2, 258\) where \(2, 259\)"),
    ],
)
def test_what_it_does_wrong_in_a_call_is_named(booted, fake, error, message):
    with pytest.raises(error, match=message):
        booted(f"parity_fakes:{fake}").forward([[5, 6], [7]], capture=["embed.hook_out"])


def test_a_backend_that_exits_is_known_to_be_gone(booted):
    """Its case alone is an error: the next one gets a fresh worker, as the pool is told."""
    backend = booted("parity_fakes:Exits")
    with pytest.raises(EngineError, match=r"in its own interpreter: SystemExit: enough"):
        backend.forward([[5]], capture=["embed.hook_out"])
    assert backend.lost


def test_a_worker_that_is_gone_stays_gone(booted):
    backend = booted("parity_fakes:Good")
    os.kill(backend.describe()["worker_pid"], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"its worker (died during|was gone before) run \(signal SIGKILL\)"
        ):
            backend.forward([[5]], capture=["embed.hook_out"])
    assert backend.lost


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("parity_fakes:BootFails", r"in its own interpreter: ValueError: no such checkpoint, says the peer"),
        ("parity_fakes:Misspelt", r"it declares the point 'blocks.\*.hook_outt'; there are embed.hook_out"),
        ("parity_fakes:Absent", r"AttributeError"),
        (
            "nobody",
            r"LookupError: no backend 'nobody' is installed in .* \(entry points harness.backends: .*good",
        ),
    ],
)
def test_a_backend_that_does_not_boot_is_named(booted, name, message):
    with pytest.raises(EngineError, match=message):
        booted(name)


def test_modes_and_ranks_that_are_not_declared_are_refused(booted):
    with pytest.raises(UndeclaredError, match=r"declares no compiled mode; use --engine-mode eager"):
        booted("good", mode="compiled")
    with pytest.raises(UndeclaredError, match=r"declares no ranks; tp2 is for engines"):
        booted("good", topology=Topology(2, 1))


def test_an_interpreter_that_cannot_run_a_worker_is_refused_beforehand(tmp_path, tiny_folder):
    bare = interpreter(tmp_path / "bare", torch=False)
    no_python = tmp_path / "cat"
    no_python.symlink_to("/bin/cat")
    refused = {
        str(tmp_path / "none"): r"--backend good@.*none: there is no program",
        str(tmp_path): r"there is no program",
        str(no_python): r"does not behave like a Python interpreter",
        str(bare): r"it lacks torch and safetensors, which the worker needs",
    }
    for python, message in refused.items():
        config = configured(f"good@{python}", tiny_folder)
        with pytest.raises(UsageError, match=message):
            load_backend(config.backend).check(config)
    with pytest.raises(UsageError, match=r"it is NAME@PYTHON"):
        load_backend("good@")


def test_a_python_that_is_too_old_is_refused(tmp_path, tiny_folder):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3 9\n")
    old.chmod(0o755)
    config = configured(f"good@{old}", tiny_folder)
    with pytest.raises(UsageError, match=r"it is Python 3\.9, and the worker needs 3\.10"):
        load_backend(config.backend).check(config)


SPEAKS = """#!{python}
import json, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[-1]))
{says}
connection.poll(10)
"""


@pytest.mark.parametrize(
    ("says", "message"),
    [
        (
            'connection.send_bytes(json.dumps({"protocol": 99, "ok": True}).encode()); connection.send_bytes(b"")',
            r"backend odd: .* speaks protocol 99, this one 1; its worker is .*odd, and this is for protocol 1",
        ),
        (
            'connection.send_bytes(b"good morning"); connection.send_bytes(b"")',
            r"backend odd: what came over the pipe is no message \(JSONDecodeError",
        ),
        ("sys.exit(4)", r"backend odd: its worker died during hello \(exit code 4\)"),
    ],
)
def test_another_protocol_is_named(tmp_path, says, message):
    odd = tmp_path / "odd"
    odd.write_text(SPEAKS.format(python=sys.executable, says=says))
    odd.chmod(0o755)
    with pytest.raises(EngineError, match=message):
        RemoteRunner("odd", str(odd))


def test_both_ends_have_the_same_protocol():
    assert worker.PROTOCOL == PROTOCOL


def test_a_worker_names_another_protocol_too():
    ours, theirs = Pipe()
    for frame in (b'{"protocol": 99, "op": "boot"}', b""):
        ours.send_bytes(frame)
    with pytest.raises(RuntimeError, match=r"the harness speaks protocol 99, this worker 1"):
        worker.receive(theirs)


def test_a_plain_backend_of_this_interpreter_is_served_without_a_worker(tiny_folder):
    space = {}
    exec(FAKES.replace('assert "harness" not in sys.modules', "pass"), space)
    backend = PlainClass(space["Good"]).boot(configured("good", tiny_folder))
    assert isinstance(backend, Plain)
    assert backend.forward([[5, 6]], capture=["embed.hook_out"]).rows("embed.hook_out", 0)[:, 3].tolist() == [
        5,
        6,
    ]
    with pytest.raises(UsageError, match=r"backend good does not declare it"):
        backend.forward([[5]], capture=["blocks.0.hook_out"])


def gone(pid, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_an_engine_supervises_it_and_everything_ends_with_it(python, tiny_folder, tmp_path):
    """One pool: a good one served across two borders, one that hangs, one that dies, one that hangs in boot."""

    def config(fake):
        return configured(f"parity_fakes:{fake}@{python}", tiny_folder)

    pool = EnginePool(tmp_path, step_timeout=3.0, boot_timeout=200.0)
    try:
        good = pool.get(config("Prints"))
        assert good.capabilities.batch
        assert not good.capabilities.decode
        assert good.forward([[5, 6]], capture=["embed.hook_out"]).lengths == [2]
        assert "booting, says stdout" in good.log.read_text()
        assert good.log.name.startswith("parity_fakes_Prints~")
        pid = good.describe["worker_pid"]
        good.close()
        assert gone(pid)

        hung = pool.get(config("Hangs"))
        with pytest.raises(
            EngineError, match=r"engine parity_fakes_Hangs~.* did not finish forward within 3 s"
        ):
            hung.forward([[5]], capture=["embed.hook_out"])
        assert gone(hung.describe["worker_pid"])

        died = pool.get(config("Dies"))
        with pytest.raises(
            EngineError, match=r"backend parity_fakes:Dies: its worker died[\s\S]*last lines of"
        ):
            died.forward([[5]], capture=["embed.hook_out"])
        assert not died.alive
        assert pool.get(config("Dies")).describe["worker_pid"] != died.describe["worker_pid"]

        pool._boot_timeout = 6.0
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        with pytest.raises(EngineError, match=r"did not finish boot within 6 s and was killed"):
            pool.get(config("BootHangs"))
        started = [c.pid for c in psutil.Process().children(recursive=True) if c.pid not in before]
        assert all(gone(pid) for pid in started)
    finally:
        pool.close()

"""Engines that die, hang or starve, on real processes: each ends in one clear line, leaves nothing, and costs itself.

The backend is a package made here, found by its entry point as anybody's would be. vLLM adds nothing to what is tried;
``suites/test_supervision.py`` kills and stops a real engine of it.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from harness.backend import BootConfig
from harness.errors import EngineError
from harness.pool import EnginePool
from harness.report.build import render
from harness.report.setting import run_seconds
from harness.store import RESULTS, read_run
from suites.unit.synthetic_run import declaration, result, write_run

ROOT = Path(__file__).resolve().parents[2]
DOOMED = """
import os, resource, signal, subprocess, sys, time

class Doomed:
    supported_hook_points = ["embed.hook_out"]
    non_fireable_hook_points = {}

    def __init__(self, how):
        self.how = how

    @classmethod
    def boot(cls, config):
        how = config.options["how"]
        if "child" in how:
            child = subprocess.Popen(["sleep", "600"])
            print("child", child.pid, flush=True)
        if "boot" in how:
            _end(how)
        return cls(how)

    def describe(self):
        return {"how": self.how}

    def forward(self, input_ids, **_):
        _end(self.how)

    def close(self):
        pass

def _end(how):
    print("about to go:", how, flush=True)
    if "kill" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    if "segv" in how:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "exit" in how:
        os._exit(3)
    if "hang" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(0.1)
    if "memory" in how:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
        bytearray(1 << 40)
    if "chatter" in how:
        os.write(1, b"x" * 100_000)
        raise RuntimeError("no words left")
"""


@pytest.fixture(scope="module")
def doomed(tmp_path_factory):
    """The package on the path of this process, and so of those it starts."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "doomed.py").write_text(DOOMED)
    info = folder / "doomed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doomed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[harness.backends]\ndoomed = doomed:Doomed\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def pool(doomed, tmp_path):
    pool = EnginePool(tmp_path / "engines", boot_timeout=120.0, step_timeout=30.0)
    yield pool
    pool.close()


def config(how: str) -> BootConfig:
    return BootConfig(
        backend="doomed", model="none", path="", dtype="float32", mode="eager", options={"how": how}
    )


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill child", r"died during forward .*signal SIGKILL"),
        ("segv child", r"died during forward .*signal SIGSEGV"),
        ("exit child", r"died during forward .*exit code 3"),
        ("hang child", r"did not finish forward within 3 s and was killed"),
        ("memory", r"\AMemoryError\n"),
        ("chatter", r"no words left"),
    ],
)
def test_an_engine_that_goes_in_a_step(pool, how, says):
    """The call fails with its reason and the log's last lines; what it had started is gone; another can be booted."""
    engine = pool.boot(config(how))
    try:
        with pytest.raises(EngineError) as caught:
            engine.request("forward", 3.0 if "hang" in how else 30.0, input_ids=[[1, 2]], capture=[])
    finally:
        engine.kill()
    message = str(caught.value)
    assert re.search(says, message), message
    assert "last lines of" in message
    assert gone(engine.pid)
    log = engine.log.read_text()
    assert "about to go" in log
    for child in re.findall(r"child (\d+)", log):
        assert gone(int(child)), "an orphan is left"
    fresh = pool.boot(config("well"))
    assert fresh.describe == {"how": "well"}
    fresh.close()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("kill boot child", r"died during boot .*signal SIGKILL"),
        ("hang boot child", r"did not finish boot within 8 s and was killed"),
        ("memory boot", r"\AMemoryError\n"),
    ],
)
def test_an_engine_that_goes_in_its_boot(doomed, tmp_path, how, says):
    """It is booted once: the next case that wants it is told the same at once."""
    pool = EnginePool(tmp_path / "engines", boot_timeout=8.0, step_timeout=2.0)
    with pytest.raises(EngineError) as caught:
        pool.get(config(how))
    assert re.search(says, str(caught.value)), str(caught.value)
    started = time.monotonic()
    with pytest.raises(EngineError) as again:
        pool.get(config(how))
    assert str(again.value) == str(caught.value)
    assert time.monotonic() - started < 1
    [log] = (tmp_path / "engines").glob("*.log")
    for child in re.findall(r"child (\d+)", log.read_text()):
        assert gone(int(child)), "an orphan is left"
    pool.close()


def run_suite(folder: Path, *more: str, limit: str = "") -> subprocess.Popen:
    """The activation suite on transformers itself, in a process of its own."""
    command = [
        sys.executable, "-m", "pytest", "suites/test_activations.py", "-k", "prompt_length", "--backend", "hf",
        "--model", "tiny-llama", "--dtype", "fp32", "--engine-mode", "eager", "--report-dir", str(folder),
        "--reference-cache", "off", "-q", "-p", "no:cacheprovider", *more,
    ]  # fmt: skip
    if limit:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_disk_that_is_full_while_results_are_written(tmp_path):
    """Files may grow to some kilobytes: the run says what it could not write and is not green; the rest is kept."""
    process = run_suite(tmp_path, limit="8")  # blocks of 1024 bytes: the run's record fits, the cases do not
    said, _ = process.communicate(timeout=280)
    assert process.returncode not in (0, 5), said
    assert re.search(
        r"cannot append to .*results\.jsonl: File too large; what was recorded before is kept", said
    )
    [folder] = tmp_path.glob("*-smoke")
    assert (folder / RESULTS).stat().st_size <= 8 * 1024
    records = read_run(folder)
    assert records.run["profile"] == "smoke"
    assert len(records.cases) == 4
    assert not any(case.outcome == "passed" for case in records.cases[1:])
    assert "parity holds" not in said


def test_two_runs_at_once_in_one_folder(tmp_path):
    """Each has a folder of its own below it, and both are whole."""
    both = [run_suite(tmp_path) for _ in range(2)]
    for process in both:
        said, _ = process.communicate(timeout=290)
        assert process.returncode == 0, said
    folders = sorted(tmp_path.glob("*-smoke*"))
    assert len(folders) == 2
    for folder in folders:
        records = read_run(folder)
        assert [case.outcome for case in records.cases] == ["passed"] * 4
        assert records.end is not None
        assert not records.damaged


def test_a_clock_that_is_set_back(tmp_path):
    """Order is that of the lines and durations are of a clock that only goes on: nothing is lost, none is negative."""
    cases = [declaration(n) for n in range(3)]
    folder = write_run(tmp_path / "20261129-174455-smoke", cases, [result(case) for case in cases])
    hours = iter(("18", "17", "16", "15", "14", "13", "12", "11", "10"))
    lines = [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
    for line in lines:
        for key in {"started", "time", "finished"} & set(line):
            line[key] = f"2026-11-29T{next(hours)}:00:00+00:00"
    (folder / RESULTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = read_run(folder)
    assert [case.outcome for case in records.cases] == ["passed"] * 3
    assert all(case.seconds > 0 for case in records.cases)
    assert math.isnan(run_seconds(records))
    page = render(records)
    assert not re.search(r"took[^<]*-\d", page)

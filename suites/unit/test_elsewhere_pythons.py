"""The worker on other Pythons than ours, and without torch until a tensor is sent: whatever is on PATH is tried."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.adapters import FOLDER
from harness.backend import BootConfig
from harness.elsewhere.remote import _PYTHON, WORKER, RemoteRunner
from harness.errors import EngineError

PLAIN = '''
class Words:
    """Says what it was asked, without a tensor."""

    capabilities = {"batch": True}

    @classmethod
    def boot(cls, config):
        found = cls()
        found.config = config
        return found

    def describe(self):
        return {"path": self.config.path, "tp": self.config.topology.tp}

    def run(self, prompts, *, capture, edits, new_tokens, logits):
        if not prompts:
            raise ValueError("nothing to say")
        return {"captured": {}, "new_tokens": [p[-1:] for p in prompts], "stats": {"asked": [capture, logits]}}
'''


def works(python: str) -> bool:
    """Whether it can be started; a shim for a version that is not there cannot."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


PYTHONS = {
    f"3.{minor}": python
    for minor in range(_PYTHON[1], 20)
    if (python := shutil.which(f"python3.{minor}")) and works(python)
} | {"ours": sys.executable}


@pytest.fixture(params=PYTHONS)
def bare(request, tmp_path):
    """A virtual environment of that Python, with the backend above and nothing else."""
    subprocess.run(
        [PYTHONS[request.param], "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True
    )
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "plain_words.py").write_text(PLAIN)
    return request.param, tmp_path / "venv" / "bin" / "python"


def test_the_protocol_is_spoken_without_torch(bare, tmp_path):
    name, python = bare
    runner = RemoteRunner("words", str(python))
    try:
        if name != "ours":
            assert runner.hello["python"].startswith(f"{name}.")
        config = BootConfig("words", "m", str(tmp_path), mode="eager")
        load = {"kind": "object", "module": "plain_words", "attribute": "Words"}
        header, _ = runner.ask("boot", {"load": load, "config": config.to_json()})
        assert header["describe"]["path"] == str(tmp_path)
        assert header["describe"]["tp"] == 1
        assert header["capabilities"] == {"batch": True}
        reply = runner.run([[5, 6], [7]], capture=[], edits=[[], []], new_tokens=1, logits=False)
        assert reply.new_tokens == [[6], [7]]
        assert (reply.captured, reply.logits, reply.stats) == ({}, None, {"asked": [[], False]})
        with pytest.raises(EngineError, match="ValueError: nothing to say"):
            runner.run([], capture=[], edits=[], new_tokens=1, logits=False)
        assert not runner.lost
    finally:
        runner.close()
    assert runner._process.returncode == 0
    json.dumps(header)


@pytest.mark.parametrize("file", [WORKER, *sorted(FOLDER.glob("*.py"))], ids=lambda file: file.name)
def test_what_runs_there_is_written_in_the_oldest_python(file: Path):
    ast.parse(file.read_text(encoding="utf-8"), feature_version=_PYTHON)

"""What a report says of its machine: enough to explain a number, and no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness import provenance


def test_it_is_plain_json_and_costs_no_torch() -> None:
    script = (
        "import json, sys; from harness.provenance import collect; "
        "print(json.dumps([collect(), 'torch' in sys.modules, 'vllm' in sys.modules]))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, cwd=root, capture_output=True, text=True
    )
    found, *imported = json.loads(done.stdout)
    assert imported == [False, False]
    assert set(found) == {"versions", "project", "machine", "gpus", "env"}
    assert found["versions"]["python"].startswith("3.")
    assert found["machine"]["usable_cores"] >= 1


def test_only_what_changes_results_is_told_and_secrets_never() -> None:
    told = provenance.relevant_env(
        {
            "VLLM_USE_AOT_COMPILE": "0",
            "VLLM_API_KEY": "k1",
            "CUDA_VISIBLE_DEVICES": "0",
            "TORCH_HUB_PASSWORD": "k2",
            "VLLM_HOST": "https://user:k3@host/x",
            "HF_TOKEN": "k4",
            "HOME": "/home/k5",
        }
    )
    assert told["VLLM_USE_AOT_COMPILE"] == "0"
    assert told["VLLM_API_KEY"] == told["TORCH_HUB_PASSWORD"] == "[redacted]"
    assert told["VLLM_HOST"] == "https://[redacted]@host/x"
    assert not {"HF_TOKEN", "HOME"} & set(told)


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        (["--hf-token=abc", "-k", "x"], ["--hf-token=[redacted]", "-k", "x"]),
        (["--api-key", "abc", "suites"], ["--api-key", "[redacted]", "suites"]),
        (["--api-key", "--other"], ["--api-key", "--other"]),
        (["https://u:p@h/m"], ["https://[redacted]@h/m"]),
    ],
)
def test_command_lines_lose_their_secrets(argv: list[str], shown: list[str]) -> None:
    assert provenance.redact_argv(argv) == shown


def test_commit_and_dirt_of_a_checkout_but_not_of_one_around_it(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "inside").mkdir()
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "x")
    found = provenance.collect(tmp_path)["project"]
    assert len(found["commit"]) == 40
    assert found["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert provenance.collect(tmp_path)["project"]["dirty"] is True
    assert provenance.collect(tmp_path / "inside")["project"] is None
    assert provenance.collect(tmp_path / "missing")["project"] is None

"""What an engine needs around it: said by name, with the line that brings it, before anything is loaded."""

from __future__ import annotations

import importlib.util

import pytest

from harness.errors import UsageError
from harness.vllm.boot import boot_vllm
from harness.vllm.environment import require_ray, require_vllm


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == missing else found(name, *rest)
    )


def test_ray_is_asked_for_before_a_model_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "ray")
    with pytest.raises(UsageError, match=r'"ray" needs Ray, which is not installed here: pip install ray'):
        boot_vllm("no such model", tensor_parallel_size=2, distributed_executor_backend="ray")


def test_what_is_there_is_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    require_vllm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    require_ray()


def test_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm")
    with pytest.raises(UsageError, match=r"vLLM is not installed in this environment: `nox -s env`"):
        require_vllm()

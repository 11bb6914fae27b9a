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


@pytest.mark.parametrize(
    "argument",
    [
        {"speculative_config": {"method": "ngram"}},
        {"enable_dbo": True},
        {"kv_transfer_config": {"kv_connector": "any"}},
        {"data_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"enable_prefix_caching": True},
        {"worker_extension_cls": "some.Class"},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_what_taps_cannot_serve_is_refused_before_a_model_is_fetched(argument: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=rf"^{next(iter(argument))}.* cannot be used here"):
        boot_vllm("no such model", **argument)  # type: ignore[arg-type]


def test_sizes_of_one_are_nothing_to_refuse() -> None:
    sizes = {"data_parallel_size": 1, "prefill_context_parallel_size": 1, "enable_dbo": False}
    with pytest.raises(UsageError, match="no such model"):
        boot_vllm("no such model", **sizes)  # type: ignore[arg-type]


def test_what_is_there_is_not_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    require_vllm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: object())
    require_ray()


def test_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm")
    with pytest.raises(UsageError, match=r"vLLM is not installed in this environment: `nox -s env`"):
        require_vllm()

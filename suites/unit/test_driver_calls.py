"""Calls between the driver and its workers: errors, interruptions, and engines that plain vLLM was asked for."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

from harness.errors import CaptureError, UsageError
from harness.vllm import internals
from harness.vllm.boot import _context_limit
from harness.vllm.driver import VLLMDriver
from harness.vllm.layout import Layout, Place, _check_replicas
from harness.vllm.worker_extension import TLWorkerExtension


class Worker(TLWorkerExtension):
    """Of one rank; what it is told to do it notes."""

    def __init__(self, rank: int) -> None:
        self.rank, self.told = rank, []

    def tl_give(self, number: int) -> int:
        self.told.append(number)
        return number + self.rank

    def tl_fail(self, error: BaseException) -> int:
        self.told.append(error)
        if self.rank == 0:
            raise error
        return self.rank


class Engine:
    """Two ranks, asked as vLLM's executor asks them: it stops reading at the first that raises."""

    def __init__(self) -> None:
        self.ranks = [Worker(0), Worker(1)]

    def collective_rpc(self, method, args=()):
        return [getattr(rank, method)(*args) for rank in self.ranks]


def test_every_rank_answers_even_if_one_raises(capfd):
    llm = Engine()
    assert internals.call_workers(llm, "tl_give", args=(5,)) == [5, 6]
    with pytest.raises(CaptureError, match=r"^rows were never captured$"):
        internals.call_workers(llm, "tl_fail", args=(CaptureError("rows were never captured"),))
    with pytest.raises(UsageError, match=r"^no such op$"):
        internals.call_workers(llm, "tl_fail", args=(UsageError("no such op"),))
    assert capfd.readouterr().err == ""
    with pytest.raises(CaptureError, match=r"^tl_fail: KeyError: 'x'$"):
        internals.call_workers(llm, "tl_fail", args=(KeyError("x"),))
    assert "Traceback" in capfd.readouterr().err, (
        "of what nobody raised on purpose the worker's log has the way"
    )
    assert [len(rank.told) for rank in llm.ranks] == [4, 4]
    assert internals.call_workers(llm, "tl_give", args=(7,)) == [7, 8]


@pytest.fixture
def driver(monkeypatch):
    """With as much of a driver as calls need; what it sends is in ``sent``."""
    made = VLLMDriver.__new__(VLLMDriver)
    made.llm, made._closed, made._owed = None, False, {}
    made.sent = []
    monkeypatch.setattr(internals, "call_workers", lambda _llm, method, **_: made.sent.append(method))
    return made


def test_a_call_that_was_interrupted_is_cleaned_up_by_the_next(driver):
    """Ctrl-C reaches an engine in a process of its own too, which may be ending: nothing is asked of it then."""
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), driver._armed(["embed.hook_out"]):
            raise kind
    assert driver.sent == ["tl_reset_capture_flags"] * 2
    driver._alive()
    driver._alive()
    assert driver.sent[2:] == ["tl_reset_accumulators"]


def test_a_call_that_failed_is_cleaned_up_and_keeps_its_own_error(driver, monkeypatch):
    with pytest.raises(CaptureError, match="mine"), driver._armed(["embed.hook_out"]):
        raise CaptureError("mine")
    assert driver.sent == ["tl_reset_capture_flags", "tl_reset_accumulators"]

    def gone(*_, **__):
        raise RuntimeError("the engine is gone")

    monkeypatch.setattr(internals, "call_workers", gone)
    with pytest.raises(CaptureError, match="mine"), driver._and_then("tl_reset_accumulators"):
        raise CaptureError("mine")
    with pytest.raises(RuntimeError, match="gone"), driver._and_then("tl_reset_accumulators"):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"speculative_config": object()}, "speculative_config cannot be used"),
        (
            {"cache_config": SimpleNamespace(enable_prefix_caching=True)},
            "enable_prefix_caching=False is needed",
        ),
        ({"parallel_config": SimpleNamespace(enable_dbo=True)}, "enable_dbo cannot be used"),
        ({"kv_transfer_config": object()}, "kv_transfer_config cannot be used"),
        ({"parallel_config": SimpleNamespace(data_parallel_size=2)}, "data_parallel_size cannot be used"),
        (
            {"parallel_config": SimpleNamespace(prefill_context_parallel_size=2)},
            "prefill_context_parallel_size cannot be used",
        ),
    ],
)
def test_an_engine_of_plain_vllm_whose_rows_could_not_be_told_is_refused(changed, message):
    sound = {
        "speculative_config": None,
        "cache_config": SimpleNamespace(enable_prefix_caching=False),
        "parallel_config": SimpleNamespace(
            enable_dbo=False, data_parallel_size=1, prefill_context_parallel_size=1
        ),
    }
    internals.refuse_engine(SimpleNamespace(vllm_config=SimpleNamespace(**sound)))
    with pytest.raises(UsageError, match=message):
        internals.refuse_engine(SimpleNamespace(vllm_config=SimpleNamespace(**{**sound, **changed})))


@pytest.mark.parametrize(
    ("ours", "theirs", "agree"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([math.inf, 2.0], [math.inf, 2.0 + 1e-5], True),
        ([math.inf, 2.0], [math.inf, 2.001], False),
        ([math.inf, 2.0], [3e38, 2.0], False),
        ([math.inf, 2.0], [-math.inf, 2.0], False),
        ([3e38, 2.0], [math.inf, 2.0], False),
        ([math.nan, 2.0], [math.nan, 2.0], True),
        ([math.nan, 2.0], [1.0, 2.0], False),
        ([1.0, 2.0], [math.nan, 2.0], False),
    ],
)
def test_replicas_that_overflow_alike_agree(ours, theirs, agree):
    layout = Layout([Place(0, 0), Place(0, 1)])
    captured = [{"a": {"embed.hook_out": torch.tensor([one])}} for one in (ours, theirs)]
    with contextlib.nullcontext() if agree else pytest.raises(CaptureError, match="replicas differ"):
        _check_replicas(layout, "embed.hook_out", [0, 1], captured)


def test_longrope_keeps_to_its_short_factors():
    """Beyond, vLLM takes the long ones for every prompt, transformers for long prompts alone."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    long = SimpleNamespace(max_position_embeddings=131072, rope_parameters=rope)
    older = SimpleNamespace(
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "longrope"},
        original_max_position_embeddings=4096,
    )
    for config in (long, older):
        assert _context_limit(config, None) == 4096
        assert _context_limit(config, 4096) == 4096
        with pytest.raises(
            UsageError, match=r"max_model_len=4097 exceeds the 4096 positions .* short longrope"
        ):
            _context_limit(config, 4097)
    plain = SimpleNamespace(max_position_embeddings=2048, rope_parameters={"rope_type": "default"})
    assert _context_limit(plain, None) == 2048

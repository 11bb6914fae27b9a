"""Engines are supervised: one that dies or hangs costs its own call, leaves nothing behind, and can be booted again."""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest

from harness.errors import EngineError, UsageError
from harness.prompts import of_length

only_one = pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), modes=("eager",), smoke={"dtypes": ("fp32",)}
)


def _gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@only_one
def test_a_killed_engine_costs_its_own_call(parity):
    """SIGKILL between two calls: a clear error with the signal and the log, then a fresh engine that is right."""
    prompts = [of_length(parity, 12)]
    before = parity.forward(prompts)
    engine = parity.engine
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"SIGKILL[\s\S]*last lines of"):
        engine.forward(prompts, capture=["embed.hook_out"])
    assert _gone(engine.pid)
    again = parity.forward(prompts)
    assert parity.engine.pid != engine.pid
    parity.check(prompts, again)
    parity.bit_equal(
        list(again.captured.values()), list(before.captured.values()), label="rebooted", what="captures"
    )


@only_one
def test_a_hung_engine_is_killed(parity):
    """A call that does not come back in time: the process group is killed, and the error says how long it waited."""
    with parity.spare_engine() as engine:
        engine.forward([of_length(parity, 5)], capture=[])
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match=r"did not finish forward within 2 s and was killed"):
            engine.request("forward", 2.0, input_ids=[[5, 6]], capture=[])
        assert _gone(engine.pid)


@only_one
def test_bad_input_is_refused_and_costs_nothing(parity):
    """Prompts and hooks that cannot be served are named; the engine goes on as if nothing had been asked."""
    prompts = [of_length(parity, 12)]
    before = parity.forward(prompts)
    refusals = [
        (lambda: parity.forward([[]]), r"prompt 0 is empty"),
        (lambda: parity.forward([]), r"no prompts"),
        (
            lambda: parity.forward([[5, parity.vocab_size]]),
            r"token id \d+ at position 1, outside the vocabulary",
        ),
        (lambda: parity.forward([[5] * 400]), r"prompt 0 has 400 tokens .*max_model_len is 320"),
        (
            lambda: parity.forward(prompts, capture=["blocks.0.hook_outt"]),
            r"did you mean 'blocks\.0\.hook_out'",
        ),
        (lambda: parity.forward(prompts, capture=["blocks.0.attn.hook_q"]), r"known but cannot fire"),
        (lambda: parity.forward(prompts, max_new_tokens=0), r"max_new_tokens must be an integer from 1"),
    ]
    for call, message in refusals:
        with pytest.raises(UsageError, match=message):
            call()
    parity.bit_equal(
        list(parity.forward(prompts).captured.values()),
        list(before.captured.values()),
        label="after refusals",
        what="captures after seven refused calls",
    )


@only_one
def test_through_the_other_rpc_path(parity):
    """The worker in a process of its own, reached over vLLM's wire, gives the same bits as in the engine's process."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((70, 3))]
    inside = parity.forward(prompts, max_new_tokens=3)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with parity.spare_engine(environment=environment) as engine:
        outside = engine.forward(prompts, capture=engine.supported_hook_points, max_new_tokens=3)
        children = psutil.Process(engine.pid).children(recursive=True)
        assert children, "nothing was started beside the engine's process: the wire was not tried"
    parity.bit_equal(
        list(outside.captured.values()),
        list(inside.captured.values()),
        label="other RPC path",
        what="captures of a worker in its own process",
    )
    assert all(_gone(child.pid) for child in children)

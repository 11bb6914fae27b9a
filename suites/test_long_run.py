"""One engine and calls at random, one after the other, for long: values do not drift, and nothing is held on to.

Every hundred calls the same one comes again, and every bit of it must be what it was the first time; the call before it
is judged by the reference, and what the engine's process holds is read.
"""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from suites.draws import Calls
from suites.trial import expect_red

MIB = 2**20
#: Calls after the first.
CALLS = 2000
#: Between repeats of the first call.
ROUND = 100
#: Calls in which allocators settle: 2,000 calls were seen to grow by 16.4, 0.5, 0.2 and 0.2 MiB in each five hundred.
SETTLING = 500
#: What the process may grow by after that, however many calls: one page a call would be 6 MiB in 1,500.
GROWTH = 4 * MIB
#: Files, pipes and sockets that may come and go.
HANDLES = 4

on_one = pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)


def held(parity):
    """Bytes resident and handles open in the engine's process, which is where an engine of one rank computes."""
    return parity.engine.memory()["resident"], psutil.Process(parity.engine.pid).num_fds()


def run(parity, call, capture):
    """A call, edited, and what it was captured at; each request has the rows that it must have."""
    specs = call.specs if any(call.specs) else None
    result = parity.forward(call.prompts, capture=capture, intervene=specs, max_new_tokens=call.steps)
    assert list(result.captured) == list(capture)
    assert result.lengths == [len(prompt) + call.steps - 1 for prompt in call.prompts]
    return result


def judge(parity, call, label):
    """The same call again, between two clean ones, by the reference."""
    parity.check_edits(call.prompts, call.specs, max_new_tokens=call.steps, label=label, must_bite=False)


def live(parity, count, each=ROUND, settling=ROUND):
    """``count`` calls after a first, in rounds; see the top of this file. Growth counts after so many calls."""
    calls = Calls(parity, most=3, longest=80)
    same, pick = calls.of(0), random.Random("captures")
    first = run(parity, same, parity.hook_points)
    judge(parity, same, "first call")
    kept = {name: rows.clone() for name, rows in first.captured.items()}
    memory, handles, seconds = [], [], []
    for number in range(1, count + 1):
        last = number % each == 0
        hooks = parity.hook_points
        some = hooks if last else [hook for hook in hooks if pick.random() < 0.4]
        call = calls.of(number)
        result = run(parity, call, some)
        seconds.append(result.stats["seconds"])
        if not last:
            continue
        judge(parity, call, f"call {number}")
        again = run(parity, same, hooks)
        assert again.new_tokens == first.new_tokens
        moved = [name for name in hooks if not _same_bits(again.captured[name], kept[name])]
        assert not moved, f"after {number} calls the first one reads other bits at {', '.join(moved)}"
        resident, open_ = held(parity)
        memory.append(resident)
        handles.append(open_)
    grown = memory[-1] - memory[settling // each - 1]
    parity.note(
        f"{count} calls",
        repeats=len(memory),
        claim="each repeat equal in every bit",
        resident=memory,
        grown=grown,
        target=GROWTH,
        handles=handles,
        seconds_first=_median(seconds[:each]),
        seconds_last=_median(seconds[-each:]),
    )
    assert grown <= GROWTH, f"{grown / MIB:.1f} MiB in {count - settling} calls"
    assert handles[-1] - handles[0] <= HANDLES, f"handles open: {handles}"


def _same_bits(a, b):
    return torch.equal(*(one.contiguous().view(torch.uint8) for one in (a, b)))


def _median(values):
    return sorted(values)[len(values) // 2]


@pytest.mark.slow
@on_one
def test_a_long_life(parity):
    """Two thousand calls at random: the same bits, right ones, and no growth."""
    live(parity, CALLS, settling=SETTLING)


def long_enough_to_leak(parity):
    """As long as it takes for captures that are kept to show."""
    live(parity, 300)


def long_enough_to_tire(parity):
    """As long as it takes for the planted worker to change its mind."""
    live(parity, 40, each=20, settling=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [
        ("budgets.Leaky", long_enough_to_leak, r"MiB in 200 calls"),
        (
            "workers.Tires",
            long_enough_to_tire,
            r"after 40 calls the first one reads other bits at .*blocks\.1",
        ),
    ],
)
@on_one
def test_an_engine_that_ages_is_caught(parity, fault, check, says):
    """Captures that are never let go, and values that are off in their last bit after a while."""
    expect_red(parity, fault, check, says, errors=(AssertionError,))

"""Generation: the engine's tokens are the reference's wherever noise cannot decide, and every computed row is right.

Queues, stops and preemption change which rows are computed when; none of it may change what they hold.
"""

from __future__ import annotations

import pytest

from harness.logit_check import greedy_problems
from harness.prompts import of_length
from harness.reference.run import teacher_forced
from suites.edits import randn

many = pytest.mark.parity(backends=("vllm",), smoke={"models": ("tiny-llama",)})
on_vllm = pytest.mark.parity(backends=("vllm",))
tiny_eager = pytest.mark.parity(models=("tiny-llama",), backends=("vllm",), modes=("eager",))


def _check(parity, prompts, result, label):
    """Rows and tokens of a generated batch."""
    # Tokens first: the reference's realisations with logits serve the rows too, the other way round they would not.
    problems = greedy_problems(parity, prompts, result.new_tokens, label=f"{label}: tokens")
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    parity.check(prompts, result, label=label)


def test_greedy_tokens(parity):
    """Eight greedy tokens each: the reference's own wherever its margin exceeds the noise, teacher-forced otherwise."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((12, 5, 20))]
    result = parity.forward(prompts, max_new_tokens=8)
    assert [len(tokens) for tokens in result.new_tokens] == [8, 8, 8]
    assert result.lengths == [len(prompt) + 7 for prompt in prompts]
    _check(parity, prompts, result, "eight tokens")


@on_vllm
def test_stop_tokens(parity):
    """A request ends at a stop token, keeps it, and has just the rows that were computed; the others go on."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((12, 5))]
    whole = parity.forward(prompts, max_new_tokens=6)
    stop = whole.new_tokens[0][2]
    first = [tokens.index(stop) + 1 if stop in tokens else 6 for tokens in whole.new_tokens]
    result = parity.forward(prompts, max_new_tokens=6, stop_token_ids=[stop])
    assert result.new_tokens == [tokens[:n] for tokens, n in zip(whole.new_tokens, first, strict=True)]
    assert result.lengths == [len(prompt) + n - 1 for prompt, n in zip(prompts, first, strict=True)]
    _check(parity, prompts, result, "stopped")


@many
def test_more_requests_than_run_at_once(parity):
    """Forty short prompts on an engine that runs sixteen at a time: those that wait get their own rows too."""
    prompts = [of_length(parity, 2 + i % 5, seed=i) for i in range(40)]
    result = parity.forward(prompts, max_new_tokens=2)
    _check(parity, prompts, result, "forty requests")


@many
def test_staggered_arrivals(parity):
    """Lengths and limits that make requests end at different steps while others begin: one batch, no order in it."""
    prompts = [of_length(parity, 1 + (7 * i) % 60, seed=i) for i in range(20)]
    result = parity.forward(prompts, max_new_tokens=5)
    _check(parity, prompts, result, "staggered")


@tiny_eager
def test_preemption(parity):
    """A KV cache too small for all: requests are thrown out and computed again, and their rows are still right."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((100, 90, 110, 95))]
    # Blocks hold 128 positions: four for prompts that need eight in the end (and one that vLLM keeps for itself).
    with parity.spare_engine(num_gpu_blocks_override=5) as engine:
        result = engine.forward(prompts, capture=parity.hook_points, max_new_tokens=48)
    assert result.stats["recomputed_rows"] > 0, "nothing was preempted: the case shows nothing"
    parity.note("preemption", recomputed_rows=result.stats["recomputed_rows"], steps=result.stats["steps"])
    _check(parity, prompts, result, "preempted")
    assert result.lengths == [len(ids) for ids in teacher_forced(prompts, result.new_tokens)]


@tiny_eager
def test_preemption_of_edited_requests(parity):
    """Requests thrown out and computed again are edited again: every row, and what is decoded after it."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((100, 90, 110, 95))]
    edit = {"op": "add", "value": randn(5, parity.width, 0.5)}
    specs = [{"blocks.1.hook_out": edit}, None, {"embed.hook_out": {**edit, "pos": [3, 60, 120]}}, None]
    with parity.spare_engine(num_gpu_blocks_override=5) as engine:
        result = engine.forward(prompts, capture=parity.hook_points, intervene=specs, max_new_tokens=48)
    assert result.stats["recomputed_rows"] > 0, "nothing was preempted: the case shows nothing"
    edits = parity.edits(specs, result.lengths)
    problems = greedy_problems(parity, prompts, result.new_tokens, label="tokens", edits=edits)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    parity.check(prompts, result, label="edited and preempted", edits=edits)

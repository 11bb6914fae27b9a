"""Every activation captured inside the engine equals the reference's, hook by hook and row by row.

Each case runs one call on an engine with 64-token steps (in the ``smoke`` profile) and compares all points of all
rows with Hugging Face, by the rule of ``harness.parity.verdict``.
"""

from __future__ import annotations

import pytest

from harness.prompts import ENGLISH, PARAGRAPHS, UNICODE, of_length

RAGGED = (33, 1, 120, 7)


@pytest.mark.parametrize("n", [1, 7, 33, 200])
def test_prompt_length(parity, n):
    """A prompt of one token, of a few, and one that takes several steps."""
    prompts = [of_length(parity, n)]
    parity.check(prompts, parity.forward(prompts))


@pytest.mark.parity(needs=("chunking",))
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_around_the_step_limit(parity, offset):
    """A prompt of exactly as many tokens as one step takes, one fewer, one more."""
    n = parity.step + offset
    prompts = [of_length(parity, n, seed=offset + 1)]
    parity.check(prompts, parity.forward(prompts))


def test_ragged_batch(parity):
    """A batch of different lengths, chunks and short prompts sharing steps, and the same batch permuted."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate(RAGGED)]
    parity.check(prompts, parity.forward(prompts), label="batch")
    order = [2, 0, 3, 1]
    permuted = [prompts[i] for i in order]
    parity.check(permuted, parity.forward(permuted), label="permuted batch")


def test_same_prompt_twice(parity):
    """The same prompt twice in one batch: neither request gets the other's rows, and both are right."""
    prompt = of_length(parity, 40)
    other = of_length(parity, 40, seed=5)
    prompts = [prompt, other, prompt]
    result = parity.forward(prompts)
    parity.check(prompts, result)


def test_decode_steps(parity):
    """Rows computed at decode steps, one token at a time, equal one long teacher-forced forward."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((5, 70, 1))]
    result = parity.forward(prompts, max_new_tokens=4)
    assert result.lengths == [len(prompt) + 3 for prompt in prompts]
    parity.check(prompts, result)


def test_decode_leaves_the_prompt_alone(parity):
    """Captures of the prompt's rows are the same bits whether one token or four are generated."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 66))]
    once, longer = parity.forward(prompts), parity.forward(prompts, max_new_tokens=4)
    names = list(once.captured)
    parity.bit_equal(
        [longer.rows(name, i)[: len(prompt)] for name in names for i, prompt in enumerate(prompts)],
        [once.rows(name, i) for name in names for i in range(len(prompts))],
        label="prefill rows",
        what="prompt rows of a four-token call against a one-token call",
    )
    assert [tokens[0] for tokens in longer.new_tokens] == [tokens[0] for tokens in once.new_tokens]


def test_call_again(parity):
    """The same call again gives the same bits, with another call between them: nothing stale is ever served."""
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((30, 65))]
    first = parity.forward(prompts)
    parity.check(prompts, first, label="first call")
    kept = {name: tensor.clone() for name, tensor in first.captured.items()}
    between = [of_length(parity, 50, seed=9)]
    parity.check(between, parity.forward(between), label="the call between")
    again = parity.forward(prompts)
    parity.bit_equal(
        [again.captured[name] for name in kept],
        list(kept.values()),
        label="again",
        what="captures of a repeated call",
    )
    parity.bit_equal(
        [first.captured[name] for name in kept],
        list(kept.values()),
        label="kept",
        what="captures held while other calls ran",
    )


def test_only_what_is_asked_for(parity):
    """A subset of hooks gives the same bits as all of them, and nothing else."""
    prompts = [of_length(parity, 21)]
    everything = parity.forward(prompts)
    some = list(everything.captured)[1::5] or list(everything.captured)
    subset = parity.forward(prompts, capture=some)
    assert list(subset.captured) == some
    assert parity.forward(prompts, capture=()).captured == {}
    parity.bit_equal(
        [subset.captured[name] for name in some],
        [everything.captured[name] for name in some],
        label="subset",
        what="captures of a subset of hooks against all of them",
    )


@pytest.mark.parity(tokenizer=True)
def test_english_text(parity):
    """Real English paragraphs, as a batch, with a few generated tokens."""
    prompts = [[int(i) for i in parity.tokenizer(text)["input_ids"]] for text in (*PARAGRAPHS[:2], ENGLISH)]
    prompts = [ids[:220] for ids in prompts]
    result = parity.forward(prompts, max_new_tokens=3)
    parity.check(prompts, result)


@pytest.mark.parity(tokenizer=True)
def test_unicode_text(parity):
    """Scripts, emoji and combining marks: many rare, multi-token pieces."""
    prompts = [[int(i) for i in parity.tokenizer(UNICODE)["input_ids"]]]
    parity.check(prompts, parity.forward(prompts))

"""Token ids: every form a caller may give, and one clear refusal for each that no backend can serve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.tokens import check_prompts


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompts"),
        (torch.empty(0, 3, dtype=torch.int64), "no prompts"),
        ([[]], "prompt 0 is empty"),
        ([[1], []], "prompt 1 is empty"),
        (torch.empty(2, 0, dtype=torch.int64), "prompt 0 is empty"),
        ("hello", "input_ids is 'hello', not token ids"),
        (b"\x01\x02", "not token ids"),
        ({"input_ids": [[1]]}, "not token ids"),
        (5, "input_ids is 5, not token ids"),
        (None, "input_ids is None, not token ids"),
        (torch.tensor(5), "input_ids is 5, not token ids"),
        (["hello"], "prompt 0 is 'hello', not a list of token ids"),
        ([[1], "hello"], "prompt 1 is 'hello', not a list of token ids"),
        ([[1], 2], "prompt 1 is 2, not a list of token ids"),
        ([1, [2]], r"prompt 0 holds \[2\] at position 1; token ids are integers"),
        (torch.ones(1, 1, 2, dtype=torch.int64), r"prompt 0 holds \[1, 1\] at position 0"),
        ([["1"]], "prompt 0 holds '1' at position 0; token ids are integers"),
        ([[True]], "prompt 0 holds True at position 0; token ids are integers"),
        ([[1.0]], "prompt 0 holds 1.0 at position 0; token ids are integers"),
        (torch.ones(1, 2), "prompt 0 holds 1.0 at position 0; token ids are integers"),
        (torch.ones(1, 2, dtype=torch.bool), "prompt 0 holds True at position 0; token ids are integers"),
        ([[1], [2, 9]], "prompt 1 has token id 9 at position 1, outside the vocabulary of 9"),
        ([[-1]], "prompt 0 has token id -1 at position 0, outside the vocabulary of 9"),
        ([[1] * 8], "prompt 0 has 8 tokens and 1 new ones were asked for, but max_model_len is 8"),
    ],
)
def test_wrong_prompts_are_refused(prompts: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check_prompts(prompts, vocab_size=9, max_len=8, new_tokens=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given_as",
    [
        [1, 2],
        (1, 2),
        [[1, 2]],
        torch.tensor([1, 2]),
        torch.tensor([[1, 2]]),
        [torch.tensor([1, 2])],
        [torch.tensor(1), torch.tensor(2)],
        np.array([[1, 2]], dtype=np.int32),
        list(np.array([1, 2])),
        [list(np.array([1, 2]))],
    ],
)
def test_prompt_forms(given_as: Any) -> None:
    checked = check_prompts(given_as, vocab_size=9, max_len=8, new_tokens=1)
    assert checked == [[1, 2]]
    assert {type(token) for token in checked[0]} == {int}


def test_batches() -> None:
    assert check_prompts(torch.tensor([[1, 2], [3, 4]]), vocab_size=9, max_len=9) == [[1, 2], [3, 4]]
    ragged = [torch.tensor([1, 2]), [3], (4, 5, 6)]
    assert check_prompts(ragged, vocab_size=9, max_len=9) == [[1, 2], [3], [4, 5, 6]]


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=8), min_size=1, max_size=5), st.integers(0, 8)
)
def test_what_fits_comes_back_as_it_was(prompts: list[list[int]], new_tokens: int) -> None:
    room = max(map(len, prompts)) + new_tokens
    assert check_prompts(prompts, vocab_size=9, max_len=room, new_tokens=new_tokens) == prompts
    with pytest.raises(UsageError, match="tokens"):
        check_prompts(prompts, vocab_size=9, max_len=room - 1, new_tokens=new_tokens)


def test_a_limit_without_new_tokens_is_said_plainly() -> None:
    with pytest.raises(UsageError, match="prompt 0 has 4 tokens; at most 3 fit") as caught:
        check_prompts([[1, 2, 3, 4]], vocab_size=9, max_len=3)
    assert "new ones" not in str(caught.value)

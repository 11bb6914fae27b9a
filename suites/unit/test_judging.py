"""What a call gives back is held against what was asked, whoever gave it; and what counts as broken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from harness.capabilities import FULL
from harness.errors import CaptureError, EngineError
from harness.judging import Judged
from harness.pytest_plugin import _is_broken
from harness.results import ForwardResult

EMBED, LAST = "embed.hook_out", "blocks.0.hook_out"


class Asked(Judged):
    """Of an engine that gives what it was made with."""

    engine = SimpleNamespace()
    capabilities = FULL
    hook_points = (EMBED, LAST)

    def __init__(self, result: ForwardResult) -> None:
        self.config = SimpleNamespace(backend_name="mine")
        self.engine = SimpleNamespace(forward=lambda *_, **__: result)


def result(*hooks: str, prompts: int = 2) -> ForwardResult:
    captured = {hook: torch.zeros(prompts, 3, 4) for hook in hooks}
    return ForwardResult(captured, [3] * prompts, [[1]] * prompts)


def test_what_was_asked_for_is_handed_on():
    given = result(LAST, EMBED)
    assert Asked(given).forward([[5, 6, 7], [8, 9, 10]]) is given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (result(EMBED), r"mine was asked for 2 points of 2 prompts and gave 1 of 2; blocks.0.hook_out is"),
        (
            result(EMBED, LAST, "blocks.1.hook_out"),
            r"gave 3 of 2; blocks.1.hook_out is the first that differs",
        ),
        (result(EMBED, LAST, prompts=1), r"gave 2 of 1"),
    ],
)
def test_less_or_more_than_was_asked_for_is_no_result(given, message):
    with pytest.raises(CaptureError, match=message):
        Asked(given).forward([[5, 6, 7], [8, 9, 10]])


def test_a_failure_that_did_not_repeat_is_one_all_the_same():
    """Hypothesis raises a group: of what failed once and not again, or of two failures."""
    assert _is_broken(AssertionError())
    assert _is_broken(CaptureError())
    assert _is_broken(ExceptionGroup("flaky", [AssertionError()]))
    assert _is_broken(ExceptionGroup("two", [ValueError(), ExceptionGroup("in it", [CaptureError()])]))
    assert not _is_broken(ExceptionGroup("engines", [EngineError()]))
    assert not _is_broken(EngineError())
    assert not _is_broken(None)

"""Prompts: real text where a model has a tokenizer, seeded ids where it has none."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.subject import Subject

__all__ = ["ENGLISH", "PARAGRAPHS", "UNICODE", "calibration", "of_length"]

#: Written for this project: a few plain paragraphs, so that lengths up to 300 tokens are real text.
PARAGRAPHS = (
    "The capital of France is",
    (
        "The lighthouse keeper climbed the stairs every evening at six. He carried a lamp in one hand and a"
        " letter in the other, and he never told anyone who had written it. On stormy nights the beam swept"
        " across the black water, and the fishermen in the harbour counted the seconds between one flash "
        "and the next."
    ),
    (
        "To measure the height of a tower with a barometer, you could drop it from the roof and time the "
        "fall. You could also hang it on a long string and swing it like a pendulum. The simplest way, "
        "though, is to find the architect, and to say: here is a very good barometer, and it is yours if "
        "you tell me how tall the tower is. Students who give all three answers usually pass, although the "
        "examiner had hoped that one of them would mention the pressure of the air, which falls by about "
        "twelve pascals for each metre that you climb. A careful reader will notice that none of these "
        "methods is exact. The string stretches, the clock is read a little late, and architects round "
        "their numbers. What matters is to know how large each of these errors is, because only then can "
        "two answers that differ be told from two answers that agree. A thermometer that is always wrong by"
        " one degree is more useful than one that is wrong by a random amount, since the first can be "
        "corrected once and trusted for ever."
    ),
    (
        "In the spring the river rose by a metre and carried away the wooden bridge. Nobody was surprised, "
        "for the bridge had been old when the miller was young, and each winter had taken a plank or two. "
        "The village met in the schoolhouse and quarrelled until midnight about stone and iron, and about "
        "who should pay for either of them."
    ),
)
ENGLISH = " ".join(PARAGRAPHS[1:])
UNICODE = "Zürich, 東京 and Владивосток: naïve café 🦙🚀 — “quoted”, ½ + ¼ = ¾; e\u0301 ≠ é; نص عربي; \u200bzero width."


def of_length(subject: Subject, n: int, *, seed: int = 0) -> list[int]:
    """A prompt of exactly ``n`` tokens: English text cut to length, or seeded ids for a model with no tokenizer."""
    if subject.has_tokenizer:
        ids = [int(i) for i in subject.tokenizer(ENGLISH)["input_ids"]]
        begin = seed * 7 % max(1, len(ids) - n)
        if begin + n <= len(ids):
            return ids[begin : begin + n]
    rng = random.Random(f"{seed}-{n}")  # noqa: S311 - reproducible, not secret
    return [rng.randrange(3, min(subject.vocab_size, 49152)) for _ in range(n)]


def calibration(subject: Subject) -> list[list[int]]:
    """What the reference's own noise is measured on: 160 tokens, enough rows that their mean is no accident."""
    return [of_length(subject, 120, seed=11), of_length(subject, 40, seed=12)]

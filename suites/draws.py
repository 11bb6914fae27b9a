"""Calls made up by seed: prompts of which lengths and contents, in which order, new tokens, edits."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from harness.prompts import of_length
from suites.edits import OPS, Sizes

#: Longest prompt: three steps of 64 and a bit, and room for new tokens.
LONGEST = 200
#: Where a row of logits is fifty thousand numbers.
LONGEST_LARGE = 40


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        prompts: token ids.
        steps: new tokens.
        specs: one set of edits per prompt; empty ones among them.
        order: another order of the prompts.
    """

    prompts: list[list[int]]
    steps: int
    specs: list[dict[str, Any]]
    order: list[int]

    @property
    def reordered(self) -> list[list[int]]:
        """The prompts in the other order."""
        return [self.prompts[i] for i in self.order]

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of it."""
        return {
            "prompt_lengths": [len(prompt) for prompt in self.prompts],
            "new_tokens": self.steps,
            "edits": sum(map(len, self.specs)),
            "order": self.order,
        }


class Calls:
    """Makes calls for one engine.

    Args:
        parity: the engine.
        most: prompts of one call.
        longest: tokens of one prompt; by default what a draw can afford.
    """

    def __init__(self, parity, *, most: int = 6, longest: int | None = None) -> None:
        self._parity = parity
        self._sizes = Sizes(parity)
        self._most = most
        self._longest = longest or (LONGEST_LARGE if parity.vocab_size > 10_000 else LONGEST)

    def of(self, seed: int) -> Call:
        """The call of a seed."""
        pick = random.Random(f"call-{seed}")
        steps = pick.choice((1, 1, 2, 4))
        # Short prompts are as likely as long ones, and so is one around the step limit, where there is room for it.
        lengths = [
            min(round(self._longest ** pick.random()), self._longest)
            for _ in range(pick.randint(1, self._most))
        ]
        if pick.random() < 0.3:
            lengths[0] = min(self._parity.step + pick.randint(-1, 1), self._longest)
        prompts = [self._prompt(pick, n) for n in lengths]
        specs = [self._edits(pick, n + steps - 1) for n in lengths]
        return Call(prompts, steps, specs, pick.sample(range(len(prompts)), len(prompts)))

    def _prompt(self, pick: random.Random, n: int) -> list[int]:
        """Real text in half of the cases where there is a tokenizer, and else ids at random."""
        if pick.random() < 0.5:
            return of_length(self._parity, n, seed=pick.randrange(1000))
        return [pick.randrange(3, self._parity.vocab_size) for _ in range(n)]

    def _edits(self, pick: random.Random, rows: int) -> dict[str, Any]:
        """Up to two edits at different hooks: with six prompts there is room for all their combinations."""
        found = {}
        for hook in pick.sample(self._parity.hook_points, pick.choice((0, 1, 1, 2))):
            make = pick.choice(OPS)
            spec = make(self._sizes.of(hook), self._parity.geometry.row_width(hook))
            pos = pick.choice((None, pick.randrange(rows), sorted({pick.randrange(rows) for _ in range(4)})))
            found[hook] = spec if pos is None else {**spec, "pos": pos}
        return found

"""The whole investigation of one call: is it wrong again, where, in which request and row, and under which settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.bisect.bench import Bench, Call
from harness.bisect.search import Search, fewest
from harness.bisect.stages import LOGITS, after, stages_of
from harness.errors import CaptureError
from harness.parity.types import RowRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from harness.bisect.bench import Reading
    from harness.bisect.search import Found, Site
    from harness.check import Parity

__all__ = ["COMPUTED", "DRIFT", "READ", "REFUSED", "SOUND", "Narrowed", "Result", "investigate"]

#: What may come out: nothing is wrong; something is computed wrong; values are right and read wrong; only the sum of
#: small errors is wrong; the engine contradicts itself before anything is compared.
SOUND, COMPUTED, READ, DRIFT, REFUSED = "sound", "computed", "read", "drift", "refused"


@dataclass(frozen=True)
class Narrowed:
    """What of the call the failure needs.

    Attributes:
        row: the row that is wrong, counted in the call as it was.
        failing: requests with a wrong row.
        disturbed: whether it takes another call before this one.
        beside: other requests that have to be in the batch; None: that was not tried.
        cut: whether the prompt up to the wrong row and nothing more fails too; None: that was not tried.
        unedited: whether it fails without its edits, which it has; None: it has none.
        call: the smallest call found that fails, and the wrong row in it.
    """

    row: RowRef
    failing: tuple[int, ...]
    disturbed: bool
    beside: tuple[int, ...] | None
    cut: bool | None
    unedited: bool | None
    call: tuple[Call, RowRef]


@dataclass
class Result:
    """What an investigation found.

    Attributes:
        kind: one of the constants of this module.
        found: what the search found; None where there was nothing to search.
        readings: what every probe read, point → reading, by the points at which the truth was put in.
        stays: of values that are read wrong: whether what is set there reads back wrong, too.
        narrowed: None where nothing is wrong.
        runs: of the call, of all benches.
        error: the engine's own, where it refused.
        about: kind of the comparison that failed, see :class:`harness.artifacts.Evidence`.
    """

    kind: str
    found: Found | None = None
    readings: dict[tuple[str, ...], Mapping[str, Reading]] = field(default_factory=dict)
    stays: bool = False
    narrowed: Narrowed | None = None
    runs: int = 0
    error: str = ""
    about: str = "values"
    bench: Bench | None = None

    @property
    def site(self) -> Site | None:
        """The first point that is wrong by itself."""
        return next((site for _, site in self.found.wrong), None) if self.found else None


def investigate(parity: Parity, call: Call, say: Callable[[str], None] = lambda _: None) -> Result:
    """Run a call, look for what is wrong by itself in it, and for what of it the failure needs.

    Args:
        parity: an engine that serves every point and has room for one more edit per request, and its reference.
        call: what failed.
        say: told about each step in one line.

    Raises:
        EngineError: the engine died.
    """
    try:
        bench = _failing_bench(parity, call, say)
    except CaptureError as error:
        return Result(REFUSED, error=str(error))
    if bench is None:
        return Result(SOUND, runs=3)
    result = _searched(bench, say)
    result.narrowed = _narrowed(bench, say)
    return result


def _failing_bench(parity: Parity, call: Call, say: Callable[[str], None]) -> Bench | None:
    """A bench on which the call fails: as it is, or only with another call before it."""
    for disturbed in (False, True):
        bench = Bench(parity, call, disturbed=disturbed)
        if bench.rows:
            rows = ", ".join(f"request {row.request} position {row.position}" for row in bench.rows)
            after = " after another call" if disturbed else ""
            say(f"wrong{after} at {rows}")
            return bench
        say("right, after another call, too" if disturbed else "right as it is")
    return None


def _searched(bench: Bench, say: Callable[[str], None]) -> Result:
    readings: dict[tuple[str, ...], Mapping[str, Reading]] = {}

    def probe(healed: tuple[str, ...]) -> dict[str, float]:
        readings[healed] = bench.readings(healed)
        shares = {hook: reading.share for hook, reading in readings[healed].items()}
        if healed:
            wrong = next((h for h in after(healed, bench.judged) if not shares[h] <= 1), None)
            what = f"{wrong} is still wrong" if wrong else "everything after it heals"
            say(f"the truth put in at {' and '.join(healed)}: {what}")
        return shares

    search = Search(stages_of(bench.judged, bench.fixed), probe, bench.fixed)
    kind, stays = COMPUTED, False
    if bench.own_logits_are_right():
        say("the engine's own logits are right")
        misread, stays = _misread(search)
        kind = READ if misread else COMPUTED
    if kind == READ:
        found = _plain_only(search)
    else:
        found = search.run()
        if found.first is None:
            kind = DRIFT  # every row keeps its own bound, and together they do not
        elif not found.wrong:
            kind = DRIFT
    return Result(kind, found, readings, stays=stays, runs=bench.runs, bench=bench)


def _misread(search: Search) -> tuple[bool, bool]:
    """Whether the first wrong point is read wrong where its value is right, and whether what is set there stays wrong.

    What comes out of the engine is right, so either the value there is right and what reads it is broken, or the value
    is a little wrong and nothing after shows it. Put the truth in: in the second case it reads back, and nothing
    becomes worse.
    """
    plain = search.shares()
    first = search.wrong(plain)
    if first is None or first in search.fixed:
        return first == LOGITS, False
    put = search.shares(first)
    stays = not put[first] <= 1
    broken = any(not put[hook] <= 1 for hook, share in plain.items() if share <= 1)
    return stays or broken, stays


def _plain_only(search: Search) -> Found:
    from harness.bisect.search import Found, Probed

    first = search.wrong(search.shares())
    return Found(first, probes=tuple(Probed(healed, shares) for healed, shares in search.probes.items()))


def _narrowed(bench: Bench, say: Callable[[str], None]) -> Narrowed:
    """Leave out what the failure does not need: other requests, later tokens, edits."""
    call, row = bench.call, bench.rows[0]
    smallest = (call, row)

    def found(smaller: Call, at: RowRef) -> RowRef | None:
        """The first wrong row of the request: with fewer requests chunks begin elsewhere, and so may the fault."""
        try:
            return Bench(bench.parity, smaller, disturbed=bench.disturbed).first_wrong(at.request)
        except CaptureError:
            return None  # another failure than the one that is looked for

    def fails(smaller: Call, at: RowRef) -> bool:
        try:
            one = Bench(bench.parity, smaller, disturbed=bench.disturbed, rows=[at])
            return any(not reading.share <= 1 for reading in one.readings().values())
        except CaptureError:
            return False

    others = [i for i in range(len(call.prompts)) if i != row.request]
    beside: tuple[int, ...] | None = None
    if others:
        beside = tuple(fewest(others, lambda some: found(*_with(call, row, some)) is not None))
        if len(beside) < len(others):
            fewer, at = _with(call, row, beside)
            smallest = (fewer, found(fewer, at) or at)
        say(f"needs {_requests(beside)} beside it" if beside else "fails alone")
    cut: bool | None = None
    if (shorter := _cut(*smallest)) is not None:
        cut = fails(*shorter)
        smallest = shorter if cut else smallest
        say(f"fails with the prompt {'cut' if cut else 'whole and not cut'} to the wrong row")
    unedited: bool | None = None
    if call.intervene is not None:
        plain = Call(smallest[0].prompts, smallest[0].new_tokens)
        unedited = fails(plain, smallest[1])
        smallest = (plain, smallest[1]) if unedited else smallest
        say(f"{'fails' if unedited else 'is right'} without its edits")
    failing = tuple(bench.failing_requests)
    return Narrowed(row, failing, bench.disturbed, beside, cut, unedited, smallest)


def _with(call: Call, row: RowRef, others: Sequence[int]) -> tuple[Call, RowRef]:
    """The request of ``row`` and these others, in the order they had."""
    kept = sorted([row.request, *others])
    return call.only(kept), RowRef(kept.index(row.request), row.position)


def _cut(call: Call, row: RowRef) -> tuple[Call, RowRef] | None:
    """The same with nothing after the row in its request; None where nothing comes after it, or edits do."""
    prompt = call.prompts[row.request]
    end = row.position + 1
    steps = max(1, end - len(prompt) + 1)
    if end >= len(prompt) and steps == call.new_tokens:
        return None
    if any(_reaches(spec, end) for spec in call.specs(row.request).values()):
        return None
    prompts = (*call.prompts[: row.request], prompt[:end], *call.prompts[row.request + 1 :])
    if steps > 1 or len(prompts) == 1 or call.new_tokens == 1:
        return Call(prompts, steps, call.intervene), row
    return Call(prompts, call.new_tokens, call.intervene), row


def _reaches(spec: Mapping[str, Any], end: int) -> bool:
    pos = spec.get("pos")
    return pos is not None and max([pos] if isinstance(pos, int) else pos, default=0) >= end


def _requests(numbers: Sequence[int]) -> str:
    return ("request " if len(numbers) == 1 else "requests ") + ", ".join(map(str, numbers))


def finite(value: float) -> float | None:
    """For JSON, which has no infinities."""
    return value if math.isfinite(value) else None

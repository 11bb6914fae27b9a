"""Which case of one run is which of another: the same id, but for what is asked to differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from harness.errors import UsageError
from harness.history.reading import run_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store import CaseResult, RunRecords

__all__ = ["ACROSS", "Across", "Pair", "Pairs", "engine_keys", "pair_cases"]

#: What cases may differ in and still be paired.
ACROSS = ("mode", "dtype", "topology", "backend")
#: In this order in the name of an engine, after the model.
_NAMED = ("dtype", "mode", "topology")


@dataclass(frozen=True)
class Across:
    """A label in which paired cases may differ.

    Attributes:
        before, after: take only cases with this value, of the first and of the second run; empty takes all.
    """

    name: str
    before: str = ""
    after: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``mode`` or ``mode=eager:compiled``.

        Raises:
            UsageError: another name, or one value where there must be two.
        """
        name, _, values = text.partition("=")
        before, _, after = values.partition(":")
        if name not in ACROSS:
            msg = f"--across {text!r}: cases can be paired across {', '.join(ACROSS)}, not {name!r}"
            raise UsageError(msg)
        if "=" in text and not (before and after):
            msg = f"--across {text!r} needs a value for each run, as {name}=FIRST:SECOND"
            raise UsageError(msg)
        return cls(name, before, after)


@dataclass(frozen=True)
class Pair:
    """A case as it was in either run."""

    key: str
    before: CaseResult
    after: CaseResult


@dataclass(frozen=True)
class Pairs:
    """The cases of two runs."""

    both: tuple[Pair, ...]
    only_before: tuple[CaseResult, ...]
    only_after: tuple[CaseResult, ...]


def pair_cases(before: RunRecords, after: RunRecords, across: Sequence[Across] = ()) -> Pairs:
    """Pair the cases of two runs, in the order of the second.

    Raises:
        UsageError: nothing can be paired, or a run has several cases for one.
    """
    first = _keyed(before, across, {one.name: one.before for one in across})
    second = _keyed(after, across, {one.name: one.after for one in across})
    both = tuple(Pair(key, first[key], case) for key, case in second.items() if key in first)
    if not both:
        msg = f"{run_name(before)} and {run_name(after)} have no case in common: {_way_out(first, second, across)}"
        raise UsageError(msg)
    return Pairs(
        both,
        tuple(case for key, case in first.items() if key not in second),
        tuple(case for key, case in second.items() if key not in first),
    )


def _way_out(
    first: Mapping[str, CaseResult], second: Mapping[str, CaseResult], across: Sequence[Across]
) -> str:
    asked = {one.name for one in across}
    for name in ACROSS:
        a, b = ({getattr(case, name) for case in cases.values()} for cases in (first, second))
        if name not in asked and a and b and not a & b:
            return f"one has {name} {', '.join(sorted(a))}, the other {', '.join(sorted(b))}; try --across {name}"
    return "name two runs of the same suites"


def _keyed(records: RunRecords, across: Sequence[Across], wanted: Mapping[str, str]) -> dict[str, CaseResult]:
    keyed: dict[str, CaseResult] = {}
    for case in records.cases:
        if any(value and getattr(case, name) != value for name, value in wanted.items()):
            continue
        key = _neutral(case.id, case, across)
        if key in keyed:
            name = next(
                one.name for one in across if getattr(case, one.name) != getattr(keyed[key], one.name)
            )
            values = sorted({getattr(case, name), getattr(keyed[key], name)})
            msg = (
                f"{run_name(records)} has {key} with {name} {' and '.join(values)}: say which to compare, as "
                f"--across {name}=FIRST:SECOND"
            )
            raise UsageError(msg)
        keyed[key] = case
    return keyed


def _neutral(text: str, case: CaseResult, across: Sequence[Across]) -> str:
    """``text``, which holds the name of the case's engine, without what may differ."""
    if not across or not case.engine:
        return text
    return text.replace(case.engine, _neutral_engine(case.engine, case, across))


def _neutral_engine(engine: str, case: CaseResult, across: Sequence[Across]) -> str:
    names = {one.name for one in across}
    kept = ("*" if name in names else getattr(case, name) for name in _NAMED)
    neutral = engine.replace(f"-{_configuration(case)}-", f"-{'-'.join(kept)}-", 1)
    return neutral.removeprefix(f"{case.backend}-") if "backend" in names else neutral


def _configuration(case: CaseResult) -> str:
    return "-".join(getattr(case, name) for name in _NAMED)


def engine_keys(records: RunRecords, across: Sequence[Across] = ()) -> dict[str, str]:
    """Engine id → the name under which it is paired; an engine may have booted for no case of its own name."""
    known = {_configuration(case): case for case in records.cases if case.engine}
    keys = {}
    for record in records.engines:
        engine = str(record.get("id"))
        like = max((text for text in known if f"-{text}-" in engine), key=len, default=None)
        keys[engine] = engine if like is None else _neutral_engine(engine, known[like], across)
    return keys

"""The ledger of known bugs on the page: each entry with what it is about, and what a case has to do with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.report.numbers import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.view import CaseView
    from harness.store import CaseResult

__all__ = ["Entry", "entries", "known_bug"]


@dataclass(frozen=True)
class Entry:
    """A known bug and the cases of this run that it is about."""

    id: str
    file: str
    reason: str
    link: str
    until: str
    began: str  #: pattern of the hook where the failure must begin, empty for any
    state: str  #: what became of it in this run
    wrong: bool  #: it keeps the run from being green
    views: list[CaseView]


def entries(recorded: Sequence[Mapping[str, Any]], views: Sequence[CaseView]) -> list[Entry]:
    """The whole ledger, as recorded, with the cases met."""
    return [_entry(one, [v for v in views if v.case.expectation == _name(one)]) for one in recorded]


def known_bug(case: CaseResult, recorded: Sequence[Mapping[str, Any]]) -> str:
    """What the ledger says of a case, and what came of it; empty for one that is not listed."""
    if not case.expectation:
        return ""
    entry = next((one for one in recorded if _name(one) == case.expectation), None)
    if entry is None:
        return f"Listed as known bug {case.expectation}."
    began = _began(entry)
    if case.outcome == "skipped":  # the reason, which is shown, is the entry's sentence
        only = f", for a failure that begins at {began}" if began else ""
        return f"Known bug {case.expectation}: an excuse until {entry.get('expires')}{only}."
    became = {
        "passed": "It passed: take it off the list",
        "failed": f"It failed otherwise: the entry is about a failure that begins at {began or 'any hook'}",
    }.get(case.outcome, "No verdict was reached, which the ledger never excuses")
    said = f"{entry.get('reason')}, {entry.get('link')}, until {entry.get('expires')}"
    return f"Listed as known bug {case.expectation} ({said}). {became}."


def _entry(one: Mapping[str, Any], views: list[CaseView]) -> Entry:
    excused = sum(view.case.outcome == "skipped" for view in views)
    passed = sum(view.case.outcome == "passed" for view in views)
    others = len(views) - excused - passed
    said = [f"excuses {count(excused, 'case')}"] if excused else []
    said += [f"{count(passed, 'case')} passed: take it off the list"] if passed else []
    said += [f"{count(others, 'case')} failed otherwise or had no verdict"] if others else []
    if one.get("expired"):
        said = ["expired: renew or remove it"]
    return Entry(
        id=str(one.get("id")),
        file=str(one.get("file") or ""),
        reason=str(one.get("reason") or ""),
        link=str(one.get("link") or ""),
        until=str(one.get("expires") or ""),
        began=_began(one),
        state="; ".join(said) or "no case of this run is like it",
        wrong=bool(one.get("expired") or passed),
        views=views,
    )


def _name(one: Mapping[str, Any]) -> str:
    """As a case names its entry."""
    return f"{one.get('id')} of {one.get('file')}"


def _began(one: Mapping[str, Any]) -> str:
    began = str(one.get("began") or "*")
    return "" if began == "*" else began

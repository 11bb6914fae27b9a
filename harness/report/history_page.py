"""Checks over several runs as one page: what is broken since when, and how near each came to its bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.history.reading import run_name
from harness.history.trend import GOOD
from harness.report.compare_words import settings_words
from harness.report.history_text import broken_now, counts, moment
from harness.report.numbers import count, duration, ratio
from harness.report.pages import RunLinks, page, write_page
from harness.report.sparklines import sparkline
from harness.report.view import ICONS

if TYPE_CHECKING:
    from harness.history.trend import Check, Point, Trend

__all__ = ["write_history"]

_NO_RUN = "·"
_MAX_SIGNS = 30  #: newest runs that have a sign of their own; the lines go over all of them
_MAX_ENGINES = 6


def write_history(trend: Trend, target: Path | str) -> Path:
    """Write the page of a history.

    Raises:
        UsageError: it cannot be written there.
    """
    target = Path(target)
    links = [RunLinks(records, target) for records in trend.runs]
    names = [run_name(records) for records in trend.runs]
    broken = broken_now(trend)
    newest = sum(not _is_good(check.points[-1]) for check in trend.checks)
    suites: dict[str, list[dict[str, Any]]] = {}
    for check in trend.checks:
        suites.setdefault(check.suite, []).append(_line(check, links, names, check.check))
    values = {
        "broken_now": [_broken(check, since, links) for check, since in broken],
        **_banner(trend, newest, len(broken)),
        "n_signs": min(len(names), _MAX_SIGNS),
        "runs": [
            {
                "name": names[i],
                "href": links[i].index,
                "started": moment(records),
                "profile": str(records.run.get("profile") or ""),
                "counts": counts(records),
                "remarks": _remarks(records.end is None, len(records.damaged)),
                "differs": [_difference(one) for one in trend.differs[i]],
            }
            for i, records in enumerate(trend.runs)
        ][::-1],
        "suites": suites,
        "skipped": [(str(one.folder), one.reason) for one in trend.skipped],
    }
    return write_page(page("history.html.j2", values), target)


def _banner(trend: Trend, newest: int, broken: int) -> dict[str, Any]:
    """The state in a sentence: of the newest run, and of what it left out."""
    last = trend.runs[-1]
    sentence = f"In the newest of {count(len(trend.runs), 'run')}, {run_name(last)}: {counts(last)}."
    if newest:
        return {
            "kind": "broken",
            "icon": "✗",
            "headline": f"{count(newest, 'check')} not good",
            "sentence": sentence,
        }
    if broken:
        left, them = ("1 check was", "it") if broken == 1 else (f"{broken} checks were", "them")
        sentence += f" {left} not good where last seen, and the newest run does not have {them}."
        return {
            "kind": "incomplete",
            "icon": "!",
            "headline": "Newest run good, others left open",
            "sentence": sentence,
        }
    return {"kind": "holds", "icon": "✓", "headline": "All checks good", "sentence": sentence}


def _is_good(point: Point) -> bool:
    return not point.outcome or point.outcome in GOOD


def _remarks(unfinished: bool, n_damaged: int) -> str:
    remarks = ["not ended"] if unfinished else []
    if n_damaged:
        remarks.append(count(n_damaged, "damaged line"))
    return ", ".join(remarks)


def _difference(change: Any) -> str:
    was, now = (settings_words(change.name, text, 60) for text in (change.before, change.after))
    return f"{change.group} {change.name}: {was} → {now}"


def _broken(check: Check, since: str, links: list[RunLinks]) -> dict[str, Any]:
    place = max(i for i, point in enumerate(check.points) if point.outcome)
    point = check.points[place]
    engines = [
        engine.engine or "no engine"
        for engine in check.engines
        if engine.points[place].outcome and engine.points[place].outcome not in GOOD
    ]
    return {
        "name": f"{check.suite} / {check.check}",
        "title": check.title,
        "href": links[place].case(point.worst),
        "outcome": point.outcome,
        "icon": ICONS.get(point.outcome, "!"),
        "n": f"{point.n_bad} of {count(point.n_cases, 'case')}",
        "engines": ", ".join(engines[:_MAX_ENGINES])
        + (f" and {len(engines) - _MAX_ENGINES} more" if len(engines) > _MAX_ENGINES else ""),
        "since": since,
    }


def _line(check: Check, links: list[RunLinks], names: list[str], name: str) -> dict[str, Any]:
    """One row: signs, and both figures with their newest value."""
    shares = [point.share for point in check.points]
    seconds = [point.seconds for point in check.points]
    share, second = _newest(shares), _newest(seconds)
    return {
        "name": name,
        "title": check.title,
        "signs": _signs(check, links, names),
        "said": _said(check),
        "shares": sparkline(shares, f"{name}: worst share of the bound, newest {ratio(share)}", limit=1.0),
        "share": "" if math.isnan(share) else ratio(share),
        "near": share > 1,
        "times": sparkline(seconds, f"{name}: seconds, newest {duration(second)}"),
        "seconds": duration(second),
        "engines": [_line(engine, links, names, engine.engine) for engine in check.engines],
        "open": not _is_good(check.last),
    }


def _newest(values: list[float]) -> float:
    return next((value for value in reversed(values) if not math.isnan(value)), math.nan)


def _said(check: Check) -> str:
    """The signs for who cannot see them."""
    ran = [point for point in check.points if point.outcome]
    good = sum(_is_good(point) for point in ran)
    return f"good in {good} of {count(len(ran), 'run')}, newest {check.last.outcome or 'in none'}"


def _signs(check: Check, links: list[RunLinks], names: list[str]) -> list[dict[str, str]]:
    """A sign per run; of one engine, only what is not good leads anywhere, and what is alike is put together.

    A page of sixty nights has ten thousand signs.
    """
    signs: list[dict[str, str]] = []
    for i in range(max(0, len(names) - _MAX_SIGNS), len(names)):
        point = check.points[i]
        icon = ICONS.get(point.outcome, "!") if point.outcome else _NO_RUN
        href = links[i].case(point.worst) if point.outcome else ""
        if not point.n_bad:
            href = links[i].index if point.outcome and not check.engine else ""
        sign = {"icon": icon, "outcome": point.outcome or "none", "href": href, "label": ""}
        if href or point.n_bad:
            said = count(point.n_cases, "case")
            said = f"{point.n_bad} of {said} not good" if point.n_bad else said
            sign["label"] = f"{names[i]}: {point.outcome}, {said}"
        elif signs and not signs[-1]["label"] and signs[-1]["outcome"] == sign["outcome"]:
            signs[-1]["icon"] += icon
            continue
        signs.append(sign)
    return signs

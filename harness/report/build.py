"""From the records of a run to one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.errors import HarnessError
from harness.report import overview
from harness.report.figures import HEAT_LEVELS
from harness.report.numbers import count
from harness.report.view import anchors, case_view
from harness.store import read_run, tally

if TYPE_CHECKING:
    from harness.report.view import CaseView
    from harness.store import RunRecords

__all__ = ["build_report", "render"]

_TEMPLATES = Path(__file__).parent / "templates"
#: Failures beyond these are shown closed and in brief: a run with everything broken must still open.
_MAX_FULL = 12
_LINK = re.compile(r"https?://[^\s<>\"']+[^\s<>\"'.,;:)\]]")
#: Control characters (not tab and newline), lone surrogates, and those that reorder text on screen.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def build_report(folder: Path | str) -> Path:
    """Write ``index.html`` into the folder of a run, finished or not.

    Returns:
        Where it lies.

    Raises:
        UsageError: the folder holds no results.
        HarnessError: the file cannot be written.
    """
    target = Path(folder) / "index.html"
    page = render(read_run(folder)).encode()
    partial = target.with_name(f".index-{os.getpid()}.html")
    try:
        partial.write_bytes(page)
        partial.replace(target)  # a reader never meets half a page
    except OSError as error:
        msg = f"cannot write {target}: {error.strerror}"
        raise HarnessError(msg) from error
    return target


def render(records: RunRecords) -> str:
    """The page. The same records give the same bytes."""
    views = _views(records)
    by_outcome = _by_outcome(views)
    script = Markup((_TEMPLATES / "script.js").read_text(encoding="utf-8").strip())  # noqa: S704 - our own file
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = (
        _environment()
        .get_template("index.html.j2")
        .render(
            banner=overview.banner(records, views),
            facts=overview.facts(records),
            matrix=overview.matrix(views),
            closest=overview.closest(views),
            skips=overview.skips(views),
            tally=tally(records),
            run_id=str(records.run.get("run_id") or "unknown"),
            damaged=records.damaged,
            heat_levels=HEAT_LEVELS,
            style=Markup((_TEMPLATES / "style.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
            script=script,
            script_digest=digest,
            **by_outcome,
        )
    )
    return _INVISIBLE.sub("\ufffd", page)


def _views(records: RunRecords) -> list[CaseView]:
    """All cases; of those that could not be judged for the same reason (one engine that died), one tells it, opened."""
    names = anchors(records.cases)
    told: dict[str, str] = {}
    n_full = 0
    views = []
    for case in records.cases:
        story = case.message if case.outcome == "error" else ""
        first = told.setdefault(story, names[case.id]) if story else names[case.id]
        is_repeat = first != names[case.id]
        full = case.outcome in ("failed", "error", "lost") and n_full < _MAX_FULL and not is_repeat
        n_full += full
        view = case_view(case, names[case.id], full=full)
        views.append(replace(view, message="", same_as=first) if is_repeat else view)
    return views


def _by_outcome(views: list[CaseView]) -> dict[str, Any]:
    """Passing cases by model, in the matrix's order so that those of one cell lie together."""
    passed: dict[str, list[CaseView]] = {}
    for view in views:
        if view.case.outcome == "passed":
            passed.setdefault(view.case.model, []).append(view)
    for group in passed.values():
        group.sort(key=lambda v: (v.case.suite, v.case.check, v.case.dtype, v.case.mode, v.case.topology))
    return {
        "failed": [view for view in views if view.case.outcome == "failed"],
        "unjudged": [view for view in views if view.case.outcome in ("error", "lost", "not-run")],
        "passed": passed,
    }


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["linked"] = _linked
    environment.filters["count"] = count
    return environment


def _linked(text: str) -> Markup:
    """Escaped text in which web addresses can be followed."""
    parts, end = [], 0
    for match in _LINK.finditer(text):
        address = escape(match[0])
        parts += [
            escape(text[end : match.start()]),
            Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(address),
        ]
        end = match.end()
    return Markup("").join([*parts, escape(text[end:])])

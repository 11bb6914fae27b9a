"""Models and suites down, engines across: what ran where, how near it came, and a way to each case."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from harness.report.view import SEVERITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.report.view import CaseView

__all__ = ["NO_VALUE", "matrix"]

NO_VALUE = "\N{EN DASH}"


def matrix(views: Sequence[CaseView], *, by_check: bool = False) -> dict[str, Any]:
    """Model and suite down, dtype and mode (and topology, where there is more than one) across.

    Args:
        views: all cases.
        by_check: a row per check instead of per suite.
    """
    topologies = {view.case.topology for view in views}

    def column(view: CaseView) -> tuple[str, str, str]:
        case = view.case
        return (case.dtype or NO_VALUE, case.mode or NO_VALUE, case.topology if len(topologies) > 1 else "")

    columns = sorted(dict.fromkeys(map(column, views)), key=lambda key: (key[0] == NO_VALUE, key))
    cells: dict[tuple[str, str], dict[tuple[str, str, str], list[CaseView]]] = {}
    for view in views:
        parts = (view.case.suite, view.case.check if by_check else "")
        row = (view.case.model or NO_VALUE, "/".join(filter(None, parts)))
        cells.setdefault(row, {}).setdefault(column(view), []).append(view)
    models: dict[str, list[dict[str, Any]]] = {}
    for (model, check), by_column in cells.items():
        entries = [_cell(by_column.get(key, [])) for key in columns]
        models.setdefault(model, []).append({"check": check, "cells": entries})
    headings = [
        {"dtype": dtype, "rest": " ".join(filter(None, (mode, topology)))}
        for dtype, mode, topology in columns
    ]
    return {"columns": headings, "models": models}


def _cell(views: Sequence[CaseView]) -> list[dict[str, Any]]:
    """One entry per outcome in the cell, worst first; each links to its worst case."""
    entries = []
    for outcome in SEVERITY:
        members = [view for view in views if view.kind == outcome]
        if not members:
            continue
        lead = max(members, key=lambda view: view.worst.badness if view.worst else (False, -1.0))
        share = min(lead.worst.ratio, 1.0) if lead.worst and not math.isnan(lead.worst.ratio) else 0.0
        word = lead.case.skip_class.replace("-", " ") if outcome == "skipped" else outcome.replace("-", " ")
        entries.append(
            {
                "outcome": outcome,
                "icon": lead.icon,
                "text": lead.ratio or ("" if outcome == "passed" else word),
                "word": word,
                "percent": round(100 * share) if outcome in ("passed", "failed") and lead.worst else None,
                "count": len(members),
                "anchor": lead.anchor,
                "query": _query(members),
            }
        )
    return entries


def _query(members: Sequence[CaseView]) -> str:
    """The list's filter under which these cases stand, as the page's address has it after ``#``."""
    view, case = members[0], members[0].case
    one_check = len({member.case.check for member in members}) == 1
    wanted = {
        "outcome": view.kind,
        "model": case.model or NO_VALUE,
        "suite": case.suite or NO_VALUE,
        "dtype": case.dtype or NO_VALUE,
        "mode": case.mode or NO_VALUE,
        "ranks": case.topology or NO_VALUE,
        "q": case.check if one_check else "",
    }
    return urlencode({name: value for name, value in wanted.items() if value}, errors="replace")

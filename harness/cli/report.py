"""``vllm-parity report``: the page and the tables of a run again, from its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.codes import BROKEN, INCOMPLETE, NOTHING_RAN, OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from harness.store import RunRecords

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "build a run's index.html and parquet files again"
ABOUT = "Exit status: 0 parity holds, 1 it is broken, 4 the run is incomplete, 5 nothing ran."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("folder", metavar="RUN", help="folder of a run, reports/<time>-<profile>")


def run(arguments: argparse.Namespace) -> int:
    """Say what keeps the run from being green, and where the page is.

    Raises:
        UsageError: no records there, or nothing can be written there.
    """
    from harness.report import build_report
    from harness.store import read_run, why_not_green, write_parquet

    page = build_report(arguments.folder)
    try:
        write_parquet(arguments.folder)
    except OSError as error:
        msg = f"cannot write the parquet files of {arguments.folder}: {error.strerror or error}"
        raise UsageError(msg) from error
    records = read_run(arguments.folder)
    problems = why_not_green(records)
    print("not green: " + "; ".join(problems) if problems else "parity holds")
    print(page)
    return _status(records, problems)


def _status(records: RunRecords, problems: Sequence[str]) -> int:
    from harness.store import tally

    total = tally(records).total
    if total.failed or total.repeated:
        return BROKEN
    unjudged = total.error or total.lost or any(case.is_known_bug for case in records.cases)
    if not total.executed and not unjudged:
        return NOTHING_RAN
    return INCOMPLETE if problems else OK

"""``vllm-parity history``: how each check went from run to run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness.cli.codes import OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "show how each check went from run to run"
ABOUT = (
    "Verdicts, worst errors and seconds per check, oldest run first. Folders in which no run can be read are named and "
    "left out. Exit status: 0, or 2 where there is no run at all."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, and what to make of them."""
    parser.add_argument(
        "folders", nargs="+", metavar="RUN|DIR", help="folder of a run, or a folder of runs such as reports"
    )
    parser.add_argument("--last", type=int, metavar="N", help="only the newest N runs")
    parser.add_argument("--profile", metavar="NAME", help="only runs of this profile")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of what is printed")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")


def run(arguments: argparse.Namespace) -> int:
    """Print the history.

    Raises:
        UsageError: no run is left, or the page cannot be written.
    """
    from harness.history import find_runs, trend_of
    from harness.report.history_text import history_json, history_text

    if arguments.last is not None and arguments.last < 1:
        msg = f"--last {arguments.last} is no number of runs: from 1"
        raise UsageError(msg)
    runs, skipped = find_runs(arguments.folders)
    if arguments.profile is not None:
        profiles = sorted({str(one.records.run.get("profile")) for one in runs})
        runs = [one for one in runs if one.records.run.get("profile") == arguments.profile]
        if not runs:
            msg = f"--profile {arguments.profile!r}: no run of it; there are {', '.join(profiles)}"
            raise UsageError(msg)
    trend = trend_of(runs[-arguments.last :] if arguments.last else runs, skipped)
    if arguments.html:
        from harness.report.history_page import write_history

        write_history(trend, arguments.html)
    if arguments.format == "json":
        print(json.dumps(history_json(trend), indent=1, allow_nan=False))
    else:
        print(history_text(trend), end="")
    return OK

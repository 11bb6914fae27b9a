"""``vllm-parity repro``: a failed case's numbers, and a script that runs just its failing call again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import OK

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "show a failed case's numbers, and write a script that runs it again"
ABOUT = "Prints the rows that are wrong, channel by channel, and writes repro.py beside their tensors."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case and its run."""
    parser.add_argument(
        "case", metavar="CASE", help="a case's id, or a part of it that no other failed case has"
    )
    parser.add_argument(
        "--run",
        default="last",
        dest="folder",
        metavar="RUN",
        help="folder of the run; by default the newest below reports/",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the case and write its script.

    Raises:
        UsageError: no such run, no such case, or it did not fail.
    """
    from harness.repro import find_case, lines_of
    from harness.resume import find_run
    from harness.store import read_run

    records = read_run(find_run(arguments.folder, Path("reports")))
    for line in lines_of(records, find_case(records, arguments.case)):
        print(line)
    return OK

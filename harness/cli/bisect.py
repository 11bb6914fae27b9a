"""``vllm-parity bisect``: what is wrong by itself in a failed case, found by putting the truth in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import BROKEN, NO_ENGINE, OK

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "find what is wrong by itself in a failed case, by putting the truth in layer by layer"
ABOUT = (
    "Boots the case's engine, runs its call with the reference's values put in at one point after another, and says "
    "which layer and branch is wrong by itself, at which row, and which settings it needs. Exits with 1 where "
    "something is wrong, with 0 where nothing is, with 3 where no engine boots."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The case, its run, and how far to go."""
    from harness.bisect.choices import CHOICES

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
    parser.add_argument(
        "--settings",
        choices=CHOICES,
        default="simpler",
        help="other engines to boot for it: none, simpler ones (eager, one rank, one step, float32), or all "
        "(also compiled, small steps, bfloat16); default: simpler",
    )
    parser.add_argument(
        "--comparison",
        type=int,
        metavar="N",
        help="which of the case's failed comparisons, from 0; by default the first",
    )


def run(arguments: argparse.Namespace) -> int:
    """Bisect the case.

    Raises:
        UsageError: no such run, no such case, or nothing of it to bisect.
    """
    import sys

    from harness.bisect.case import bisect_case
    from harness.bisect.investigate import SOUND
    from harness.errors import EngineError
    from harness.repro import find_case
    from harness.resume import find_run
    from harness.store import read_run

    records = read_run(find_run(arguments.folder, Path("reports")))
    case = find_case(records, arguments.case)
    try:
        result, page = bisect_case(records, case, how=arguments.settings, number=arguments.comparison)
    except EngineError as error:
        print(f"vllm-parity: no engine to bisect on: {error}", file=sys.stderr)
        return NO_ENGINE
    print(f"page, figure and repro: {page.parent}")
    return OK if result.kind == SOUND else BROKEN

"""``vllm-parity compare``: what became worse from one run to another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from harness.cli.codes import BROKEN, OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "say what became worse from one run to another"
ABOUT = (
    "Verdicts, errors as shares of their bounds, budgets and times of the cases that both runs have. "
    "Exit status: 0 no regression, 1 something became worse, 2 the runs cannot be compared."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two runs, and how to compare them."""
    parser.add_argument("before", metavar="A", help="folder of a run, reports/<time>-<profile>")
    parser.add_argument("after", metavar="B", help="folder of the run that is on trial")
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="RUN",
        help="another run like A, to measure the spread of each figure by; repeatable",
    )
    parser.add_argument(
        "--across",
        action="append",
        default=[],
        metavar="NAME[=A:B]",
        help="pair cases that differ in this: mode, dtype, topology or backend, as mode=eager:compiled; repeatable",
    )
    parser.add_argument("--time", action="store_true", help="count slower cases and boots as regressions")
    parser.add_argument(
        "--step",
        type=float,
        metavar="SHARE",
        help="how much a hook may grow, as a share of its bound; chosen by what differs between the runs by default",
    )
    parser.add_argument(
        "--factor", type=float, metavar="F", help="how many times a hook may grow; it must do both to count"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of what is printed")
    parser.add_argument("--html", metavar="FILE", help="also write one self-contained page")
    parser.add_argument(
        "--limit", type=int, default=20, metavar="N", help="entries of each list in the text (default 20)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison.

    Raises:
        UsageError: a run cannot be read, the two have no case in common, the page cannot be written.
    """
    from harness.history import Across, compare_runs, read_records
    from harness.report.compare_json import compare_json
    from harness.report.compare_text import compare_text

    _check(arguments)
    found = compare_runs(
        read_records(arguments.before),
        read_records(arguments.after),
        baselines=[read_records(folder) for folder in arguments.baseline],
        across=[Across.parse(text) for text in arguments.across],
        step=arguments.step,
        factor=arguments.factor,
        timed=arguments.time,
    )
    if arguments.html:
        from harness.report.compare_page import write_comparison

        write_comparison(found, arguments.html)
    if arguments.format == "json":
        print(json.dumps(compare_json(found), indent=1, allow_nan=False))
    else:
        print(compare_text(found, arguments.limit), end="")
    return BROKEN if found.n_regressions else OK


def _check(arguments: argparse.Namespace) -> None:
    if arguments.limit < 0:
        msg = f"--limit {arguments.limit} is no number of entries: from 0"
        raise UsageError(msg)
    if arguments.step is not None and not 0 <= arguments.step < float("inf"):
        msg = f"--step {arguments.step} is no share of a bound: from 0, as 0.2"
        raise UsageError(msg)
    if arguments.factor is not None and not 1 <= arguments.factor < float("inf"):
        msg = f"--factor {arguments.factor} is no growth: from 1, as 2"
        raise UsageError(msg)

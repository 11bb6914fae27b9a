"""``vllm-parity trial``: what runs saw of planted faults, and how near sound engines came to their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import NOTHING_RAN, OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "print what runs saw of planted faults, and how near sound engines came to their bounds"
ABOUT = (
    "The tables of docs/trust.md: the sensitivity curve of suites/test_trial.py; how err(E) / bound is spread over "
    "every comparison of a sound engine, and what another k would have called red; every broken worker, driver and "
    "rank that the suites planted, with the check that caught it. Exit status: 0, 2 wrong arguments, 5 nothing of this."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, and where the figures go."""
    parser.add_argument("folders", nargs="+", metavar="RUN", help="folder of a run, reports/<time>-<profile>")
    parser.add_argument("--svg", metavar="FILE", help="write the sensitivity curve as a figure too")
    parser.add_argument(
        "--spread-svg", metavar="FILE", help="write the share of comparisons above each k as a figure too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; 5 where the runs planted nothing and compared nothing."""
    from harness.store import read_run
    from harness.trial.figure import sensitivity_figure
    from harness.trial.records import curves, faults
    from harness.trial.spread import spreads
    from harness.trial.spread_figure import spread_figure
    from harness.trial.spread_text import spread_tables
    from harness.trial.tables import curve_tables, fault_tables

    runs = [read_run(folder) for folder in arguments.folders]
    swept, planted, compared = curves(runs), faults(runs), spreads(runs)
    if not swept and not planted and not compared:
        print("these runs planted no fault and compared nothing: run `pytest suites/test_trial.py`")
        return NOTHING_RAN
    if swept:
        print(f"## Sensitivity\n\n{curve_tables(swept)}")
    if compared:
        print(f"## Sound engines\n\n{spread_tables(compared)}")
    if planted:
        print(f"## Planted engines\n\n{fault_tables(planted)}", end="")
    if arguments.svg:
        _write("--svg", arguments.svg, sensitivity_figure(swept) if swept else "")
    if arguments.spread_svg:
        _write("--spread-svg", arguments.spread_svg, spread_figure(compared) if compared else "")
    return OK


def _write(option: str, target: str, figure: str) -> None:
    if not figure:
        msg = f"{option} {target!r}: no run holds what it shows; `pytest suites/test_trial.py` makes some"
        raise UsageError(msg)
    try:
        Path(target).write_text(figure, encoding="utf-8")
    except OSError as error:
        msg = f"cannot write the figure to {target!r}: {error.strerror}; name a file that can be written"
        raise UsageError(msg) from error

"""``vllm-parity trial``: what the harness sees of planted faults, from the records of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli.codes import NOTHING_RAN, OK
from harness.errors import UsageError

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "print what runs with planted faults saw of them"
ABOUT = (
    "The tables of docs/trust.md: the sensitivity curve of suites/test_trial.py, and every broken worker, driver and "
    "rank that the suites planted, with the check that caught it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, and where the figure goes."""
    parser.add_argument("folders", nargs="+", metavar="RUN", help="folder of a run, reports/<time>-<profile>")
    parser.add_argument("--svg", metavar="FILE", help="write the curve as a figure too")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; 5 where the runs planted nothing."""
    from harness.store import read_run
    from harness.trial.figure import sensitivity_figure
    from harness.trial.records import curves, faults
    from harness.trial.tables import curve_tables, fault_tables

    runs = [read_run(folder) for folder in arguments.folders]
    swept, planted = curves(runs), faults(runs)
    if not swept and not planted:
        print("these runs planted no fault: run `pytest suites/test_trial.py` or a suite of faults")
        return NOTHING_RAN
    if swept:
        print(f"## Sensitivity\n\n{curve_tables(swept)}")
    if planted:
        print(f"## Planted engines\n\n{fault_tables(planted)}", end="")
    if arguments.svg:
        _write(Path(arguments.svg), sensitivity_figure(swept) if swept else "")
    return OK


def _write(target: Path, figure: str) -> None:
    if not figure:
        msg = f"--svg {str(target)!r}: no run holds a sensitivity curve; `pytest suites/test_trial.py` makes one"
        raise UsageError(msg)
    try:
        target.write_text(figure, encoding="utf-8")
    except OSError as error:
        msg = f"cannot write the figure to {str(target)!r}: {error.strerror}; name a file that can be written"
        raise UsageError(msg) from error

"""``vllm-parity families``: the tables of docs/families.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.codes import OK

if TYPE_CHECKING:
    import argparse

__all__ = ["ABOUT", "HELP", "add_arguments", "run"]

HELP = "print runs as Markdown tables of models by points"
ABOUT = "What docs/families.md is made of."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs, of the same models."""
    parser.add_argument("folders", nargs="+", metavar="RUN", help="folder of a run, reports/<time>-<profile>")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables."""
    from harness.report.families import family_tables
    from harness.store import read_run

    print(family_tables([read_run(folder) for folder in arguments.folders]), end="")
    return OK

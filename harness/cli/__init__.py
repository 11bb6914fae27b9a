"""The command ``vllm-parity``: what stands beside the comparisons, which are pytest's (``pytest suites/``).

One module per verb. A verb is a module with ``HELP`` (a line), ``ABOUT`` (a paragraph or empty), ``add_arguments`` and
``run``; to add one, write it and name it in :data:`VERBS`. Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, Protocol

from harness.cli import audit, bisect, compare, doctor, families, history, models, plan, report, repro, trial
from harness.cli.codes import BROKEN, INCOMPLETE, NO_ENGINE, NOTHING_RAN, OK, USAGE
from harness.errors import HarnessError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["BROKEN", "INCOMPLETE", "NOTHING_RAN", "NO_ENGINE", "OK", "USAGE", "VERBS", "Verb", "main"]


class Verb(Protocol):
    """What a module of this package offers."""

    @property
    def HELP(self) -> str:  # noqa: N802 - a module's constant
        """One line for the list of verbs."""

    @property
    def ABOUT(self) -> str:  # noqa: N802 - a module's constant
        """What its own help says first; ``HELP`` where empty."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it, print, and return the exit status."""


#: In the order the help lists them.
VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "models": models,
        "doctor": doctor,
        "plan": plan,
        "report": report,
        "repro": repro,
        "bisect": bisect,
        "compare": compare,
        "history": history,
        "families": families,
        "trial": trial,
        "audit": audit,
    }
)


class _Parser(argparse.ArgumentParser):
    """Errors as one line, like every other."""

    def error(self, message: str) -> NoReturn:
        text = f"{message}; see `{self.prog} --help`"
        raise UsageError(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        The exit status; 2 with one line on stderr for whatever the caller can put right.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    try:
        arguments = _parser().parse_args(argv)
        verb: Verb = arguments.verb
        status = verb.run(arguments)
        sys.stdout.flush()
    except HarnessError as error:
        print(f"vllm-parity: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # Whoever read, `| head`, has enough; the interpreter would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return status


def _parser() -> argparse.ArgumentParser:
    from harness import __version__

    about = "Comparisons run with `pytest suites/`; this is what stands beside them."
    parser = _Parser(prog="vllm-parity", description=about)
    parser.add_argument("--version", action="version", version=f"vllm-parity {__version__}")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, verb in VERBS.items():
        own = verbs.add_parser(name, help=verb.HELP, description=verb.ABOUT or verb.HELP)
        verb.add_arguments(own)
        own.set_defaults(verb=verb)
    return parser

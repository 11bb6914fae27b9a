"""Runs the peers in turn: all are booted, then in each round each has its go, so that drift of the machine hits all."""

from __future__ import annotations

import contextlib
import logging
import os
import textwrap
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.errors import EngineError
from harness.peers.judge import judge_values
from harness.peers.process import PeerProcess
from harness.peers.record import COLLECT, FAILED, LIMIT_ONLY, PLAIN, WRONG, PeerRecord, Round

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

__all__ = ["Launch", "Schedule", "run_peers"]

logger = logging.getLogger(__name__)

#: Characters of an error that are kept; the rest is in the peer's log.
_ERROR = 400


@dataclass(frozen=True)
class Launch:
    """How one peer is started.

    Attributes:
        record: what is known of it before; filled as it runs. A failed one is not started.
        argv: the command.
        environment: variables beside this process' own.
        collects: False: only the plain forward is measured.
    """

    record: PeerRecord
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    collects: bool = True


@dataclass(frozen=True)
class Schedule:
    """How much is measured.

    Attributes:
        rounds: rounds at most.
        plain_rounds: of these, so many, the first ones, also run everything without collecting.
        seconds: no round begins that would not end in this time; the first two always run.
        peer_seconds: a peer that has used so many sits the rest out; it always has its first two rounds.
        boot_timeout, step_timeout: seconds before a peer counts as hung.
        judged: prompts whose values are compared with the truth.
    """

    rounds: int = 5
    plain_rounds: int = 5
    seconds: float = float("inf")
    peer_seconds: float = float("inf")
    boot_timeout: float = 300.0
    step_timeout: float = 120.0
    judged: int = 4


def run_peers(
    launches: Sequence[Launch],
    task: Mapping[str, Any],
    folder: Path,
    *,
    truth: Mapping[tuple[int, int], torch.Tensor],
    bound: float,
    schedule: Schedule,
    after_round: Callable[[], object] | None = None,
) -> list[PeerRecord]:
    """Boot all, warm them up, measure in rounds, judge their values in the first.

    Nothing that a peer does ends the run: it is listed with its own error.

    Args:
        launches: what to start.
        task: what is sent to each, see ``runners/launch.py``; its ``prompts`` has ``warm-up`` and what is measured.
        folder: logs go there, and values until they have been judged.
        truth: see :func:`harness.peers.judge.judge_values`, for the first prompts of the first batch.
        bound: what a row may err by.
        schedule: how much.
        after_round: called when one has ended and the records have it, to keep what there is.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        running: list[tuple[Launch, PeerProcess]] = []
        for launch in launches:
            if launch.record.state != FAILED and (process := _boot(launch, task, folder, schedule)):
                stack.callback(process.close)
                running.append((launch, process))
        batches = [name for name in task["prompts"] if name != "warm-up"]
        for launch, process in running:
            if "warm-up" in task["prompts"]:
                _measure(launch, process, _works(launch, plain=True), ["warm-up"], None, schedule)
        longest = 0.0
        for number in range(schedule.rounds):
            began = time.monotonic()
            if number > 1 and began + longest - started > schedule.seconds:
                logger.warning("stopped after %d rounds: the time is up", number)
                break
            turn = number % max(1, len(running))
            for launch, process in running[turn:] + running[:turn]:
                if number > 1 and _used(launch.record) > schedule.peer_seconds:
                    continue
                works = _works(launch, plain=number < schedule.plain_rounds)
                # What is collected last is what is judged: the first batch.
                _measure(launch, process, works, batches[::-1], number, schedule)
                if number == 0:
                    _judge(launch, process, folder, truth, bound, schedule)
            longest = max(longest, time.monotonic() - began)
            logger.info("round %d took %.0f s", number + 1, time.monotonic() - began)
            if after_round is not None:
                after_round()
    return [launch.record for launch in launches]


def _used(record: PeerRecord) -> float:
    return sum(one.seconds for one in record.rounds)


def _works(launch: Launch, *, plain: bool) -> list[str]:
    """Collecting comes last, so that what was collected is still there to be judged."""
    return [*([PLAIN] if plain else []), *([COLLECT] if launch.collects else [])]


def _boot(launch: Launch, task: Mapping[str, Any], folder: Path, schedule: Schedule) -> PeerProcess | None:
    record = launch.record
    process: PeerProcess | None = None
    try:
        process = PeerProcess(record.name, launch.argv, folder / f"{record.name}.log", launch.environment)
        reply = process.ask(task, schedule.boot_timeout, "boot")
        record.boot_seconds, record.versions = float(reply["boot_seconds"]), dict(reply["versions"])
    except (EngineError, KeyError, TypeError, ValueError) as error:
        _failed(record, error)
        if process is not None:
            process.close()
        return None
    except BaseException:  # Ctrl-C too must leave no peer behind
        if process is not None:
            process.close()
        raise
    logger.info("%s booted in %.0f s", record.name, record.boot_seconds)
    if not launch.collects:
        record.state = LIMIT_ONLY
    return process


def _measure(
    launch: Launch,
    process: PeerProcess,
    works: Sequence[str],
    batches: Sequence[str],
    number: int | None,
    schedule: Schedule,
) -> None:
    """One peer's turn; ``number`` None is a warm-up, whose seconds are not kept."""
    record = launch.record
    if record.state == FAILED:
        return
    try:
        for prompts in batches:
            for work in works:
                seconds = float(process.ask({work: prompts}, schedule.step_timeout)["seconds"])
                if number is not None:
                    record.rounds.append(Round(number, work, prompts, seconds))
    except (EngineError, KeyError, TypeError, ValueError) as error:
        _failed(record, error)
        process.close()


def _judge(
    launch: Launch,
    process: PeerProcess,
    folder: Path,
    truth: Mapping[tuple[int, int], torch.Tensor],
    bound: float,
    schedule: Schedule,
) -> None:
    record = launch.record
    if record.state == FAILED or not launch.collects:
        return
    file = folder / f"{record.name}.safetensors"
    try:
        process.ask({"save": os.fspath(file), "prompts": schedule.judged}, schedule.step_timeout)
        worst, wrong = judge_values(file, truth, bound)
        record.blocks = len({name[1] for name in _names(file)})
    except Exception as error:  # noqa: BLE001 - what a peer has written may be anything
        _failed(record, error)
        return
    finally:
        file.unlink(missing_ok=True)
    record.worst_row = worst if worst != float("inf") else None
    if wrong:
        record.state, record.error = WRONG, wrong


def _names(file: Path) -> list[tuple[str, str]]:
    from safetensors import safe_open

    with safe_open(file, "pt") as values:
        return [tuple(name.split("/")) for name in values.keys()]  # noqa: SIM118 - it is no mapping


def _failed(record: PeerRecord, error: BaseException) -> None:
    text = str(error) if isinstance(error, EngineError) else f"its reply cannot be used: {error!r}"
    record.state, record.error = FAILED, textwrap.shorten(text, _ERROR, placeholder=" …")
    logger.warning("%s: %s", record.name, record.error)

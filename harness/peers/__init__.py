"""Side by side with what a person would use instead: the same model, prompts and machine, in one run.

May import ``harness.models``, ``harness.reference`` for the truth, ``harness.budgets`` and ``harness.provenance``; what
runs inside the peers' own environments is in ``runners/`` and imports nothing of this. ``python -m harness.peers``.
"""

from __future__ import annotations

from harness.peers.catalogue import PEERS, Peer
from harness.peers.record import PeerRecord, Round, Run, read_run, write_run

__all__ = ["PEERS", "Peer", "PeerRecord", "Round", "Run", "read_run", "write_run"]

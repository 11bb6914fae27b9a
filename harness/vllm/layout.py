"""Which rank serves which hook, checked and not trusted: one pipeline stage, each of its tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from harness.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Layout", "Place", "join_shares", "verify_layout"]

#: Absolute, and relative to a number or to the root mean square of its row, whichever is larger. Two ranks' replicas
#: are equal in every bit. Of three or more each sums the parts in an order of its own, and what that rounds is as large
#: as the row and not as the number: on SmolLM2 at fp32 and three ranks up to 7e-7 of a row's norm, from block 0 on.
TOLERANCE = 1e-5


@dataclass(frozen=True, order=True)
class Place:
    """Where a rank stands."""

    stage: int  #: pipeline stage
    tensor: int  #: rank inside the stage's tensor-parallel group

    def __str__(self) -> str:
        return f"pp{self.stage}/tp{self.tensor}"


@dataclass
class Layout:
    """What has been verified so far.

    Attributes:
        places: of every rank, in the order the engine numbers them.
        served: hook → numbers of the ranks that served it.
        largest: largest difference between replicas, absolute, at which hook.
        fires: hook → forwards per serving rank in the call it was verified on.
    """

    places: list[Place]
    served: dict[str, list[int]] = field(default_factory=dict)
    largest: tuple[float, str] = (0.0, "")
    fires: dict[str, list[int]] = field(default_factory=dict)

    def shard(self, rank: int, heads: int) -> int:
        """Which part of a row of so many heads a rank has; ranks with one number have the same. 0 heads: no parts."""
        per_stage = 1 + max(place.tensor for place in self.places)
        return self.places[rank].tensor * min(heads, per_stage) // per_stage

    def to_json(self) -> dict[str, Any]:
        """For the record and the report's drawing."""
        return {
            "ranks": [str(place) for place in self.places],
            "served": self.served,
            "largest_difference": self.largest[0],
            "largest_at": self.largest[1],
            "fires": self.fires,
        }


def verify_layout(
    layout: Layout,
    names: Sequence[str],
    captured: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
    fired: Sequence[Mapping[str, int]],
    *,
    heads: Mapping[str, int] | None = None,
) -> None:
    """Check hooks that every rank was asked for, and note what was seen in ``layout``.

    Args:
        layout: where the ranks stand; filled with what is found.
        names: hooks.
        captured: per rank, request key → hook → (n, width); a rank that does not serve a hook lacks it.
        fired: per rank, hook → forwards since the captures were armed.
        heads: hook → heads its rows are made of, where each rank has its share of them.

    Raises:
        CaptureError: a hook is not on each rank of exactly one stage, replicas differ, or ran a different number of
            times; with hook, ranks and the largest difference.
    """
    for name in names:
        ranks = [
            rank for rank, requests in enumerate(captured) if any(name in one for one in requests.values())
        ]
        _check_copies(layout, name, ranks)
        counts = [int(fired[rank][name]) for rank in ranks]
        if len(set(counts)) > 1:
            told = ", ".join(f"{layout.places[r]} {n}" for r, n in zip(ranks, counts, strict=True))
            msg = f"{name}: its replicas ran a different number of times: {told}"
            raise CaptureError(msg)
        by_shard: dict[int, list[int]] = {}
        for rank in ranks:
            by_shard.setdefault(layout.shard(rank, (heads or {}).get(name, 0)), []).append(rank)
        for replicas in by_shard.values():
            _check_replicas(layout, name, replicas, captured)
        # Noted last: what has failed is not verified, and is looked at again.
        layout.served[name] = ranks
        layout.fires[name] = counts


def join_shares(
    layout: Layout, name: str, by_rank: Sequence[Mapping[str, torch.Tensor]], heads: int
) -> torch.Tensor | None:
    """One request's rows at one hook, (n, width), from the ranks that have them; None where none has.

    Args:
        layout: where the ranks stand.
        name: the hook.
        by_rank: per rank, hook → (n, width of its share).
        heads: heads that a row is made of, 0 where every rank has the whole row.

    Raises:
        CaptureError: some ranks have their heads and others have not.
    """
    shares: dict[int, torch.Tensor] = {}
    for rank, hooks in enumerate(by_rank):
        if name in hooks:
            shares.setdefault(layout.shard(rank, heads), hooks[name])
    if not shares or not heads:
        return shares.get(0)
    wanted = {layout.shard(rank, heads) for rank in range(len(layout.places))}
    if missing := wanted - shares.keys():
        msg = f"{name}: of {len(wanted)} parts of its {heads} heads, {len(missing)} came from no rank"
        raise CaptureError(msg)
    return torch.cat([shares[number] for number in sorted(shares)], dim=1)


def _check_copies(layout: Layout, name: str, ranks: Sequence[int]) -> None:
    here = [str(layout.places[rank]) for rank in ranks]
    if not ranks:
        msg = f"{name} never fired on any rank: it is installed, but no forward ran it"
        raise CaptureError(msg)
    stages = {layout.places[rank].stage for rank in ranks}
    if len(stages) > 1:
        msg = f"{name} is served by {len(stages)} pipeline stages ({', '.join(here)}); it lives on one"
        raise CaptureError(msg)
    group = [str(place) for place in layout.places if place.stage in stages]
    if sorted(here) != sorted(group):
        missing = ", ".join(sorted(set(group) - set(here)))
        msg = f"{name} is served by {', '.join(here)} and not by {missing}, which runs the same stage"
        raise CaptureError(msg)


def _check_replicas(
    layout: Layout,
    name: str,
    ranks: Sequence[int],
    captured: Sequence[Mapping[str, Mapping[str, torch.Tensor]]],
) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        for key, hooks in captured[first].items():
            ours, theirs = hooks[name].double(), captured[rank].get(key, {}).get(name)
            if theirs is None or theirs.shape != hooks[name].shape:
                msg = f"{name}: {layout.places[rank]} lacks rows that {layout.places[first]} has"
                raise CaptureError(msg)
            theirs = theirs.double()
            # An edit may overflow, on all of them alike.
            same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            finite = torch.where(ours.isfinite(), ours, 0.0)
            gap = (ours - theirs).abs().masked_fill(same, 0.0)
            largest = float(gap.max()) if gap.numel() else 0.0
            if largest > layout.largest[0]:
                layout.largest = (largest, name)
            row_size = finite.square().mean(dim=1, keepdim=True).sqrt()
            allowed = TOLERANCE + TOLERANCE * torch.maximum(finite.abs(), row_size)
            if not bool((gap <= allowed).all()):
                row = int((gap - allowed).amax(dim=1).argmax())
                msg = (
                    f"{name}: replicas differ by up to {largest:.1e} between {layout.places[first]} and "
                    f"{layout.places[rank]} (row {row} worst); they must agree to {TOLERANCE:g} of each row"
                )
                raise CaptureError(msg)

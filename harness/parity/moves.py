"""Explanations by rows in the wrong place: shifted, of another request, overwritten by decode, of a call before.

For a few failing rows of each request every equal row of the pool is found; each is a hypothesis (another request, an
offset), and the simplest one that holds for nearly all failing rows of that request is taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from harness.parity.rows import gather, lengths_of, ref_of, spans
from harness.parity.scene import SHARE, Match, Scene, distance, take
from harness.parity.types import RowRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.parity.rows import Rows

__all__ = ["moved_rows", "stale_rows"]

#: Failing rows per request that hypotheses are drawn from.
_PROBES = 3
#: Equal rows kept per probe; a prompt of one repeated token has more, and they say no more.
_EQUALS = 64
#: Rounding of the quick search, relative to the rows' norms.
_COARSE = 1e-6
#: Moves told one by one.
_TOLD = 3
MOVED, STALE = 10, 20


def _equals(scene: Scene, pool: Rows) -> list[list[RowRef]]:
    """For each failing row the rows of the pool within its limit, nearest first.

    One matrix product finds the few that may be near, with the rounding that ``|e|² + |t|² - 2 e·t`` brings; only those
    are compared in full.
    """
    lengths, limits = lengths_of(pool), scene.limits()
    engine = torch.nan_to_num(scene.engine, nan=math.inf)
    squares = engine.square().sum(dim=1, keepdim=True)
    found: list[list[tuple[float, int]]] = [[] for _ in scene.refs]
    at = 0
    for group in spans(lengths, scene.width):
        rows = gather(pool, group)
        norms = rows.norm(dim=1)
        apart = (squares + norms.square() - 2 * engine @ rows.T).clamp(min=0).sqrt() / norms
        maybe = apart <= limits.unsqueeze(1) + _COARSE
        for i in maybe.any(dim=1).nonzero().flatten().tolist():
            near = maybe[i].nonzero().flatten()
            near = near[apart[i][near].argsort()[:_EQUALS]]
            distances = distance(scene.engine[i].expand(len(near), -1), rows[near])
            for index, gap in zip(near.tolist(), distances.tolist(), strict=True):
                if gap <= float(limits[i]):
                    found[i].append((gap, at + index))
        at += rows.shape[0]
    return [[ref_of(index, lengths) for _, index in sorted(one)[:_EQUALS]] for one in found]


def _hypotheses(
    refs: Sequence[RowRef], equals: Sequence[Sequence[RowRef]]
) -> Iterator[tuple[int, int | None, RowRef]]:
    """(request, offset, row) for each equal row, simplest first; offset None: that one row everywhere."""
    pairs = [(ref, row) for ref, rows in zip(refs, equals, strict=True) for row in rows]
    offsets = {(row.request, row.position - ref.position) for ref, row in pairs}
    own = refs[0].request
    for request, offset in sorted(offsets, key=lambda pair: (pair[0] != own, abs(pair[1]), pair)):
        yield request, offset, RowRef(request, 0)
    for row in equals[0] if equals else ():
        yield row.request, None, row


def _apply(
    refs: Sequence[RowRef], request: int, offset: int | None, row: RowRef, pool: Rows
) -> list[RowRef | None]:
    if offset is None:
        return [row] * len(refs)
    length = pool[request].shape[0]
    moved = [ref.position + offset for ref in refs]
    return [RowRef(request, position) if 0 <= position < length else None for position in moved]


def _sources_of_request(
    scene: Scene,
    indices: Sequence[int],
    pool: Rows,
    equals: Sequence[Sequence[RowRef]],
    *,
    in_place: bool,
) -> list[RowRef | None]:
    """Where one request's failing rows (indices into ``scene.refs``) come from, None where unknown."""
    probes = sorted({0, len(indices) // 2, len(indices) - 1})[:_PROBES]
    probed = [equals[indices[i]] for i in probes]
    if not any(probed):
        return [None] * len(indices)
    refs = [scene.refs[i] for i in indices]
    engine, allowed = scene.engine[list(indices)], scene.limits()[list(indices)]
    for request, offset, row in _hypotheses([refs[i] for i in probes], probed):
        if not in_place and (request, offset) == (refs[0].request, 0):
            continue
        sources = _apply(refs, request, offset, row, pool)
        known = [i for i, source in enumerate(sources) if source is not None]
        if 2 * len(known) < len(refs):
            continue
        distances = distance(engine[known], take(pool, [source for source in sources if source is not None]))
        if int((distances <= allowed[known]).sum()) >= math.ceil(SHARE * len(known)):
            return sources
    return [equals[i][0] if equals[i] else None for i in indices]


def _sources(scene: Scene, pool: Rows, *, in_place: bool) -> list[RowRef | None]:
    """Where each failing row comes from: (m,) places in ``pool``."""
    sources: list[RowRef | None] = [None] * len(scene.refs)
    equals = _equals(scene, pool)
    for request in sorted({ref.request for ref in scene.refs}):
        indices = [i for i, ref in enumerate(scene.refs) if ref.request == request]
        found = _sources_of_request(scene, indices, pool, equals, in_place=in_place)
        for i, source in zip(indices, found, strict=True):
            sources[i] = source
    return sources


def _match(scene: Scene, pool: Rows, sources: Sequence[RowRef | None], text: str, rank: int) -> Match | None:
    valid = torch.tensor([source is not None for source in sources])
    if not bool(valid.any()):
        return None
    anywhere = next(source for source in sources if source is not None)
    return scene.match(text, take(pool, [source or anywhere for source in sources]), rank, valid=valid)


def _told(pairs: Sequence[tuple[RowRef, RowRef]]) -> str:
    """The first moves, one by one."""
    several = len({row.request for pair in pairs for row in pair}) > 1

    def name(row: RowRef) -> str:
        return f"request {row.request} position {row.position}" if several else f"position {row.position}"

    told = [f"{name(ref)} holds {name(source)}" for ref, source in pairs[:_TOLD]]
    return ", ".join(told) + (", …" if len(pairs) > _TOLD else "")


def _decode_in_prompt(pairs: Sequence[tuple[RowRef, RowRef]], prompt_lengths: Sequence[int] | None) -> bool:
    return prompt_lengths is not None and all(
        ref.position < prompt_lengths[ref.request] and source.position >= prompt_lengths[source.request]
        for ref, source in pairs
    )


def _name(pairs: Sequence[tuple[RowRef, RowRef]], prompt_lengths: Sequence[int] | None) -> str:
    """Say in words where rows come from: pairs of (place, source), at least one."""
    ref, source = pairs[0]
    if _decode_in_prompt(pairs, prompt_lengths):
        return f"holds decode rows where the prompt's belong ({_told(pairs)}): decode overwrote prefill"
    offsets = {b.position - a.position for a, b in pairs}
    same_request = all(a.request == b.request for a, b in pairs)
    if len(pairs) == 1:
        whose = "the same request" if same_request else f"request {source.request}"
        return f"equals the row of {whose} at position {source.position} of the reference"
    if len({b for _, b in pairs}) == 1:
        return f"is one row repeated: that of request {source.request} position {source.position} of the reference"
    if same_request and len(offsets) == 1:
        n = offsets.pop()
        rows = "one row" if abs(n) == 1 else f"{abs(n)} rows"
        example = f"position {ref.position} holds position {source.position}"
        return f"equals the reference's rows shifted by {rows} ({example})"
    owners = sorted({(a.request, b.request) for a, b in pairs})
    if offsets == {0}:
        if len({b for _, b in owners}) == 1:
            return f"equals the rows of request {source.request} of the reference, at the same positions"
        swapped = ", ".join(f"{a} holds {b}'s" for a, b in owners[:_TOLD])
        return f"holds other requests' rows (request {swapped})"
    return f"holds the reference's rows in other places ({_told(pairs)})"


def _pairs(scene: Scene, sources: Sequence[RowRef | None]) -> list[tuple[RowRef, RowRef]]:
    return [(ref, source) for ref, source in zip(scene.refs, sources, strict=True) if source is not None]


def moved_rows(scene: Scene) -> Iterator[Match]:
    """The failing rows are other rows of the same hook."""
    pool = scene.truth[scene.hook]
    sources = _sources(scene, pool, in_place=False)
    if pairs := _pairs(scene, sources):
        match = _match(scene, pool, sources, _name(pairs, scene.clues.prompt_lengths), MOVED)
        if match is not None:
            yield match


def stale_rows(scene: Scene) -> Iterator[Match]:
    """The failing rows are rows of a call before this one."""
    for label, captures in scene.clues.earlier:
        pool = captures.get(scene.hook, ())
        if not pool or any(tensor.ndim != 2 or tensor.shape[1] != scene.width for tensor in pool):
            continue
        sources = _sources(scene, pool, in_place=True)
        pairs = _pairs(scene, sources)
        if not pairs:
            continue
        where = "at the same places" if all(a == b for a, b in pairs) else _told(pairs)
        text = (
            f"holds rows of an earlier call, {label} ({where}): a buffer was read that this call did not fill"
        )
        match = _match(scene, pool, sources, text, STALE)
        if match is not None:
            yield match

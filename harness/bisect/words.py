"""What an investigation found, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.bisect.investigate import COMPUTED, DRIFT, READ, REFUSED, SOUND
from harness.bisect.stages import branch_of, carries_on, part_of
from harness.parity.text import figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.bisect.bench import Reading
    from harness.bisect.investigate import Narrowed, Result
    from harness.bisect.search import Culprit, Site
    from harness.bisect.settings import Tried

__all__ = ["healed_before", "needs", "sentence"]

_MANY = 10.0


def sentence(result: Result) -> str:
    """The one sentence it ends with."""
    return {SOUND: _sound, COMPUTED: _computed, READ: _read, DRIFT: _drift, REFUSED: _refused}[result.kind](
        result
    )


def needs(narrowed: Narrowed | None, tried: Sequence[Tried] = ()) -> Iterator[str]:
    """What the failure needs and what it does not, a line each."""
    if narrowed is None:
        return
    row, call = narrowed.row, narrowed.call[0]
    many = len(narrowed.failing)
    yield (
        f"{many} {'request is' if many == 1 else 'requests are'} wrong; looked at: request {row.request} "
        f"from position {row.position} on, its first wrong row"
    )
    if narrowed.disturbed:
        yield "only after another call: alone it is right"
    if narrowed.beside:
        names = ", ".join(map(str, narrowed.beside))
        yield f"needs request{'s' * (len(narrowed.beside) > 1)} {names} beside it in the batch"
    elif narrowed.beside is not None:
        at = narrowed.call[1].position
        moved = f": alone it is wrong from position {at} on" if at != row.position else ""
        yield f"needs no other request in the batch{moved}"
    if narrowed.cut is not None:
        length = len(call.prompts[narrowed.call[1].request])
        yield (
            f"needs nothing after that row: the prompt cut to {length} token{'s' * (length > 1)} fails, too"
            if narrowed.cut
            else "right if nothing comes after that row: needs the whole request"
        )
    if narrowed.unedited is not None:
        yield "wrong without its edits, too" if narrowed.unedited else "right without its edits"
    for one in tried:
        where = {True: "wrong there, too", False: "right there", None: f"not run ({one.error})"}[one.wrong]
        yield f"{one.name}: {where}"


def _sound(result: Result) -> str:
    text = (
        "Nothing is wrong by itself: the call gives the reference's values at every point, as it is and after another "
        "call."
    )
    if result.about == "change":
        text += " What failed is the change made by the edits (edited minus clean); only edited values are bisected."
    return text


def _refused(result: Result) -> str:
    return f"The engine contradicts itself before anything is compared: {result.error.splitlines()[0]}"


def _read(result: Result) -> str:
    assert result.found is not None  # noqa: S101 - there is no reading without a search
    hook = str(result.found.first)
    why = (
        "what is put in there reads back wrong, too"
        if result.stays
        else "the truth put in there spoils what was right, so what is read and set there is another value"
        if hook != "logits"
        else "they are put together wrongly"
    )
    return (
        f"Nothing is computed wrongly, the engine's own logits are right; {hook} is read wrongly "
        f"({_where(result.readings[()][hook])}): {why}."
    )


def _drift(result: Result) -> str:
    found = result.found
    if found is None or found.first is None or not found.culprits:
        return "No row is wrong by itself: each keeps its own bound, and only together they exceed one."
    stage = found.culprits[0].stage
    return (
        f"No point is wrong by itself: small errors add up. {found.first} is the first beyond its bound; with the "
        f"truth put in at the beginning of {stage.name}, all of {stage.name} is right."
    )


def _computed(result: Result) -> str:
    assert result.found is not None  # noqa: S101 - there is no site without a search
    (culprit, site), *others = result.found.wrong
    text = _site(culprit, site, result)
    same = [one for one in culprit.sites if carries_on(site.hook, one.hook)]
    if same:
        text += f"; so is {same[0].hook}, to which the same sum goes on"
    also = [one for _, one in others if one not in same]
    if also:
        shown = ", ".join(f"{one.hook} ({branch_of(one.hook)})" for one in also[:3])
        text += f"; wrong by itself as well: {shown}{', …' if len(also) > 3 else ''}"
    last, looked = result.found.last, result.found.culprits[-1]
    if last is not None and looked.stage != last:
        text += f"; the last wrong stage is {last.name}"
    return f"{text}."


def _site(culprit: Culprit, site: Site, result: Result) -> str:
    part = part_of(site.hook, list(result.readings[()]))
    name = culprit.stage.name
    what = part if part == name else f"{part} of {name}"
    if result.bench is not None and site.hook in result.bench.edited:
        what = f"{what}, or the edit there,"
    healed = healed_before(culprit, site)
    reading = result.readings[healed][site.hook]
    given = f"with the truth put in at {' and '.join(healed)}" if healed else "with nothing before it"
    text = f"{what[0].upper()}{what[1:]} is wrong by itself: {given}, {site.hook} is still wrong ({_where(reading)})"
    if len(culprit.sites) == 1 and culprit.heals:
        text += "; with the truth put in there, too, everything after it heals"
    return text


def healed_before(culprit: Culprit, site: Site) -> tuple[str, ...]:
    """Where the truth was put in when a site was found wrong."""
    start = () if culprit.stage.start is None else (culprit.stage.start,)
    before = culprit.sites[: culprit.sites.index(site)]
    return (*start, *(one.hook for one in before))


def _where(reading: Reading) -> str:
    times = f"{reading.share:,.0f}" if reading.share >= _MANY else f"{reading.share:.2g}"
    row = reading.where
    return (
        f"request {row.request} position {row.position}: error {figure(reading.err)}, {times} times its bound of "
        f"{figure(reading.bound)}"
    )

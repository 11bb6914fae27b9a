"""What an investigation leaves: ``bisect.json``, ``figure.svg``, a page, and a folder that shows the fault alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.bisect.bench import Bench
from harness.bisect.figure import MOST_LINES, probe_figure
from harness.bisect.stages import LOGITS, after, branch_of, part_of
from harness.bisect.words import healed_before, needs, sentence
from harness.errors import UsageError
from harness.report.pages import page, write_page
from harness.store.writer import dump

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.backend import BootConfig
    from harness.bisect.investigate import Result
    from harness.bisect.settings import Tried

__all__ = ["FOLDER", "Subject", "write"]

FOLDER = "bisect"
_SCRIPT = Path(__file__).with_name("again.py")


@dataclass(frozen=True)
class Subject:
    """What was investigated.

    Attributes:
        case, label: id of the case, and which of its comparisons.
        began: where the run's own explanation says it began.
        config: the engine that was booted for it.
        rerun: command that runs the case again; may be empty.
        kind: of the comparison, see :class:`harness.artifacts.Evidence`.
    """

    case: str
    label: str
    began: str
    config: BootConfig
    rerun: str = ""
    kind: str = "values"


def write(folder: Path, subject: Subject, result: Result, tried: Sequence[Tried] = ()) -> Path:
    """Write everything into ``folder``.

    Returns:
        The page.

    Raises:
        UsageError: the folder cannot be written.
    """
    figure = probe_figure(_drawn(result), list(result.readings.get((), {})), _site_hooks(result))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bisect.json").write_text(dump(record(subject, result, tried)) + "\n", encoding="utf-8")
        if figure:
            (folder / "figure.svg").write_text(str(figure), encoding="utf-8")
        if result.narrowed is not None:
            _write_repro(folder / "repro", subject, result)
    except OSError as error:
        msg = f"cannot write into {str(folder)!r}: {error.strerror or error}"
        raise UsageError(msg) from error
    values = {
        "subject": subject,
        "kind": result.kind,
        "sentence": sentence(result),
        "needs": list(needs(result.narrowed, tried)),
        "figure": figure,
        "probes": _table(result),
        "points": _site_hooks(result)
        or ([result.found.first] if result.found and result.found.first else []),
        "repro": result.narrowed is not None,
        "engine": subject.config.id,
    }
    return write_page(page("bisect.html.j2", values), folder / "index.html")


def record(subject: Subject, result: Result, tried: Sequence[Tried]) -> dict[str, Any]:
    """All of it, JSON-able; engine paths are left out."""
    found, narrowed = result.found, result.narrowed
    return {
        "schema": 1,
        "case": subject.case,
        "label": subject.label,
        "began": subject.began,
        "engine": _engine(subject.config),
        "kind": result.kind,
        "sentence": sentence(result),
        "needs": list(needs(narrowed, tried)),
        "first_wrong": found.first if found else None,
        "sites": [
            {
                "hook": site.hook,
                "stage": culprit.stage.name,
                "branch": branch_of(site.hook),
                "part": part_of(site.hook, list(result.readings[()])),
                "given": list(healed_before(culprit, site)),
                **asdict(result.readings[healed_before(culprit, site)][site.hook]),
                "heals": culprit.heals,
            }
            for culprit, site in (found.wrong if found else ())
        ],
        "last_stage": found.last.name if found and found.last else None,
        "row": asdict(narrowed.row) if narrowed else None,
        "failing_requests": list(narrowed.failing) if narrowed else [],
        "disturbed": narrowed.disturbed if narrowed else False,
        "beside": None if narrowed is None or narrowed.beside is None else list(narrowed.beside),
        "cut": narrowed.cut if narrowed else None,
        "unedited": narrowed.unedited if narrowed else None,
        "settings": [asdict(one) for one in tried],
        "probes": [
            {"put_in_at": list(healed), "points": {h: [r.err, r.bound] for h, r in readings.items()}}
            for healed, readings in result.readings.items()
        ],
        "runs": result.runs,
    }


def _engine(config: BootConfig) -> dict[str, Any]:
    engine: dict[str, Any] = json.loads(config.to_json()) | {"path": ""}
    return engine


def _site_hooks(result: Result) -> list[str]:
    return [site.hook for _, site in result.found.wrong] if result.found else []


def _drawn(result: Result) -> list[tuple[tuple[str, ...], Mapping[str, float]]]:
    """The probes that tell the story, the untouched run and the sites' own first."""
    order: list[tuple[str, ...]] = [()]
    for culprit in result.found.culprits if result.found else ():
        start = () if culprit.stage.start is None else (culprit.stage.start,)
        sites = tuple(site.hook for site in culprit.sites)
        order += [start, (*start, *sites)]
    order += list(result.readings)
    chosen = [healed for healed in dict.fromkeys(order) if healed in result.readings]
    return [
        (healed, {hook: reading.share for hook, reading in result.readings[healed].items()})
        for healed in chosen[:MOST_LINES]
    ]


def _table(result: Result) -> list[dict[str, Any]]:
    """A line per probe: where the truth was put in, the first point still wrong, how many are."""
    lines = []
    for healed, readings in result.readings.items():
        judged = after(healed, list(readings))
        wrong = [hook for hook in judged if not readings[hook].share <= 1]
        first = readings[wrong[0]] if wrong else None
        lines.append(
            {
                "put": " and ".join(healed) or "nowhere: as it is",
                "first": wrong[0] if wrong else "",
                "err": first,
                "wrong": len(wrong),
                "points": len(judged),
            }
        )
    return lines


def _write_repro(folder: Path, subject: Subject, result: Result) -> None:
    """The smallest failing call, the truth's row at every point, and the script that runs it."""
    from safetensors.torch import save

    assert result.narrowed is not None  # noqa: S101 - the caller has looked
    assert result.bench is not None  # noqa: S101
    call, row = result.narrowed.call
    bench = Bench(result.bench.parity, call, disturbed=result.narrowed.disturbed, rows=[row])
    healed, wrong, shown_by = _story(result)
    truth = {
        hook: bench.sides.truth[hook][row.request][row.position].contiguous().cpu() for hook in bench.hooks
    }
    text = {
        "schema": 1,
        "case": subject.case,
        "sentence": sentence(result),
        "engine": _engine(subject.config),
        "prompts": [list(ids) for ids in call.prompts],
        "new_tokens": call.new_tokens,
        "intervene": None if call.intervene is None else [dict(one or {}) or None for one in call.intervene],
        "disturbed": result.narrowed.disturbed,
        "row": [row.request, row.position],
        "healed": healed,
        "wrong": wrong,
        "shown_by": shown_by,
        "bounds": {hook: bound for hook, bound in bench.row_bounds().items() if hook != LOGITS},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "truth.safetensors").write_bytes(save(truth))
    (folder / "call.json").write_text(dump(text), encoding="utf-8")
    (folder / "repro.py").write_text(_SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")


def _story(result: Result) -> tuple[list[list[str]], dict[str, str], dict[str, int]]:
    """Runs to make (where the truth is put in), what to say beside points, and point → the run that shows it."""
    healed: list[list[str]] = [[]]
    found = result.found
    if found is None or not found.wrong:
        first = str(found.first) if found and found.first else LOGITS
        if first == LOGITS:
            return healed, {}, {}
        return [[], [first]], {first: f"{result.kind} wrongly"}, {first: 0}
    culprit = next(one for one in found.culprits if one.sites)
    start = [] if culprit.stage.start is None else [culprit.stage.start]
    sites = [site.hook for site in culprit.sites if site.hook != LOGITS]
    if start:
        healed.append(start)
    healed.append([*start, *sites])
    return healed, dict.fromkeys(sites, "wrong by itself"), {hook: len(healed) - 2 for hook in sites[:1]}

"""An audit as Markdown: the whole of it, and the part to paste into an issue of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.elsewhere import split_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.audit.findings import Audit, Failure, Point, Worst

__all__ = ["audit_text"]

_NONE = "not applicable"
#: What engines say of themselves that is told elsewhere, or is of no use here.
_UNSAID = ("backend", "boot_seconds", "capabilities", "hook_points")
#: Characters of an error and failures of one kind that are shown; the rest is in audit.json.
_LONGEST, _MOST = 400, 12


def audit_text(audit: Audit) -> str:
    """All of it."""
    name = split_name(audit.backend)[0]
    parts = [
        f"# Audit of {name}, {audit.date}\n",
        f"**{audit.verdict[0].upper()}{audit.verdict[1:]}.**\n",
        _booted(audit),
        _block(audit.command),
        "## Suites\n",
        _suites(audit),
        "## What it declares, and what was found\n",
        _points(audit),
        _legend(audit),
        _flags(audit),
        "## Where failures begin\n",
        _failures(audit),
        "## What capturing costs\n",
        _overhead(audit),
        "## For an issue of the library\n",
        _upstream(audit, name),
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], right: int = 0) -> str:
    """A table; the last ``right`` columns hold numbers."""
    rule = ["---"] * (len(head) - right) + ["--:"] * right
    lines = [head, rule, *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _block(text: str) -> str:
    return f"```\n{text}\n```\n"


def _inline(text: str) -> str:
    """On one line, short, and nothing in it Markdown to its reader."""
    short = " ".join(text.split())
    short = short if len(short) <= _LONGEST else short[: _LONGEST - 1] + "…"
    for mark in "\\`*_|<>[]":
        short = short.replace(mark, f"\\{mark}")
    return short


def _booted(audit: Audit) -> str:
    """A line per engine, and one for this side."""
    lines = []
    for boot in audit.boots:
        what = f"{boot['model']}, {boot['dtype']}"
        if boot["error"]:
            lines.append(f"- {what}: **did not boot**: {_inline(boot['error'])}")
        else:
            said = {k: v for k, v in boot["describe"].items() if k not in _UNSAID}
            lines.append(f"- {what}: {', '.join(f'{k} {v}' for k, v in said.items())}")
    beside = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    return "\n".join(dict.fromkeys([*lines, f"- judged by {beside}", ""]))


def _suites(audit: Audit) -> str:
    rows = [(s.name, s.verdict, s.passed, s.failed, s.error, s.not_applicable, s.other) for s in audit.suites]
    return _table(("suite", "verdict", "passed", "failed", "errors", _NONE, "other"), rows, right=5)


def _points(audit: Audit) -> str:
    present = [
        p for p in audit.points if p.capture or p.ops or p.captured.comparisons or p.edited.comparisons
    ]
    rows = [(f"`{p.template}`", _captured(p), _found(p.captured), _ops(p), _found(p.edited)) for p in present]
    absent = ", ".join(f"`{p.template}`" for p in audit.points if p not in present)
    table = _table(("point", "capture", "found", "edits", "found in edited calls"), rows)
    return table + (f"\nNot declared, and so {_NONE}: {absent}.\n" if absent else "")


def _captured(point: Point) -> str:
    if not point.capture:
        return _NONE
    return "as the module has it" if point.emitted else "yes"


def _ops(point: Point) -> str:
    if point.template == "logits":
        return "—"
    return ", ".join(point.ops) if point.ops else _NONE


def _found(worst: Worst) -> str:
    if not worst.comparisons:
        return "—"
    said = f"{worst.comparisons} compared, worst {worst.share:.2f} of its bound"
    return f"**{worst.failed} failed**, {said}" if worst.failed else said


def _legend(audit: Audit) -> str:
    return (
        f"A comparison passes at 1 or less of its bound, {audit.k:g} times the reference's own error or, where that is "
        "larger, the dtype's floor. A dash: nothing was compared.\n"
    )


def _flags(audit: Audit) -> str:
    rows = [
        (flag.name, "yes" if flag.declared else _NONE, flag.meaning, flag.skipped or "")
        for flag in audit.flags
    ]
    return _table(("capability", "declared", "meaning", "cases left out"), rows, right=1)


def _failures(audit: Audit) -> str:
    """One line per way of failing: a backend that does not boot fails every case alike."""
    if not audit.failures:
        return "None.\n"
    alike: dict[tuple[str, str], list[str]] = {}
    for one in audit.failures:
        alike.setdefault((one.outcome, one.begins), []).append(one.title)
    lines = []
    for (outcome, begins), titles in list(alike.items())[:_MOST]:
        what = _inline(titles[0]) if len(titles) == 1 else f"{len(titles)} cases"
        lines.append(f"- {what} ({outcome}): {_inline(begins)}")
    if len(alike) > _MOST:
        lines.append(f"- … and {len(alike) - _MOST} more, in audit.json")
    return "\n".join([*lines, ""])


def _overhead(audit: Audit) -> str:
    if not audit.overhead:
        return "Not measured.\n"
    rows: list[tuple[Any, ...]] = [
        (
            one.backend,
            one.model,
            one.rows,
            one.points,
            f"{one.plain * 1e3:.1f} ms",
            f"{one.captured * 1e3:.1f} ms",
            f"{one.ratio:.2f} ({one.quartiles[0]:.2f} to {one.quartiles[1]:.2f})",
        )
        for one in audit.overhead
    ]
    head = ("backend", "model", "rows", "points", "plain forward", "capturing", "ratio (quartiles)")
    return _table(head, rows, right=5)


def _shown(audit: Audit, failure: Failure) -> list[str]:
    """The library by itself where that shows it, else the case."""
    least = audit.smallest
    if least is None:
        return ["To see it, in a clone of the harness:", "", "```", failure.rerun, "```"]
    edits = ", ".join(f"{_words(spec)} at `{at}`" for at, spec in least.edits.items()) or "no edit"
    said = (
        f"The smallest call that shows it: `{least.hook}` of the prompt {list(least.prompt)}, {edits}. "
        f"Row {least.row} begins {_values(least.found)} where transformers has {_values(least.expected)}, "
        f"{least.share:.3g} times the bound."
    )
    if audit.script:
        return [said, "", "```python", audit.script, "```"]
    return [said, "", "In a clone of the harness:", "", "```", failure.rerun, "```"]


def _words(spec: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in spec.values())


def _values(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)


def _upstream(audit: Audit, name: str) -> str:
    """Figures, versions and the shortest way to see it, in a quotation that can be copied as it is."""
    counted = [
        f"- {s.name}: {s.passed} passed, {s.failed} failed, {s.error} could not be judged, {s.not_applicable} {_NONE}"
        for s in audit.suites
    ]
    lines = [
        f"**{name}: {audit.verdict}**",
        "",
        "Compared with transformers, hook by hook and row by row, by vLLM Parity Harness: an error may be",
        f"{audit.k:g} times what the reference itself makes at this dtype.",
        "",
        _booted(audit).rstrip(),
        *counted,
    ]
    bad = [p for p in audit.points if p.captured.failed or p.edited.failed]
    lines += [f"- `{p.template}`: {_found(p.captured)}; edited: {_found(p.edited)}" for p in bad]
    broken = [one for one in audit.failures if one.outcome == "failed"] or audit.failures
    if broken:
        lines += ["", f"It begins: {_inline(broken[0].begins)}", "", *_shown(audit, broken[0])]
    return "\n".join(f"> {line}".rstrip() for line in "\n".join(lines).split("\n")) + "\n"

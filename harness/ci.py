"""What a CI shows of a run: properties for JUnit XML, GitHub's step summary, and annotations at the lines of tests."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import hook_rows, read_run, tally, why_not_green

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from harness.backend import BootConfig
    from harness.store import CaseResult, RunRecords

__all__ = ["began", "error_commands", "properties", "publish", "step_summary"]

#: GitHub shows no more annotations of one step than this.
_ANNOTATIONS = 10
#: Failing cases listed, and characters of what is said about each: a step summary may have 1 MiB.
_LISTED, _SAID = 50, 600
_BAD = ("failed", "error", "lost")


def properties(found: BootConfig, verdicts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What JUnit XML says of a case beside its outcome: its engine, its worst ratio to a bound, where it failed."""
    said = [
        ("model", found.model),
        ("dtype", found.short_dtype),
        ("mode", found.mode),
        ("topology", str(found.topology)),
        ("backend", found.backend),
        ("engine", found.id),
    ]
    rows = [row for entry in verdicts for row in hook_rows(entry.get("verdict") or {})]
    if worst := max(rows, key=lambda row: row.badness, default=None):
        said += [("worst_hook", worst.hook), ("worst_ratio", _ratio(worst.ratio))]
    return said + [("began", sentence) for sentence in _sentences(verdicts)]


def began(case: CaseResult) -> str:
    """Where a case's failure began, or else its error in a line, or the reason why it has no verdict."""
    return "; ".join(_sentences(case.verdicts)) or case.said


def _sentences(verdicts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in verdicts:
        divergence = (entry.get("verdict") or {}).get("divergence")
        if divergence and divergence.get("sentence"):
            yield str(divergence["sentence"])


def _ratio(value: float) -> str:
    return "no number" if math.isnan(value) else f"{value:.3g}"


# --- GitHub


def publish(folder: Path, root: Path, environ: Mapping[str, str]) -> list[str]:
    """Append to the step summary, where there is one.

    Args:
        folder: of the run.
        root: what the files of cases are relative to.
        environ: the CI's variables; what they say of GitHub decides what is done.

    Returns:
        Lines for standard output: annotations on GitHub, else none.
    """
    records = read_run(folder)
    lines = []
    if target := environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(step_summary(records, environ))
        except OSError as error:
            lines.append(f"no step summary: {target}: {error.strerror}")
    if environ.get("GITHUB_ACTIONS") == "true":
        lines += error_commands(records, root, environ)
    return lines


def step_summary(records: RunRecords, environ: Mapping[str, str]) -> str:
    """Markdown: the verdict, the counts, and each failing case with where it began."""
    problems = why_not_green(records)
    verdict = f"❌ Not green: {_text('; '.join(problems))}" if problems else "✅ Parity holds"
    profile = _text(str(records.run.get("profile") or ""))
    lines = [f"## vLLM parity, {profile}", "", f"**{verdict}**", "", *_counts(records), ""]
    bad = [case for case in records.cases if case.outcome in _BAD]
    if bad:
        lines += ["| case | outcome | where it began |", "|---|---|---|"]
        lines += [f"| {_text(case.id)} | {case.outcome} | {_text(began(case))} |" for case in bad[:_LISTED]]
        if more := len(bad) - _LISTED:
            lines += [f"| and {more} more | | |"] if more > 0 else []
        lines += ["", "Run one of them alone:", ""]
        lines += [f"    {' '.join(case.rerun.split())}" for case in bad[:3] if case.rerun]
        lines += [""]
    lines += [_where(records, environ), ""]
    return "\n".join(lines)


def _counts(records: RunRecords) -> list[str]:
    counted = tally(records)
    lines = [
        "| suite | declared | passed | failed | error | lost | not run | skipped |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for name, suite in [*counted.suites.items(), ("**all**", counted.total)]:
        skipped = ", ".join(f"{count} {kind}" for kind, count in sorted(suite.skipped.items())) or "0"
        shown = name if suite is counted.total else _text(name)
        figures = (suite.declared, suite.passed, suite.failed, suite.error, suite.lost, suite.not_run)
        lines.append(f"| {shown} | {' | '.join(map(str, figures))} | {_text(skipped)} |")
    return lines


def _where(records: RunRecords, environ: Mapping[str, str]) -> str:
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")
    name = _text(records.folder.name)
    if not all(environ.get(one) for one in names):
        return f"The report is `index.html` in the run's folder {name}."
    server, repository, run = (environ[one] for one in names)
    url = f"{server}/{repository}/actions/runs/{run}#artifacts"
    return f"The report is `index.html` in {name}, among the [artifacts]({url}) of this job."


def _text(value: str) -> str:
    """Plain text in a cell of a Markdown table: nothing in it is markup, HTML, or a mention of anybody."""
    flat = " ".join(value.split())
    flat = flat if len(flat) <= _SAID else f"{flat[: _SAID - 1]}…"
    escaped = re.sub(r"([\\`*_{}\[\]()#+!|~-])", r"\\\1", html.escape(flat, quote=False))
    return escaped.replace("@", "&#64;")


def error_commands(records: RunRecords, root: Path, environ: Mapping[str, str]) -> list[str]:
    """GitHub's workflow commands, one per failing case, at the line of its test; at most ten."""
    lines: list[str] = []
    for case in records.cases:
        if case.outcome in _BAD and len(lines) < _ANNOTATIONS:
            place = {"file": _file(case, root, environ), "line": str(case.line or 1), "title": case.id}
            said = ",".join(f"{key}={_property(value)}" for key, value in place.items() if value)
            lines.append(f"::error {said}::{_data(f'{case.outcome}: {began(case)}'[:_SAID])}")
    return lines


def _file(case: CaseResult, root: Path, environ: Mapping[str, str]) -> str:
    """Relative to the checkout, as GitHub wants it."""
    path = (root / (case.file or case.id.partition("::")[0])).resolve()
    workspace = Path(environ.get("GITHUB_WORKSPACE") or root).resolve()
    return path.relative_to(workspace).as_posix() if path.is_relative_to(workspace) else path.as_posix()


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")

"""The sentences that say how two runs differ, the same in the terminal and on the page."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from harness.report.numbers import count

if TYPE_CHECKING:
    from collections.abc import Iterable

    from harness.history.compare import Comparison, Growth, Slower
    from harness.history.growth import Rule
    from harness.store import CaseResult

__all__ = ["amount", "by_check", "growth_words", "headline", "kind_words", "rule_words", "settings_words"]

_COMMIT = 10  # digits of a commit, as in the report


def headline(found: Comparison) -> str:
    """The outcome in a few words."""
    n = found.n_regressions
    if n:
        return f"{n} regression{'' if n == 1 else 's'}"
    return "no regression"


def rule_words(rule: Rule, n_baselines: int = 0) -> str:
    """How growth was told from noise, in a sentence."""
    origin = {
        "alike": "both runs had the same versions and machine, where errors repeat to the bit",
        "unlike": "versions, machine or engine differ, so the same error may be rounded in another way",
        "measured": f"spread measured over {n_baselines + 1} runs like the first",
        "given": "as asked for",
    }[rule.name]
    hook = f"more than {rule.step:.2g} of the bound"
    if rule.factor > 1:
        hook += f" and {rule.factor:.3g} times"
    return f"a hook has grown by {hook}, a comparison by {rule.mean:.3g} times on average ({origin})"


def kind_words(slower: Slower) -> str:
    """``boot of x``, ``all 12 cases``."""
    if slower.kind.startswith("all"):
        return f"{slower.kind}, {slower.name}"
    return f"{slower.kind} {slower.name}"


def settings_words(name: str, text: str, limit: int = 100) -> str:
    """A setting's value, short; nothing is said to be absent."""
    if name == "commit":
        text = text[:_COMMIT]
    return (text if len(text) <= limit else f"{text[:limit].rstrip()}…") or "(none)"


def growth_words(growth: Growth) -> str:
    """What grew, as ``3 of 14 hooks, first blocks.1.hook_out``."""
    if not growth.n_grown:
        return (
            f"{growth.mean:.2f} times on average over {count(growth.n_hooks, 'hook')}, at most "
            f"{growth.mean_limit:.2f} is noise; most at {growth.after.hook}"
        )
    grew = f"{growth.n_grown} of {count(growth.n_hooks, 'hook')}, first {growth.first}"
    return grew if growth.after.hook == growth.first else f"{grew}, most {growth.after.hook}"


def amount(value: float, unit: str) -> str:
    """A budget's figure: bytes in powers of 1024, or a ratio."""
    if unit != "B":
        return f"{value:.3f}"
    size, name = abs(value), "B"
    for name in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or name == "GiB":
            break
        size /= 1024
    sign = "-" if value < 0 else ""
    return f"{sign}{size:.0f} B" if name == "B" else f"{sign}{size:.1f} {name}"


def by_check(cases: Iterable[CaseResult]) -> list[tuple[str, int]]:
    """``suite / check`` and how many cases of it, in the order they came."""
    return list(Counter(f"{case.suite} / {case.check}" if case.check else case.id for case in cases).items())

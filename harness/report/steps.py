"""What a person does about a case that is not good: commands, the files it left, and lines that load them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from harness.report.numbers import count, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store import CaseResult

__all__ = ["Files", "Step", "files", "loading", "steps"]


@dataclass(frozen=True)
class Step:
    """Something to copy."""

    what: str  #: what it does
    text: str


@dataclass(frozen=True)
class Files:
    """What one failed comparison left; paths are relative to the run's folder."""

    label: str
    tensors: str
    call: str
    holds: str  #: how much of what, in words
    error: str = ""  #: why there are none

    @property
    def links(self) -> tuple[str, str]:
        """Of both paths, from the page, which lies in that folder."""
        # Records come from anywhere: a path that begins with two slashes would be another machine.
        return quote(f"./{self.tensors}"), quote(f"./{self.call}")


def steps(case: CaseResult, run: str) -> list[Step]:
    """From a case to its tensors and to its cause, in that order; empty where it kept none.

    Args:
        case: as recorded.
        run: the run's folder as commands name it, from where the run was started.
    """
    kept = next((entry for entry in case.artifacts if _is_written(entry)), None)
    if case.outcome == "passed" or kept is None:
        return []
    where = f"{shlex.quote(case.id)} --run {shlex.quote(run)}"
    return [
        Step(
            "See the wrong rows channel by channel, and get a script that makes just this call",
            f"vllm-parity repro {where}",
        ),
        *([Step("Hold them in Python", python)] if (python := loading(case, kept, run)) else []),
        Step("Find what is wrong by itself", f"vllm-parity bisect {where}"),
    ]


def files(case: CaseResult) -> list[Files]:
    """What each failed comparison of a case left, or why it left nothing."""
    return [_files(case, entry) for entry in case.artifacts]


def _files(case: CaseResult, entry: Mapping[str, Any]) -> Files:
    label = str(entry.get("label") or "comparison")
    if not _is_written(entry):
        return Files(label, "", "", "", error=str(entry.get("error") or "nothing was recorded"))
    said = []
    if isinstance(hooks := entry.get("hooks"), int):
        said.append(count(hooks, "hook"))
    if isinstance(n_bytes := entry.get("bytes"), int):
        said.append(size(n_bytes))
    if isinstance(left := entry.get("left_out"), int) and left:
        said.append(f"{count(left, 'failing hook')} found no room")
    engine = str(entry.get("engine") or "")
    if engine and engine != case.engine:
        said.append(f"engine {engine}")
    return Files(label, str(entry["tensors"]), str(entry["call"]), ", ".join(said))


def _is_written(entry: Mapping[str, Any]) -> bool:
    return "call" in entry and "tensors" in entry


def loading(case: CaseResult, entry: Mapping[str, Any], run: str) -> str:
    """Python that holds the rows of the hook where a comparison began to fail; empty where no record says which.

    Names are written as literals, because records come from anywhere and this is made to be run.
    """
    first = entry.get("first")
    hook, rows = (first.get("hook"), first.get("rows")) if isinstance(first, dict) else (_began(case), None)
    if not hook:
        return ""
    what = "err(E) of each row kept"
    if isinstance(rows, list) and all(isinstance(row, list) and len(row) == 2 for row in rows):
        what = "err(E) of rows " + ", ".join(f"{int(request)}:{int(row)}" for request, row in rows)
    lines = [
        "from safetensors.torch import load_file",
        "",
        f"kept = load_file({f'{run}/' + str(entry['tensors'])!r})",
        f"engine, truth = kept[{str(hook) + '/engine'!r}].double(), kept[{str(hook) + '/truth'!r}].double()",
        f"print((engine - truth).norm(dim=1) / truth.norm(dim=1))  # {what}",
    ]
    return "\n".join(lines)


def _began(case: CaseResult) -> str:
    """The first failing hook of the first failed comparison: the one that is kept first."""
    for one in case.verdicts:
        verdict = one.get("verdict") or {}
        if not verdict.get("passed", True):
            hooks = verdict.get("hooks") or ()
            return next((str(hook.get("hook")) for hook in hooks if not hook.get("passed", True)), "")
    return ""

"""A pytest item as a case: its id, its declaration, the command that runs it alone, and how it ended."""

from __future__ import annotations

import itertools
import shlex
from typing import TYPE_CHECKING, Any

from harness.store.writer import SKIP_CLASSES

if TYPE_CHECKING:
    import pytest

    from harness.backend import BootConfig

__all__ = ["case_id", "conclude", "config_of", "declaration", "rerun"]


def config_of(item: pytest.Item) -> BootConfig | None:
    """The engine an item runs on; None for a test without one."""
    from harness.backend import BootConfig

    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("parity") if callspec is not None else None
    # A test narrowed to engines that this run has none of is skipped by pytest itself, with no engine.
    return found if isinstance(found, BootConfig) else None


def case_id(item: pytest.Item) -> str:
    """What the records call a case: pytest's node id."""
    return item.nodeid


def declaration(item: pytest.Item, found: BootConfig, profile: str) -> dict[str, Any]:
    """What is known of a case before it runs; ``file`` is relative to pytest's root, ``line`` counts from 1."""
    function = getattr(item, "function", None)
    title = (getattr(function, "__doc__", "") or "").strip().splitlines()
    file, line, _ = item.location
    return {
        "id": case_id(item),
        "suite": item.path.stem.removeprefix("test_"),
        "check": getattr(item, "originalname", item.name).removeprefix("test_"),
        "title": title[0] if title else item.name,
        "model": found.model,
        "dtype": found.short_dtype,
        "mode": found.mode,
        "topology": str(found.topology),
        "backend": found.backend,
        "engine": found.id,
        "step": found.max_num_batched_tokens,
        "rerun": rerun(item, found, profile),
        "file": file,
        "line": (line or 0) + 1,
    }


def rerun(item: pytest.Item, found: BootConfig, profile: str) -> str:
    """A command that runs this case alone, whatever the options of this run were."""
    options = {
        "--model": found.model,
        "--dtype": found.short_dtype,
        "--engine-mode": found.mode,
        "--topology": str(found.topology),
    }
    if found.backend != "vllm":
        options["--backend"] = found.backend
    if profile != "smoke":
        options["--profile"] = profile
    return shlex.join(["pytest", case_id(item), *itertools.chain.from_iterable(options.items())])


def conclude(phases: dict[str, pytest.TestReport]) -> dict[str, Any]:
    """Outcome, reason and message of a finished case, from the reports of its phases."""
    for phase in phases.values():
        if phase.failed:
            broken = phase.when == "call" and getattr(phase, "parity_broken", False)
            return {"outcome": "failed" if broken else "error", "message": str(phase.longrepr)}
    for phase in phases.values():
        if bug := getattr(phase, "known_bug", None):
            return {
                "outcome": "skipped",
                "skip_class": "known-bug",
                "reason": bug,
                "message": str(phase.longrepr),
            }
        if phase.skipped:
            reason = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else str(phase.longrepr)
            reason = reason.removeprefix("Skipped: ")
            kind, _, rest = reason.partition(": ")
            known = kind in SKIP_CLASSES
            skip = {"skip_class": kind if known else None, "reason": rest if known else reason}
            return {"outcome": "skipped", **skip}
    if "call" not in phases:
        return {"outcome": "error", "message": "the case was interrupted"}
    return {"outcome": "passed"}

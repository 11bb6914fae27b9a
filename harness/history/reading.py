"""Records read for comparing, with whatever an older version or another program may have left in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.store import RESULTS, read_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.store import RunRecords

__all__ = ["as_mapping", "read_records", "run_name"]


def read_records(folder: Path | str) -> RunRecords:
    """Read a run; keys that an older version did not write are simply absent from it.

    Raises:
        UsageError: the folder holds no results, those of a newer schema, or a file that is no run's.
    """
    try:
        records = read_run(folder)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        reason = f"{type(error).__name__}: {error}"
        msg = (
            f"{str(folder)!r} has a {RESULTS} that cannot be read ({reason}): no run of this harness wrote it"
        )
        raise UsageError(msg) from error
    if not records.run and not records.cases:
        lines = f", {len(records.damaged)} damaged lines" if records.damaged else ""
        msg = f"{str(folder)!r} has a {RESULTS} without a run in it{lines}: name the folder of a run"
        raise UsageError(msg)
    return records


def run_name(records: RunRecords) -> str:
    """What a run is called: its id, or its folder where the record of it was lost."""
    return str(records.run.get("run_id") or records.folder.resolve().name)


def as_mapping(value: Any) -> Mapping[str, Any]:
    """The JSON object, or an empty one for anything else."""
    return value if isinstance(value, dict) else {}

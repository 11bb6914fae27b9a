"""Families by points as Markdown: how near each came to the noise, for captures, edits and logits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from harness.models import load_config, resolve
from harness.points import PATTERN, TEMPLATES, HookPoint
from harness.reference.families import tree_of_config
from harness.store.frames import to_frames

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.store.reader import RunRecords

__all__ = ["family_tables"]

_LOGITS = "logits"
_NOT_ASKED = "not asked for in this run"
_BROKEN = "no verdict: a case of this model failed or could not be judged"
#: Labels of verdicts on edited calls end in these.
_EDITED = (": values", ": change")
_HEAD = """\
Each entry is the smallest *k* that would have let the worst gate of that point pass, *err(E) / max(err(R), floor)*:
first of captures, then of edited calls (logits of both count as the first). At most {k:g} is parity; 1 is the
reference's own error.
"""


def family_tables(runs: Sequence[RunRecords]) -> str:
    """One table per dtype and mode of some runs, models by points; no entry is empty without its reason below.

    Args:
        runs: of the same models, see :func:`harness.store.read_run`.
    """
    import pandas as pd  # slow to import

    frames = [to_frames(records) for records in runs]
    cases, hooks = (pd.concat([pair[part] for pair in frames]) for part in (0, 1))
    # Of no comparison at all, too: what maps nothing keeps its dtype.
    judged = hooks[~hooks["verdict"].map(lambda label: label.startswith("planted")).astype(bool)].copy()
    judged["point"] = judged["hook"].map(_point)
    judged["edited"] = judged["verdict"].map(lambda label: label.endswith(_EDITED))
    models = list(dict.fromkeys(cases["model"]))
    notes: dict[str, int] = {}
    parts = [_HEAD.format(k=max(float(records.run.get("k", 3.0)) for records in runs))]
    parts += ["```", *(str(records.run.get("command", "")) for records in runs), "```\n"]
    for (dtype, mode), declared in cases.groupby(["dtype", "mode"], sort=True):
        rows = judged[(judged["dtype"] == dtype) & (judged["mode"] == mode)]
        broken = set(declared["model"][~declared["outcome"].isin(["passed", "skipped"])])
        worst = rows.groupby(["model", "point", "edited"])["required_k"].max().to_dict()
        present = [
            point
            for point in (*TEMPLATES, PATTERN, _LOGITS)
            if any((m, point, e) in worst for m in models for e in (0, 1))
        ]
        ran = [model for model in models if model in set(declared["model"])]
        parts.append(f"## {dtype}, {mode}\n")
        parts.append(_row(["model", *(point.removeprefix("blocks.{i}.") for point in present)]))
        parts.append(_row(["---"] * (1 + len(present))))
        for model in ran:
            otherwise = _BROKEN if model in broken else _NOT_ASKED
            missing = _missing(model)
            entries = [_cell(worst, model, point, missing.get(point, otherwise), notes) for point in present]
            parts.append(_row([f"{model} (broken)" if model in broken else model, *entries]))
        parts.append("")
    spent = cases.groupby("model")["seconds"].sum()
    parts.append("## Time\n")
    parts.append(
        "Seconds, boots among them: " + ", ".join(f"{model} {spent[model]:.0f}" for model in models) + ".\n"
    )
    parts += [f"[{number}] {reason}  " for reason, number in notes.items()]
    return "\n".join(parts) + "\n"


def _point(hook: str) -> str:
    return _LOGITS if hook == _LOGITS else HookPoint.parse(hook).template


def _missing(model: str) -> dict[str, str]:
    """Template → why a model has no such point, on either side."""
    from harness.vllm.overlays import get_overlay

    config = load_config(resolve(model).fetch())
    return {**tree_of_config(config).lacks, **get_overlay(config.architectures[0]).lacks}


def _cell(
    worst: Mapping[Any, float],
    model: str,
    point: str,
    reason: str,
    notes: dict[str, int],
) -> str:
    found = [worst.get((model, point, edited)) for edited in (False, True)]
    if found == [None, None]:
        return f"[{notes.setdefault(reason, len(notes) + 1)}]"
    return " / ".join("-" if k is None or math.isnan(k) else f"{k:.2f}" for k in found)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"

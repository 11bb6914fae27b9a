"""``vllm-parity repro CASE``: a failed case's numbers, and a script that runs just its failing call again."""

from __future__ import annotations

import json
import math
import shlex
from typing import TYPE_CHECKING, Any

from harness.artifacts import FOLDER
from harness.errors import UsageError
from harness.report.steps import loading

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch

    from harness.store import CaseResult, RunRecords

__all__ = ["find_case", "lines_of", "read_call", "write_script"]

#: Rows of the first hook and channels of each that are shown, and other hooks that are named.
_ROWS, _CHANNELS, _HOOKS = 4, 5, 8
_MESSAGE_LINES = 12

_SCRIPT = '''\
"""Runs one failing call again and compares it with Hugging Face transformers.

{title}
{began}
Needs the `harness` package and what the run had: {versions}. Reads {call} beside it.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

os.environ.update({environment} | os.environ)

from harness.backend import BootConfig, load_backend
from harness.geometry import Geometry
from harness.interventions import parse_interventions
from harness.models import load_config, resolve
from harness.parity.text import failure_message, summary_line
from harness.parity.verdict import compare
from harness.points import nonfireable_points
from harness.reference.references import MANY_JITTERS, References
from harness.reference.run import teacher_forced


def main() -> None:
    call = json.loads(Path(__file__).with_name({call!r}).read_text(encoding="utf-8"))
    config = BootConfig.from_json(json.dumps(call["engine"]))
    path = str(resolve(config.model).fetch())
    hf_config = load_config(path)
    n_layers = hf_config.num_hidden_layers
    engine = load_backend(config.backend).boot(replace(config, path=path))

    prompts, logits = call["prompts"], call["kind"] == "logits"
    hooks = [] if logits else call["captured"]
    new_tokens = max(map(len, call["new_tokens"]), default=1)
    specs = {{"intervene": call["intervene"], "max_new_tokens": new_tokens}}
    result = engine.forward(prompts, capture=hooks, return_logits=logits, **specs)
    engine.close()

    sequences = prompts if logits else teacher_forced(prompts, result.new_tokens)
    geometry = Geometry.of(hf_config)
    editable = list(engine.supported_hook_points)
    edits = parse_interventions(
        call["intervene"],
        widths=geometry.widths(editable),
        nonfireable=nonfireable_points(n_layers),
        lengths=list(map(len, sequences)),
    )
    reference = References(max_loaded=2).get(
        path, config.dtype, sequences, hooks, jitters=MANY_JITTERS, edits=edits, logits=logits
    )

    def sides(one):
        return {{"logits": one.logits}} if logits else one.captured

    every = range(len(prompts))
    rows = {{"logits": [result.logit_rows(i) for i in every]}} if logits else result.rows_by_hook()
    verdict = compare(
        rows,
        sides(reference.truth),
        [sides(one) for one in reference.same],
        dtype=config.dtype,
        n_layers=n_layers,
        k=call["k"],
        check_dtype=not logits,
        step=config.max_num_batched_tokens,
        prompt_lengths=[len(prompt) for prompt in prompts],
    )
    print(summary_line(verdict) if verdict.passed else failure_message(verdict))
    raise SystemExit(not verdict.passed)


if __name__ == "__main__":  # an engine may start processes that import this file again
    main()
'''


def find_case(records: RunRecords, name: str) -> CaseResult:
    """The case with this id, or the only one that did not pass and has ``name`` in its id.

    Raises:
        UsageError: none or several, with what there is; or one that has nothing to show.
    """
    exact = [case for case in records.cases if case.id == name]
    found = exact or [case for case in records.cases if name in case.id and case.outcome != "passed"]
    wrong = [case for case in found if case.outcome in ("failed", "error") or case.artifacts]
    if len(wrong) == 1:
        return wrong[0]
    if wrong:
        several = "; ".join(case.id for case in wrong[:5])
        msg = f"{len(wrong)} failed cases of {records.folder} have {name!r} in their id: {several}. Name one of them"
        raise UsageError(msg)
    if found or any(name in case.id for case in records.cases):
        outcome = found[0].outcome if found else "passed"
        msg = f"{name!r} of {records.folder} is {outcome}: there is nothing to reproduce; name a failed case"
        raise UsageError(msg)
    failed = "; ".join(case.id for case in records.cases if case.outcome == "failed")
    msg = f"no case of {records.folder} has {name!r} in its id; " + (
        f"failed: {failed}" if failed else "no case of it failed. --run names another run"
    )
    raise UsageError(msg)


def lines_of(records: RunRecords, case: CaseResult) -> Iterator[str]:
    """What a person needs, from the sentence down to channels; the scripts are written on the way."""
    yield f"{case.id}: {case.outcome}"
    if case.title:
        yield case.title
    yield f"engine: {case.engine}"
    yield ""
    yield from case.message.strip().splitlines()[:_MESSAGE_LINES]
    yield ""
    if not case.artifacts:
        yield "no tensors were kept: this failure is not one of a comparison with the reference"
    for entry in case.artifacts:
        if "error" in entry:
            yield f"{entry.get('label')}: its tensors were {entry['error']}"
            continue
        yield from _comparison(records, case, entry)
    yield f"the case again: {case.rerun}"
    if any("call" in entry for entry in case.artifacts):
        where = f"{shlex.quote(case.id)} --run {shlex.quote(str(records.folder))}"
        yield f"what is wrong by itself: vllm-parity bisect {where}"


def _comparison(records: RunRecords, case: CaseResult, entry: Mapping[str, Any]) -> Iterator[str]:
    from safetensors.torch import load_file

    from harness.parity.text import figure

    call_path = _inside(records.folder, str(entry["call"]))
    try:
        call = json.loads(call_path.read_text(encoding="utf-8"))
        tensors = load_file(_inside(records.folder, str(entry["tensors"])))
    except (OSError, ValueError, KeyError) as error:
        yield f"{entry.get('label')}: its tensors cannot be read ({error})"
        return
    yield f"{call['label']} ({call['kind']}), on engine {_engine(call)}"
    if call["began"] and call["began"] not in case.message:
        yield f"  {call['began']}"
    lengths = ", ".join(str(len(ids)) for ids in call["prompts"])
    yield f"  prompts of {lengths} tokens, {'with edits' if call['intervene'] else 'no edits'}"
    for kept in call["hooks"][:1]:  # where it began; the others mostly follow from it
        yield f"  {kept['hook']}: {_verdict(kept)}"
        for gate in kept["gates"]:
            sign = "≤" if gate["passed"] else ">"
            err, bound = (figure(float(gate[key])) for key in ("err_engine", "bound"))
            yield f"    {gate['name']}: err {err} {sign} bound {bound}"
        names = ("engine", "truth", "noisiest")
        sides = {name: tensors[f"{kept['hook']}/{name}"].double() for name in names}
        for index, (request, row) in enumerate(kept["rows"][:_ROWS]):
            yield from _row(f"request {request} row {row}", {n: side[index] for n, side in sides.items()})
    if others := call["hooks"][1:]:
        named = ", ".join(f"{kept['hook']} ({_verdict(kept)})" for kept in others[:_HOOKS])
        more = f" and {len(others) - _HOOKS} more" if len(others) > _HOOKS else ""
        yield f"  rows of these are kept, too: {named}{more}"
    yield from _in_hand(records, case, entry, call, call_path)


def _in_hand(
    records: RunRecords, case: CaseResult, entry: Mapping[str, Any], call: dict[str, Any], call_path: Path
) -> Iterator[str]:
    """The files of a comparison, and what can be done with them."""
    folder = records.folder
    yield f"  kept, per hook <hook>/engine, /truth, /reference, /noisiest: {folder / str(entry['tensors'])}"
    if call["left_out"]:
        yield f"  {call['left_out']} failing hooks found no room"
    yield f"  what was called, and which rows were kept: {folder / str(entry['call'])}"
    yield f"  this call again: python {folder / write_script(records, call, call_path).relative_to(folder.resolve())}"
    first = {"first": call["hooks"][0]} if call["hooks"] else {}  # records of an older version do not have it
    if python := loading(case, {**entry, **first}, str(folder)):
        yield "  in Python:"
        yield from (f"    {line}".rstrip() for line in python.splitlines())
    yield ""


def _verdict(kept: Mapping[str, Any]) -> str:
    return "within its bounds" if kept["passed"] else "over its bounds"


def _engine(call: Mapping[str, Any]) -> str:
    from harness.backend import BootConfig

    return BootConfig.from_json(json.dumps(call["engine"])).id


def read_call(records: RunRecords, entry: Mapping[str, Any]) -> dict[str, Any]:
    """What a failed comparison was about, see :func:`harness.artifacts.save`.

    Raises:
        UsageError: it cannot be read, or is not a file of the run.
    """
    path = _inside(records.folder, str(entry["call"]))
    try:
        call = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); run the case again"
        raise UsageError(msg) from error
    if not isinstance(call, dict):
        msg = f"{path} holds no call; run the case again"
        raise UsageError(msg)
    return call


def _inside(folder: Path, relative: str) -> Path:
    """A file of the run; records come from anywhere, and must not name another."""
    path = (folder / relative).resolve()
    if folder.resolve() / FOLDER not in path.parents:
        msg = f"{relative} is not a file below {folder / FOLDER}"
        raise UsageError(msg)
    return path


def _row(where: str, sides: Mapping[str, torch.Tensor]) -> Iterator[str]:
    from harness.parity.text import figure

    truth, engine = sides["truth"], sides["engine"]
    size = float(truth.norm()) or math.nan
    err, noise = float((engine - truth).norm()) / size, float((sides["noisiest"] - truth).norm()) / size
    yield f"    {where}: err(E) {figure(err)}, err(R) {figure(noise)}; worst channels:"
    gaps = (engine - truth).abs().nan_to_num(math.inf)
    for channel in gaps.topk(min(_CHANNELS, gaps.numel())).indices.tolist():
        values = "  ".join(f"{name} {float(side[channel]): .6e}" for name, side in sides.items())
        yield f"      {channel:>6}  {values}".replace("noisiest", "reference")


def write_script(records: RunRecords, call: Mapping[str, Any], call_path: Path) -> Path:
    """Write a script beside a call's tensors that runs it again; it ends with 1 where parity is still broken."""
    from harness.pool import ENVIRONMENT

    versions: Mapping[str, Any] = (records.run.get("provenance") or {}).get("versions") or {}
    names = [f"{name} {version}" for name, version in versions.items() if version and name != "harness"]
    path = call_path.with_name("repro.py" if call_path.stem == "0" else f"repro-{call_path.stem}.py")
    text = _SCRIPT.format(
        title=_in_docstring(f"{call['case']}: {call['label']}"),
        began=_in_docstring(call["began"]),
        versions=_in_docstring(", ".join(names) or "not recorded"),
        call=call_path.name,
        environment=repr(dict(ENVIRONMENT)),
    )
    path.write_text(text, encoding="utf-8")
    return path


def _in_docstring(text: str) -> str:
    """Records come from anywhere: nothing in them may end the docstring and become code."""
    return " ".join(str(text).replace("\\", "/").replace('"', "'").split())

"""From a failed case of a run to its bisection: read the call it left, boot its engine, investigate, write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from harness.backend import BootConfig, load_backend
from harness.bisect.bench import Call
from harness.bisect.investigate import REFUSED, SOUND, Result, investigate
from harness.bisect.settings import able, neighbours, try_settings
from harness.bisect.words import needs, sentence
from harness.bisect.write import FOLDER, Subject, write
from harness.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from harness.store import CaseResult, RunRecords

__all__ = ["bisect_case", "read_subject"]


def read_subject(
    records: RunRecords, case: CaseResult, number: int | None = None
) -> tuple[Subject, Call, float]:
    """The engine and the call of a failed comparison, and the k it was judged with.

    Args:
        records: of the run.
        case: a case that failed.
        number: of the comparison; by default the first that left something.

    Raises:
        UsageError: nothing was kept of it, it is of a kind that cannot be bisected, or its files cannot be read.
    """
    from harness.repro import read_call

    kept = [entry for entry in case.artifacts if "error" not in entry]
    if not kept:
        msg = (
            f"{case.id} left no call to bisect: its failure is not one of a comparison with the reference; "
            f"run it again by itself: {case.rerun or case.id}"
        )
        raise UsageError(msg)
    if number is None:
        entry: Mapping[str, Any] = next((one for one in kept if _kind(records, one) != "change"), kept[0])
    elif 0 <= number < len(kept):
        entry = kept[number]
    else:
        msg = f"--comparison {number}: {case.id} left {len(kept)}, numbered from 0"
        raise UsageError(msg)
    call = read_call(records, entry)
    try:
        config = BootConfig.from_json(json.dumps(call["engine"]))
        edits = call["intervene"]
        read = Call(
            tuple(tuple(int(token) for token in ids) for ids in call["prompts"]),
            max((len(ids) for ids in call["new_tokens"]), default=1),
            None if edits is None else tuple(edits),
        )
        told = case.id, str(call["label"]), str(call["began"])
        subject = Subject(*told, able(config), case.rerun, str(call.get("kind") or "values"))
        return subject, read, float(call["k"])
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{entry.get('call')} cannot be read ({error}); run the case again: {case.rerun or case.id}"
        raise UsageError(msg) from error


def _kind(records: RunRecords, entry: Mapping[str, Any]) -> str:
    from harness.repro import read_call

    return str(read_call(records, entry).get("kind"))


def bisect_case(
    records: RunRecords,
    case: CaseResult,
    *,
    how: str = "simpler",
    number: int | None = None,
    say: Callable[[str], None] = print,
) -> tuple[Result, Path]:
    """Bisect a failed case; writes below ``RUN/bisect/<case>``.

    Args:
        records: of the run.
        case: a case that failed.
        how: which other settings to try, see :func:`harness.bisect.settings.neighbours`.
        number: of the comparison.
        say: told each step.

    Returns:
        What was found, and the page about it.

    Raises:
        UsageError: there is nothing to bisect, or its engine cannot be had here.
        EngineError: the engine did not boot, or died.
    """
    from harness.artifacts import slug
    from harness.check import Parity
    from harness.plan import Plan
    from harness.session import ParitySession

    subject, call, k = read_subject(records, case, number)
    load_backend(subject.config.backend)
    folder = records.folder / FOLDER / slug(case.id)
    plan = Plan(models=(subject.config.model,), backend=subject.config.backend)
    session = ParitySession(plan, folder, argv=[], k=k)
    try:
        session.preflight([subject.config])
        parity = Parity(session, subject.config)
        say(f"{case.id}: {len(call.prompts)} prompts on {parity.config.id}")
        result = investigate(parity, call, lambda line: say(f"  {line}"))
        result.about = subject.kind
        tried = []
        if result.kind not in (SOUND, REFUSED) and result.narrowed is not None:
            settings = list(neighbours(parity.config, call, how))
            disturbed = result.narrowed.disturbed
            tried = try_settings(
                parity, settings, call, disturbed=disturbed, say=lambda line: say(f"  {line}")
            )
        page = write(folder, subject, result, tried)
    finally:
        session.close()
    for line in (sentence(result), *(f"  {line}" for line in needs(result.narrowed, tried))):
        say(line)
    return result, page

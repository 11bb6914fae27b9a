"""Bisections of planted faults: each must name the point that is wrong by itself, its row, and what the fault needs."""

from __future__ import annotations

import dataclasses

import pytest

from harness.bisect.bench import Call
from harness.bisect.investigate import COMPUTED, READ, SOUND, investigate
from harness.bisect.settings import able, neighbours, try_settings
from harness.bisect.words import needs, sentence
from harness.parity.types import RowRef
from harness.prompts import of_length

#: Lengths of the prompts; the last is served in two chunks, of 40 and 30 in a batch and of 64 and 6 alone.
RAGGED = (5, 7, 12, 70)


@dataclasses.dataclass(frozen=True)
class Named:
    """What must come out: kind, point, first wrong position, words of the sentence, of what it needs, points in all."""

    kind: str
    hook: str
    position: int
    branch: str = ""
    needs: str = ""
    points: int = 1


FAULTS = {
    "tiny-llama": {
        "blocks.MlpWrongFromFive": Named(COMPUTED, "blocks.2.mlp.hook_out", 5, "the MLP of block 2"),
        "blocks.AttentionWrongInChunks": Named(
            COMPUTED, "blocks.1.attn.hook_out", 40, "the output projection of attention of block 1"
        ),
        "workers.ResidualHalfDropped": Named(READ, "blocks.0.hook_out", 0),
        "workers.LayerOffByOne": Named(READ, "blocks.0.hook_out", 0),
        "workers.AnotherRequestsRows": Named(READ, "embed.hook_out", 0, needs="beside it in the batch"),
        "workers.StaleBuffer": Named(READ, "embed.hook_out", 0, needs="only after another call"),
    },
    "tiny-gptneox": {
        "families.ParallelAsSequential": Named(COMPUTED, "blocks.1.mlp.hook_in", 0, "into the MLP"),
    },
    "tiny-olmo2": {
        "families.PostNormIgnored": Named(COMPUTED, "blocks.1.mlp.hook_in", 0, "same sum", points=2),
    },
    "tiny-mixtral": {
        "families.OtherExpert": Named(COMPUTED, "blocks.1.mlp.hook_out", 3, "the MLP of block 1"),
    },
}
MODELS = tuple(FAULTS)
on_planted_engines = pytest.mark.parity(
    models=MODELS,
    extra_models=MODELS,
    backends=("vllm",),
    dtypes=("fp32",),
    modes=("eager",),
    steps=(64,),
    smoke={"models": ("tiny-llama",)},
)


def ragged(parity) -> Call:
    return Call(tuple(tuple(of_length(parity, n, seed=n)) for n in RAGGED))


def everything(parity) -> dict:
    """What an engine for probes is booted with beside what it has."""
    return {name: able(parity.config).options[name] for name in ("hook_points", "max_edit_programs")}


@on_planted_engines
def test_what_is_wrong_by_itself_is_named(parity):
    """Of each broken engine: computed or read wrongly, at which point, from which row on."""
    for fault, named in FAULTS[parity.config.model].items():
        with parity.planted(fault, **everything(parity)) as faulty:
            result = investigate(faulty, ragged(parity))
        text, told = sentence(result), list(needs(result.narrowed))
        parity.note(fault, sentence=text, needs=told, runs=result.runs)
        assert result.kind == named.kind, text
        hook = result.found.first if named.kind == READ else result.site.hook
        assert (hook, result.narrowed.row.position) == (named.hook, named.position), text
        assert named.branch.lower() in text.lower()
        assert named.needs in "\n".join(told)
        if named.kind == COMPUTED:
            assert len(result.found.wrong) == named.points, text
            assert result.found.culprits[0].heals, text
            assert result.found.culprits[0].stage == result.found.last, text


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_sound_engine_is_not_blamed(parity):
    """Of a sound engine nothing is said to be wrong: prompts, chunks, decode steps, edits."""
    edits = {"blocks.1.hook_out": {"op": "scale", "factor": 1.5, "pos": [1, 2]}}
    with parity.variant(**everything(parity)) as wide:
        for call in (
            ragged(parity),
            dataclasses.replace(ragged(parity), new_tokens=4),
            dataclasses.replace(ragged(parity), intervene=(edits, None, None, edits)),
        ):
            result = investigate(wide, call)
            assert result.kind == SOUND, sentence(result)


@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_the_setting_that_a_fault_needs_is_named(parity):
    """A fault of later chunks: right in one step, wrong with one prompt alone, from where its second chunk begins."""
    with parity.planted("blocks.AttentionWrongInChunks", **everything(parity)) as faulty:
        result = investigate(faulty, ragged(parity))
        settings = list(neighbours(faulty.config, ragged(parity), "simpler"))
        tried = try_settings(faulty, settings, ragged(parity), disturbed=False)
    told = list(needs(result.narrowed, tried))
    parity.note("needs", told=told)
    assert [(one.name, one.wrong) for one in tried] == [("the whole batch in one step of 320", False)], told
    assert (result.narrowed.beside, result.narrowed.call[1]) == ((), RowRef(0, 64)), told
    assert result.narrowed.cut is False, "a chunk of one row is right"
    assert told[-1] == "the whole batch in one step of 320: right there"

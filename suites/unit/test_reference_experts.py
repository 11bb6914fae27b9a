"""Mixtures of experts: where tokens go is recorded, followed and swapped; only noise excuses an engine's choice."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.errors import CaptureError
from harness.models import load_config
from harness.models.tiny import TINY_MODELS
from harness.parity.verdict import compare
from harness.points import MLP_IN, MLP_OUT, TEMPLATES, every_point
from harness.reference.experts import Choice, routed
from harness.reference.load import load_model
from harness.reference.references import MANY_JITTERS, References
from harness.reference.run import forward_logits, run_reference
from harness.routes import Routes
from harness.routing import LOGITS, follow_routes, settle_routes

if TYPE_CHECKING:
    from pathlib import Path

    from harness.reference.run import ReferenceRun

FAMILIES = ("Mixtral", "Qwen3Moe")
TINY = {tiny.family: tiny for tiny in TINY_MODELS if tiny.family in FAMILIES}
IDS = [(7 * i + 3) % 250 for i in range(48)]
NAMES = every_point(4, TEMPLATES)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp(request.param)
    TINY[request.param].build(place)
    return place


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, torch.float32)


def moved(choice: Choice, out: int, into: int) -> Choice:
    """The same token with its expert number ``out`` changed."""
    experts = [into if i == out else expert for i, expert in enumerate(choice.experts)]
    return choice._replace(experts=tuple(sorted(experts)))


def clear_swap(routing: Any, block: int = 1) -> Choice:
    """The token whose last expert is furthest ahead, sent to the expert it likes least."""
    route = routing[block]
    ranked = route.logits.sort(dim=1, descending=True)
    k = route.experts.shape[1]
    row = int((ranked.values[:, k - 1] - ranked.values[:, k]).argmax())
    return moved(Choice(block, row, tuple(ranked.indices[row, :k].tolist())), 0, int(ranked.indices[row, -1]))


def test_recording_changes_nothing(model):
    plain = forward_logits(model, IDS)
    with routed(model) as found:
        assert torch.equal(forward_logits(model, IDS), plain)
    assert sorted(found) == [0, 1, 2, 3]
    route = found[2]
    assert route.experts.shape == (len(IDS), model.config.num_experts_per_tok)
    best = route.logits.topk(route.experts.shape[1], dim=1).indices
    assert torch.equal(route.experts.sort(dim=1).values, best.sort(dim=1).values)


def test_the_model_s_own_way_followed_changes_no_bit(model):
    with routed(model) as found:
        plain = forward_logits(model, IDS)
    with routed(model, like=found):
        assert torch.equal(forward_logits(model, IDS), plain)


def test_a_swap_is_what_a_router_that_prefers_it_gives(model):
    """Independently: the swapped expert's logits are exchanged in what the router computes, for that one row."""
    with routed(model) as found:
        forward_logits(model, IDS)
    swap = clear_swap(found)
    run = run_reference(model, [IDS], NAMES, choices=[swap])
    gate = model.model.layers[swap.block].mlp.gate
    mlp = model.model.layers[swap.block].mlp
    rows = run.captured[MLP_IN.format(i=swap.block)][0]
    plain = run_reference(model, [IDS], NAMES)
    assert torch.equal(rows, plain.captured[MLP_IN.format(i=swap.block)][0])
    chosen = list(swap.experts)
    probs = torch.softmax(rows[swap.position] @ gate.weight.T, dim=0)[chosen]
    if getattr(gate, "norm_topk_prob", True):
        probs = probs / probs.sum()
    with torch.no_grad():
        want = mlp.experts(rows[swap.position : swap.position + 1], torch.tensor([chosen]), probs[None])[0]
    got = run.captured[MLP_OUT.format(i=swap.block)][0]
    torch.testing.assert_close(got[swap.position], want, rtol=1e-4, atol=1e-6)
    before = plain.captured[MLP_OUT.format(i=swap.block)][0]
    others = [i for i in range(len(IDS)) if i != swap.position]
    assert torch.equal(got[others], before[others])
    assert not torch.allclose(got[swap.position], before[swap.position], rtol=1e-3)


def test_a_swap_that_cannot_be_is_refused(model):
    with routed(model) as found:
        forward_logits(model, IDS)
    swap = clear_swap(found)
    for experts in ((0,), (1, 99)):
        wrong = swap._replace(experts=experts)
        with (
            pytest.raises(CaptureError, match=r"cannot be: tokens go to 2 of \d experts"),
            routed(model, choices=[wrong]),
        ):
            forward_logits(model, IDS)


def test_realisations_go_where_the_truth_goes(folder):
    """Even where the truth was sent somewhere that no rounding would lead."""
    references = References(max_loaded=2)
    plain = references.get(folder, "bf16", [IDS], NAMES)
    swap = clear_swap(plain.truth.routing[0])
    pair = references.get(folder, "bf16", [IDS], NAMES, choices=[(swap,)])
    assert sorted(pair.truth.routing[0][swap.block].experts[swap.position].tolist()) == list(swap.experts)
    for run in pair.same:
        for block, route in pair.truth.routing[0].items():
            assert torch.equal(run.routing[0][block].experts, route.experts)
    again = references.get(folder, "bf16", [IDS], NAMES)
    assert sorted(again.truth.routing[0][swap.block].experts[swap.position].tolist()) != list(swap.experts)


@dataclasses.dataclass
class Trial:
    """As much of a parity fixture as following a route takes."""

    references: References
    path: Path
    dtype: str = "bf16"
    k: float = 3.0
    notes: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        session = SimpleNamespace(references=self.references, routes={})
        config = SimpleNamespace(path=self.path, dtype=self.dtype, to_json=lambda: "this engine")
        self.routes = Routes(session, config, load_config(self.path))

    @property
    def taken(self):
        return self.routes.taken([IDS])[0]

    def reference(self, sequences, names, *, edits=None, jitters=2, more_for=(), logits=False, choices=None):
        jitters = MANY_JITTERS if more_for else jitters
        return self.references.get(
            self.path,
            self.dtype,
            sequences,
            names,
            jitters=jitters,
            edits=edits,
            logits=logits,
            choices=choices or self.routes.taken(sequences, edits),
        )

    def note(self, label, **detail):
        self.notes.append({"label": label, **detail})

    def judge(self, rows, *, logits=False):
        sequences = [IDS] * len(next(iter(rows.values())))
        pair = self.reference(sequences, [] if logits else list(rows), logits=logits)

        def of(run: ReferenceRun) -> Any:
            return {LOGITS: run.logits} if logits else run.captured

        return compare(
            rows,
            of(pair.truth),
            [of(run) for run in pair.same],
            dtype=self.dtype,
            n_layers=4,
            check_dtype=not logits,
            explain=False,
        )


@pytest.fixture(scope="module")
def references() -> References:
    return References(max_loaded=2)


def nearest_tie(pair, blocks=(0, 1, 2, 3)) -> tuple[Choice, float]:
    """The swap that takes least, and its margin."""
    best = None
    for block in blocks:
        route = pair.truth.routing[0][block]
        k = route.experts.shape[1]
        ranked = route.logits.sort(dim=1, descending=True)
        margins = ranked.values[:, k - 1] - ranked.values[:, k]
        row = int(margins.argmin())
        found = moved(
            Choice(block, row, tuple(ranked.indices[row, :k].tolist())), k - 1, int(ranked.indices[row, k])
        )
        if best is None or float(margins[row]) < best[1]:
            best = found, float(margins[row])
    assert best is not None
    return best


def engine_that_goes(trial, *choices: Choice) -> ReferenceRun:
    """One realisation of R (not one of those it is judged by), where the truth goes another way."""
    pair = trial.references.get(
        trial.path, trial.dtype, [IDS], NAMES, jitters=MANY_JITTERS + 1, logits=True, choices=[tuple(choices)]
    )
    return pair.same[-1]


def follow(trial, rows, *, logits=False) -> None:
    """As a case does it, and no more often than a case that ends."""
    seen: set[object] = set()
    sequences = [IDS] * len(next(iter(rows.values())))
    for _ in range(40):
        if not follow_routes(trial, sequences, rows, trial.judge(rows, logits=logits), seen=seen):
            return
    pytest.fail("it goes on for ever")


def test_copies_that_went_different_ways_end_it(folder, references):
    """One reference cannot follow both: red, and not for ever."""
    trial = Trial(references, folder)
    swap, _ = nearest_tie(trial.reference([IDS], NAMES))
    one, other = engine_that_goes(trial, swap), engine_that_goes(trial)
    names = [name for name in NAMES if not name.endswith("mlp.hook_in")]
    rows = {name: [one.captured[name][0], other.captured[name][0]] for name in names}
    follow(trial, rows)
    assert not trial.judge(rows).passed


@pytest.mark.parametrize("seen", ["everything", "no router's input", "logits"])
def test_a_near_tie_decided_the_other_way_is_followed(folder, references, seen):
    trial, logits = Trial(references, folder), seen == "logits"
    swap, margin = nearest_tie(trial.reference([IDS], NAMES))
    run = engine_that_goes(trial, swap)
    rows = {LOGITS: run.logits} if logits else run.captured
    if seen == "no router's input":
        rows = {name: some for name, some in rows.items() if not name.endswith("mlp.hook_in")}
    verdict = trial.judge(rows, logits=logits)
    assert not verdict.passed
    follow(trial, rows, logits=logits)
    assert trial.judge(rows, logits=logits).passed
    assert swap in trial.taken
    told = [token for note in trial.notes for token in note["tokens"]]
    assert any(
        f"position {swap.position}: to experts {swap.experts}, margin {margin:.2e}" in one for one in told
    )
    assert all(0 <= note["largest_share_of_what_noise_explains"] <= 1 for note in trial.notes)


def test_what_hides_in_a_row_s_noise_is_settled_too(folder, references):
    """No comparison failed, and yet the token is found: a change is judged by the difference of two such runs."""
    trial = Trial(references, folder)
    swap, _ = nearest_tie(trial.reference([IDS], NAMES))
    gate = trial.routes.router(swap.block).double()
    run = engine_that_goes(trial, swap)
    rows = {name: [one.clone() for one in run.captured[name]] for name in NAMES}
    # The router's input as an engine that goes there by itself must have had it.
    place = rows[MLP_IN.format(i=swap.block)][0][swap.position]
    left = set(range(len(gate))) - set(swap.experts)
    away = torch.stack([gate[list(swap.experts)].mean(dim=0) - gate[other] for other in left]).mean(dim=0)
    place += (0.5 * place.norm() * away / away.norm()).to(place.dtype)
    settle_routes(trial, [IDS], rows)
    assert swap in trial.taken


def test_several_ties_are_followed_one_after_the_other(folder, references):
    """Upstream ones too, found after one further down whose truth they change."""
    trial = Trial(references, folder)
    pair = trial.reference([IDS], NAMES)
    first, _ = nearest_tie(pair, blocks=(0,))
    run = engine_that_goes(trial, first)
    second, _ = nearest_tie(
        trial.references.get(folder, "bf16", [IDS], NAMES, choices=[(first,)]), blocks=(3,)
    )
    run = engine_that_goes(trial, first, second)
    trial.routes.take(IDS, None, (second,))
    follow(trial, run.captured)
    assert trial.judge(run.captured).passed
    assert {first, second} <= set(trial.taken)


def test_a_choice_that_noise_does_not_explain_stays_red(folder, references):
    trial = Trial(references, folder)
    swap = clear_swap(trial.reference([IDS], NAMES).truth.routing[0])
    rows = engine_that_goes(trial, swap).captured
    verdict = trial.judge(rows)
    assert not verdict.passed
    assert not follow_routes(trial, [IDS], rows, verdict, seen=set())
    assert not trial.taken


@pytest.mark.parametrize("factor", [0.0, 0.7, 1.4, -1.0])
def test_a_wrong_value_at_a_near_tie_stays_red(folder, references, factor):
    """The other experts' output is what excuses a row, not that the row was a near tie."""
    trial = Trial(references, folder)
    swap, _ = nearest_tie(trial.reference([IDS], NAMES))
    run = engine_that_goes(trial)
    hook = MLP_OUT.format(i=swap.block)
    rows = {name: [one.clone() for one in run.captured[name]] for name in NAMES}
    rows[hook][0][swap.position] *= factor
    follow(trial, rows)
    assert not trial.judge(rows).passed


def test_a_model_without_experts_has_nothing_to_follow():
    verdict = SimpleNamespace(passed=False)
    trial = SimpleNamespace(routes=SimpleNamespace(exist=False))
    assert not follow_routes(trial, [IDS], {}, verdict, seen=set())

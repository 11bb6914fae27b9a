"""Edits inside the reference: the value asked for, at the rows asked for, and nothing else, then or later.

What follows an edit is computed a second time by hand: the rest of the model is run from the edited value, module by
module, with no hook installed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.errors import CaptureError, UnsupportedError, UsageError
from harness.interventions import parse_interventions
from harness.points import EMBED, FINAL_NORM, nonfireable_points
from harness.reference.backend import ReferenceBackend, boot_reference
from harness.reference.hooks import capturing
from harness.reference.load import load_model
from harness.reference.references import References
from harness.reference.run import forward_logits, run_reference, teacher_forced
from harness.reference.truth import exact_forward, load_truth
from suites.unit.small_llama import IDS, LAYERS, POINTS, PROMPTS, WIDTH

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from harness.interventions import Edit
    from harness.reference.run import ReferenceRun

N = len(IDS)
#: Every kind of hook, at the first, a middle and the last block.
HOOKS = [EMBED, *(f"blocks.{i}.{p}hook_out" for i in (0, 2, 3) for p in ("attn.", "mlp.", "")), FINAL_NORM]
CHANNELS = torch.randn(WIDTH, generator=torch.manual_seed(3)).tolist()
SPECS = {
    "suppress": {"op": "suppress"},
    "scale": {"op": "scale", "factor": -1.7},
    "add a number": {"op": "add", "value": 0.3},
    "add per channel": {"op": "add", "value": CHANNELS},
    "set a number": {"op": "set", "value": 0.1},
    "set per channel": {"op": "set", "value": CHANNELS},
}
POSITIONS: list[Any] = [None, 0, N // 2, N - 1, [1, 4, 9]]
MODELS = ["fp32", "bf16", "truth"]


def edits_of(specs: Any, n_rows: int = N, dtype: torch.dtype = torch.float32) -> tuple[Edit, ...]:
    [edits] = parse_interventions(
        specs,
        widths=dict.fromkeys(POINTS, WIDTH),
        nonfireable=nonfireable_points(LAYERS),
        lengths=[n_rows],
        dtype=dtype,
    )
    return edits


def at(hook: str, spec: str = "add per channel", pos: Any = None) -> tuple[Edit, ...]:
    """One edit at one hook, as the one request's."""
    return edits_of({hook: {**SPECS[spec], "pos": pos}})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Stricter than torch.equal, to which 0.0 is -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same_run(a: ReferenceRun, b: ReferenceRun) -> bool:
    pairs = [(a.logits, b.logits), *((a.captured[hook], b.captured[hook]) for hook in POINTS)]
    return all(same_bits(x, y) for left, right in pairs for x, y in zip(left, right, strict=True))


def ulps(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> float:
    """The largest difference, in units in the last place of numbers as large as ``size``, at the dtype of ``got``."""
    info = torch.finfo(got.dtype)
    exponent = torch.frexp(size.double().abs().clamp(min=info.tiny)).exponent - 1
    return float(
        (
            (got.double() - want.double()).abs()
            / torch.ldexp(torch.full_like(size, info.eps, dtype=torch.float64), exponent)
        ).max()
    )


@pytest.fixture(scope="module")
def models(checkpoint: Path) -> dict[str, PreTrainedModel]:
    return {
        "fp32": load_model(checkpoint, "fp32", attn_implementation="sdpa"),
        "bf16": load_model(checkpoint, "bf16", attn_implementation="sdpa"),
        "truth": load_truth(checkpoint, "fp32"),
    }


@pytest.fixture(scope="module")
def clean(models: dict[str, PreTrainedModel]) -> dict[str, ReferenceRun]:
    return {name: run_reference(model, [IDS], POINTS) for name, model in models.items()}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("spec", SPECS)
def test_an_edit_does_what_it_says_and_no_more(models, clean, name: str, hook: str, spec: str) -> None:
    before, logits_before = clean[name].captured, clean[name].logits[0]
    for pos in POSITIONS:
        edits = at(hook, spec, pos)
        run = run_reference(models[name], [IDS], POINTS, [edits])
        [edit] = edits
        touched, others = edit.touches(N), [i for i in range(N) if i not in edit.touches(N)]
        got, was = run.captured[hook][0], before[hook][0]
        wanted = edit.apply(was[touched])
        if hook == FINAL_NORM:
            # Divided by the weight, multiplied, rounded and divided again. An addition that cancels keeps the
            # rounding of what it came from, so units are those of the larger.
            assert ulps(got[touched], wanted, torch.maximum(was[touched].abs(), wanted.abs())) <= 2
        else:
            assert same_bits(got[touched], wanted)
        if edit.scale == 0.0:
            assert ulps(got[touched], edit.bias.to(got.dtype).expand(len(touched), WIDTH), wanted) <= 2
        assert same_bits(got[others], was[others])
        for other in POINTS[: POINTS.index(hook)]:
            assert same_bits(run.captured[other][0], before[other][0]), other
        for other in POINTS[POINTS.index(hook) :]:
            assert same_bits(run.captured[other][0][: touched[0]], before[other][0][: touched[0]]), other
        assert same_bits(run.logits[0][: touched[0]], logits_before[: touched[0]])
        # It bites: from the edited rows on, the model says something else.
        assert bool((run.logits[0][touched] != logits_before[touched]).any(dim=-1).all())


@pytest.mark.parametrize("name", MODELS)
def test_nothing_stays_behind(models, clean, name: str) -> None:
    model = models[name]
    edits = edits_of(dict.fromkeys(POINTS, SPECS["add per channel"]))
    edited = run_reference(model, [IDS], POINTS, [edits])
    assert not same_run(edited, clean[name])
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert same_run(run_reference(model, [IDS], POINTS), clean[name])
    assert same_run(run_reference(model, [IDS], POINTS, [()]), clean[name])
    assert same_run(run_reference(model, [IDS], POINTS, [edits]), edited)


# ---- a second way ----------------------------------------------------------------------------------------------


class ByHand:
    """The rest of a Llama from one edited value on. Values are (n, width) at the model's dtype."""

    def __init__(self, model: PreTrainedModel, clean: ReferenceRun) -> None:
        self.model, self.inner = model, model.model
        self.clean = {hook: rows[0] for hook, rows in clean.captured.items()}

    def edited(
        self, hook: str, spec: dict[str, Any], touched: list[int], *, emitted: Any = None
    ) -> torch.Tensor:
        """In fp64 from the spec alone, then rounded; with ``emitted``, the final norm's output, as that."""
        value = torch.tensor(spec.get("value", 0.0), dtype=torch.float32).double()
        factor = float(torch.tensor(spec.get("factor", 0.0), dtype=torch.float32))
        rows = self.clean[hook].clone() if emitted is None else emitted.clone()
        weight = torch.ones(WIDTH).double()
        if emitted is not None:
            weight = self.inner.norm.weight.double().clone()
            weight[[3, 9]] = 1.0  # the two that are too small to divide by
        x = rows[touched].double() / weight
        x = {"suppress": x * 0, "scale": x * factor, "add": x + value, "set": x * 0 + value}[spec["op"]]
        rows[touched] = (x * weight).to(rows.dtype)
        return rows

    def blocks(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """From the stream before block ``first`` to the last block's output."""
        hidden, positions = rows[None], torch.arange(N)[None]
        future = torch.ones(N, N, dtype=torch.bool).triu(1)
        mask = torch.zeros(1, 1, N, N, dtype=rows.dtype).masked_fill(future, torch.finfo(rows.dtype).min)
        angles = self.inner.rotary_emb(hidden, position_ids=positions)
        for layer in self.inner.layers[first:]:
            hidden = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return hidden[0]

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return self.model.lm_head(rows[None])[0]

    def logits(self, hook: str, spec: dict[str, Any], touched: list[int]) -> torch.Tensor:
        kind, block = hook.split(".")[-2], int(hook.split(".")[1]) if hook.startswith("blocks") else 0
        before = self.clean[f"blocks.{block - 1}.hook_out" if block else EMBED]
        if hook == FINAL_NORM:
            return self.head(
                self.edited(hook, spec, touched, emitted=self.inner.norm(self.clean[POINTS[-2]][None])[0])
            )
        rows = self.edited(hook, spec, touched)
        if hook == EMBED:
            return self.model(inputs_embeds=rows[None], use_cache=False).logits[0]
        layer = self.inner.layers[block]
        if kind == "attn":
            middle = before + rows
            after = middle + layer.mlp(layer.post_attention_layernorm(middle[None]))[0]
        elif kind == "mlp":
            after = before + self.clean[f"blocks.{block}.attn.hook_out"] + rows
        else:
            after = rows
        return self.head(self.inner.norm(self.blocks(after, block + 1)[None])[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hook", HOOKS)
def test_the_model_goes_on_from_the_edited_value(models, clean, name: str, hook: str) -> None:
    model = models[name]
    by_hand = ByHand(model, clean[name])
    for (spec, pos), (other, _) in pairwise([*zip(SPECS, [*POSITIONS, 3], strict=True), ("suppress", None)]):
        edits = at(hook, spec, pos)
        got = run_reference(model, [IDS], [], [edits]).logits[0]
        with exact_forward(model.dtype):
            wanted, wrong = (
                by_hand.logits(hook, SPECS[s], edits[0].touches(N)).to(torch.float64) for s in (spec, other)
            )
        # The same arithmetic but for the mask, which sdpa can do without; the truth's logits come in fp32. Measured:
        # equal bits at fp32 and bf16, 3e-8 for the truth; another edit is 0.08 or more away.
        bound = {"fp32": 1e-6, "bf16": 2.0**-7, "truth": 2.0**-24}[name]
        size = clean[name].logits[0].double().norm()
        assert float((got.double() - wanted).norm() / size) < bound, (spec, pos)
        assert float((got.double() - wrong).norm() / size) > 5 * bound, (spec, pos)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_final_norm_rounds_once(models, clean, name: str, spec: str) -> None:
    """To divide by the weight, to edit and to multiply it back: each of three roundings would show."""
    model, outputs = models[name], []
    norm = model.model.norm
    with capturing(model, [], at(FINAL_NORM, spec, [1, 7])):
        handle = norm.register_forward_hook(lambda _module, _args, output: outputs.append(output[0]))
        try:
            forward_logits(model, IDS)
        finally:
            handle.remove()
    with exact_forward(model.dtype):
        emitted = norm(clean[name].captured[POINTS[-2]][0][None])[0]
        wanted = ByHand(model, clean[name]).edited(FINAL_NORM, SPECS[spec], [1, 7], emitted=emitted)
    assert torch.equal(outputs[0], wanted)
    others = [i for i in range(N) if i not in {1, 7}]
    assert same_bits(outputs[0][others], emitted[others])


@pytest.mark.parametrize("name", MODELS)
def test_several_edits_act_in_the_order_of_the_forward(models, name: str) -> None:
    """Each replaces what the ones before it have led to, whatever order they are given in."""
    specs = {
        "blocks.0.hook_out": {**SPECS["add per channel"], "pos": [2, 5]},
        "blocks.2.mlp.hook_out": {**SPECS["scale"], "pos": 5},
        "blocks.3.hook_out": SPECS["set per channel"],
    }
    edits = edits_of(specs)
    run, backwards = (run_reference(models[name], [IDS], POINTS, [e]) for e in (edits, edits[::-1]))
    assert same_run(run, backwards)
    alone = run_reference(models[name], [IDS], POINTS, [edits[:1]])
    for hook in POINTS[: POINTS.index("blocks.2.mlp.hook_out")]:
        assert same_bits(run.captured[hook][0], alone.captured[hook][0])
    fed = alone.captured["blocks.2.mlp.hook_out"][0][[5]]
    assert same_bits(run.captured["blocks.2.mlp.hook_out"][0][[5]], edits[1].apply(fed))
    # After all rows of the stream were set, nothing of the others is left.
    last = run_reference(models[name], [IDS], POINTS, [edits[2:]])
    assert same_bits(run.logits[0], last.logits[0])
    assert not same_bits(run.captured["blocks.2.hook_out"][0], last.captured["blocks.2.hook_out"][0])


# ---- the hooks themselves --------------------------------------------------------------------------------------


class TestCapturing:
    @pytest.mark.parametrize("hook", HOOKS)
    @pytest.mark.parametrize("capture", [[], ["blocks.1.hook_out"]])
    def test_an_edited_hook_need_not_be_captured(self, models, hook: str, capture: list[str]) -> None:
        full, less = (run_reference(models["fp32"], [IDS], c, [at(hook, pos=2)]) for c in (POINTS, capture))
        assert list(less.captured) == capture
        assert same_bits(less.logits[0], full.logits[0])

    @pytest.mark.parametrize("hook", HOOKS)
    def test_the_modules_own_output_is_left_alone(self, model: PreTrainedModel, hook: str) -> None:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(_module: Any, _args: Any, output: Any) -> None:
            own = output[0] if isinstance(output, tuple) else output
            seen.append((own, own.clone()))

        for path in ("embed_tokens", "layers.0", "layers.2", "layers.3", "norm"):
            module = model.model.get_submodule(path)
            for one in (module, *(getattr(module, part, None) for part in ("self_attn", "mlp"))):
                if one is not None:
                    one.register_forward_hook(keep)
        run_reference(model, [IDS], POINTS, [at(hook)])
        assert len(seen) == 11
        assert all(same_bits(own, copy) for own, copy in seen)

    def test_only_the_first_of_a_tuple_changes(self, model: PreTrainedModel) -> None:
        attention = model.model.layers[1].self_attn
        outputs: list[Any] = []
        rest = object()
        attention.register_forward_hook(lambda _module, _args, output: (output[0], rest))
        with capturing(model, [], at("blocks.1.attn.hook_out", "suppress")):
            attention.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            forward_logits(model, IDS)
        [(value, kept)] = outputs
        assert kept is rest
        assert not value.any()

    def test_rows_no_edit_touches_go_on_as_they_came(self, model: PreTrainedModel) -> None:
        """The module's own tensor, then: nothing is copied where nothing is edited."""
        outputs: list[Any] = []
        layer = model.model.layers[1]
        layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        [late] = edits_of({"blocks.1.hook_out": {"op": "suppress", "pos": N}}, N + 1)
        with capturing(model, ["blocks.1.hook_out"], [late]) as captured:
            layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            forward_logits(model, IDS)
        assert outputs[0] is outputs[1]
        assert captured["blocks.1.hook_out"].any()

    def test_hooks_are_removed(self, model: PreTrainedModel) -> None:
        edits = edits_of(dict.fromkeys(POINTS, SPECS["scale"]))
        with pytest.raises(RuntimeError, match="on purpose"), capturing(model, [], edits):
            raise RuntimeError("on purpose")
        assert not any(module._forward_hooks for module in model.modules())

    def test_an_edit_fires_exactly_once(self, model: PreTrainedModel) -> None:
        edits = at("blocks.2.hook_out")
        with (
            pytest.raises(CaptureError, match=r"1 hooks of the reference never fired: blocks\.2\.hook_out"),
            capturing(model, [], edits),
        ):
            pass
        with capturing(model, [], edits):
            forward_logits(model, IDS)
            with pytest.raises(CaptureError, match=r"blocks\.2\.hook_out: its module ran twice"):
                forward_logits(model, IDS)

    def test_an_edited_module_that_is_skipped_is_an_error(self, model: PreTrainedModel) -> None:
        model.model.layers[2].forward = lambda hidden_states, **_kwargs: hidden_states
        with pytest.raises(CaptureError, match=r"never fired: blocks\.2\.mlp\.hook_out"):
            run_reference(model, [IDS], [], [at("blocks.2.mlp.hook_out")])

    @pytest.mark.parametrize("hook", [EMBED, FINAL_NORM])
    def test_edits_are_of_one_sequence(self, model: PreTrainedModel, hook: str) -> None:
        with (
            capturing(model, [], at(hook)),
            pytest.raises(UsageError, match=rf"hook '{hook}': edits are of one sequence, but a batch of 2"),
        ):
            model(input_ids=torch.tensor([IDS, IDS]), use_cache=False)

    def test_one_edit_per_hook(self, model: PreTrainedModel) -> None:
        twice = (*at("blocks.2.hook_out", pos=1), *at("blocks.2.hook_out", pos=2))
        with pytest.raises(UsageError, match=r"hook 'blocks\.2\.hook_out': a sequence has two edits there"):
            run_reference(model, [IDS], POINTS, [twice])


class TestRun:
    def test_each_sequence_has_its_own(self, models) -> None:
        edits = [(), at("blocks.1.hook_out", pos=4), at(EMBED, "suppress", [0])]
        run = run_reference(models["fp32"], PROMPTS, POINTS, edits)
        for index, (ids, here) in enumerate(zip(PROMPTS, edits, strict=True)):
            alone = run_reference(models["fp32"], [ids], POINTS, [here])
            assert same_bits(run.logits[index], alone.logits[0])
            assert all(same_bits(run.captured[hook][index], alone.captured[hook][0]) for hook in POINTS)

    def test_no_edits(self, models, clean) -> None:
        assert same_run(run_reference(models["fp32"], [IDS], POINTS, None), clean["fp32"])

    def test_positions_not_reached_are_left_out(self, models) -> None:
        edits = edits_of({"blocks.1.hook_out": {"op": "suppress", "pos": [2, 30]}}, 40)
        near = at("blocks.1.hook_out", "suppress", 2)
        run, same = (run_reference(models["fp32"], [IDS], POINTS, [e]) for e in (edits, near))
        assert same_run(run, same)

    def test_one_tuple_of_edits_per_sequence(self, models) -> None:
        with pytest.raises(UsageError, match="3 sequences but 1 tuples of edits"):
            run_reference(models["fp32"], PROMPTS, POINTS, [at(EMBED)])

    def test_edits_of_another_model(self, models) -> None:
        [edit] = parse_interventions(
            {"blocks.7.hook_out": {"op": "suppress"}},
            widths={"blocks.7.hook_out": 8},
            nonfireable={},
            lengths=[1],
        )[0]
        with pytest.raises(UsageError, match=r"unknown hook 'blocks\.7\.hook_out'"):
            run_reference(models["fp32"], [IDS], POINTS, [(edit,)])


@pytest.fixture(scope="module")
def references() -> References:
    return References(max_loaded=4)


class TestReferences:
    def test_the_cache_tells_edits_apart(self, checkpoint: Path) -> None:
        references = References(max_loaded=2)
        hook, position = "blocks.1.hook_out", 3
        kinds: dict[str, tuple[Edit, ...]] = {
            "clean": (),
            "add": at(hook, "add per channel", position),
            "suppress": at(hook, "suppress", position),
            "elsewhere": at(hook, "add per channel", position + 1),
            "every row": at(hook, "add per channel"),
            "another hook": at("blocks.1.mlp.hook_out", "add per channel", position),
        }

        def get(*edits: tuple[Edit, ...]) -> list[ReferenceRun]:
            pair = references.get(checkpoint, "fp32", [IDS] * len(edits), POINTS, jitters=1, edits=edits)
            return [pair.truth, *pair.same]

        apart = {kind: get(edits) for kind, edits in kinds.items()}
        assert references.computed == 3 * len(kinds)
        for a, b in pairwise([*apart.values(), apart["clean"]]):
            assert not any(same_run(x, y) for x, y in zip(a, b, strict=True))
        together = get(*kinds.values())
        assert references.computed == 3 * len(kinds)
        for number, runs in enumerate(apart.values()):
            for one, all_ in zip(runs, together, strict=True):
                assert all(one.captured[h][0] is all_.captured[h][number] for h in POINTS)
        # The same edits, read from specs again.
        get(at(hook, "add per channel", position), at(hook, "set per channel", position))
        assert references.computed == 3 * (len(kinds) + 1)
        clean = references.get(checkpoint, "fp32", [IDS], POINTS, jitters=1)
        assert clean.truth.captured[hook][0] is apart["clean"][0].captured[hook][0]
        assert references.computed == 3 * (len(kinds) + 1)

    def test_the_order_of_edits_is_the_forwards(self, checkpoint: Path) -> None:
        references = References()
        edits = edits_of({EMBED: SPECS["scale"], "blocks.2.hook_out": SPECS["add a number"]})
        first = references.get(checkpoint, "fp32", [IDS], POINTS, jitters=0, edits=[edits])
        again = references.get(checkpoint, "fp32", [IDS, IDS], POINTS, jitters=0, edits=[edits[::-1], edits])
        assert references.computed == 2
        assert again.truth.captured[EMBED][1] is first.truth.captured[EMBED][0]

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_truth_and_reference_are_edited_each_at_its_dtype(self, checkpoint: Path, dtype: str) -> None:
        hook, edits = "blocks.1.mlp.hook_out", [at("blocks.1.mlp.hook_out", "add per channel", [2, 6])]
        pair, clean = (
            References().get(checkpoint, dtype, [IDS], POINTS, jitters=0, edits=e) for e in (edits, None)
        )
        models = (load_truth(checkpoint, dtype), load_model(checkpoint, dtype, attn_implementation="sdpa"))
        for model, got, before in zip(
            models, (pair.truth, *pair.same), (clean.truth, *clean.same), strict=True
        ):
            assert same_run(got, run_reference(model, [IDS], POINTS, edits))
            was, now = before.captured[hook][0], got.captured[hook][0]
            added = (now.double() - was.double())[[2, 6]]
            value = torch.tensor(CHANNELS, dtype=torch.float32).double()
            assert now.dtype == model.dtype
            # Half a unit of the sum's last place is all that is lost; fp64 keeps the fp32 value as it is.
            bound = torch.finfo(now.dtype).eps * torch.maximum(was.double().abs(), now.double().abs())[[2, 6]]
            assert bool(((added - value).abs() <= bound).all())

    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    @pytest.mark.parametrize("hook", HOOKS)
    def test_every_realisation_is_edited(self, checkpoint: Path, references, dtype: str, hook: str) -> None:
        """Set rows are the same in all of them, and what leads to them and follows them carries each one's noise."""
        edits = at(hook, "set per channel", [3, 8])
        plain, *moved = references.get(checkpoint, dtype, [IDS], POINTS, edits=[edits]).same
        clean = references.get(checkpoint, dtype, [IDS], POINTS).same
        assert len(moved) == 2
        for run, untouched in zip(moved, clean[1:], strict=True):
            assert same_bits(run.captured[hook][0][[3, 8]], plain.captured[hook][0][[3, 8]])
            assert same_bits(run.captured[EMBED][0], plain.captured[EMBED][0])
            for other in POINTS[1 : POINTS.index(hook)]:
                assert same_bits(run.captured[other][0], untouched.captured[other][0])
            for other in POINTS[max(1, POINTS.index(hook)) :]:
                assert not same_bits(run.captured[other][0], plain.captured[other][0])

    @pytest.mark.parametrize(
        ("edits", "message"),
        [
            ([(), ()], "1 sequences but 2 tuples of edits"),
            ([], "1 sequences but 0 tuples of edits"),
            (
                [(*at(EMBED, pos=1), *at(FINAL_NORM, pos=[0, N - 1]))],
                "position 11 is past the end of sequence 0",
            ),
        ],
    )
    def test_mistakes_cost_no_load(self, checkpoint: Path, edits: Any, message: str) -> None:
        references = References()
        with pytest.raises(UsageError, match=message):
            references.get(checkpoint, "fp32", [IDS[:5]], POINTS, edits=edits)
        assert not references._models


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> ReferenceBackend:
    return boot_reference(checkpoint)


class TestBackend:
    @pytest.mark.parametrize("hook", HOOKS)
    def test_is_what_run_reference_gives(self, backend: ReferenceBackend, hook: str) -> None:
        specs = [None, {hook: {**SPECS["add per channel"], "pos": [1, 5]}}, {hook: SPECS["suppress"]}]
        result = backend.forward(PROMPTS, capture=POINTS, intervene=specs, return_logits=True)
        edits = [edits_of(one, len(ids)) for one, ids in zip(specs, PROMPTS, strict=True)]
        expected = run_reference(backend._alive(), PROMPTS, POINTS, edits)
        assert result.logits is not None
        for index, ids in enumerate(PROMPTS):
            assert same_bits(result.logits[index, : len(ids)], expected.logits[index])
            assert all(same_bits(result.rows(h, index), expected.captured[h][index]) for h in POINTS)
            assert result.new_tokens[index] == [int(expected.logits[index][-1].argmax())]

    @pytest.mark.parametrize("hook", HOOKS)
    @pytest.mark.parametrize("spec", ["suppress", "set per channel"])
    def test_decode_steps_are_edited(self, backend: ReferenceBackend, hook: str, spec: str) -> None:
        pos = [N - 3, N + 1]
        clean = backend.forward([IDS], capture=POINTS, max_new_tokens=4)
        here = backend.forward(
            [IDS], capture=POINTS, max_new_tokens=4, intervene={hook: {**SPECS[spec], "pos": pos}}
        )
        every = backend.forward([IDS], capture=POINTS, max_new_tokens=4, intervene={hook: SPECS[spec]})
        wanted = torch.tensor(SPECS[spec].get("value", 0.0)).expand(N + 3, WIDTH)
        for result, rows in ((here, pos), (every, list(range(N + 3)))):
            assert result.lengths == [N + 3]
            assert ulps(result.rows(hook, 0)[rows], wanted[rows], wanted[rows]) <= (
                2 if hook == FINAL_NORM else 0
            )
        for name in POINTS:
            assert same_bits(here.rows(name, 0)[: pos[0]], clean.rows(name, 0)[: pos[0]])

    def test_decode_rows_are_those_of_one_forward(self, backend: ReferenceBackend) -> None:
        """A row that was edited stays edited for the steps after it, as in an engine's cache."""
        specs = {
            EMBED: {**SPECS["set per channel"], "pos": 2},
            "blocks.1.hook_out": {**SPECS["add per channel"], "pos": [4, N, N + 2]},
            "blocks.2.attn.hook_out": SPECS["scale"],
        }
        result = backend.forward([IDS], capture=POINTS, max_new_tokens=4, intervene=specs)
        forced = teacher_forced([IDS], result.new_tokens)
        expected = run_reference(backend._alive(), forced, POINTS, [edits_of(specs, N + 3)])
        for hook in POINTS:
            got, wanted = result.rows(hook, 0).double(), expected.captured[hook][0].double()
            assert float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()) < 1e-5
        assert [int(row.argmax()) for row in expected.logits[0][N - 1 :]] == result.new_tokens[0]

    def test_prompt_rows_do_not_depend_on_what_follows(self, backend: ReferenceBackend) -> None:
        specs = {"blocks.2.hook_out": {**SPECS["add per channel"], "pos": [1, N - 1]}}
        one, four = (
            backend.forward([IDS], capture=POINTS, intervene=specs, max_new_tokens=k) for k in (1, 4)
        )
        assert all(same_bits(one.rows(h, 0), four.rows(h, 0)[:N]) for h in POINTS)

    def test_the_next_call_is_clean(self, backend: ReferenceBackend) -> None:
        def rows() -> list[torch.Tensor]:
            result = backend.forward(PROMPTS, capture=POINTS, max_new_tokens=3)
            return [result.rows(hook, index) for hook in POINTS for index in range(len(PROMPTS))]

        before = rows()
        backend.forward(PROMPTS, max_new_tokens=3, intervene=dict.fromkeys(POINTS, SPECS["suppress"]))
        assert all(map(same_bits, rows(), before))

    @pytest.mark.parametrize(
        ("specs", "error", "message"),
        [
            (max, UnsupportedError, "intervene is a callable"),
            ([{}, {}], UsageError, "2 spec sets for 3 requests"),
            (
                {EMBED: {"op": "suppress", "pos": 3}},
                UsageError,
                "past the end of request 0, which has 3 rows",
            ),
            ({"blocks.0.attn.hook_pattern": {"op": "suppress"}}, UsageError, "known but cannot fire"),
            (
                {EMBED: {"op": "add", "value": [1.0, 2.0]}},
                UsageError,
                "it holds 2 numbers; it takes one, or 64",
            ),
        ],
    )
    def test_refused_before_anything_runs(
        self, backend: ReferenceBackend, monkeypatch, specs, error, message
    ) -> None:
        monkeypatch.setattr("harness.reference.backend.run_reference", None)
        with pytest.raises(error, match=message):
            backend.forward(PROMPTS, intervene=specs, max_new_tokens=3)

    def test_values_must_be_finite_at_its_dtype(self, checkpoint: Path) -> None:
        backend = boot_reference(checkpoint, "fp16")
        with pytest.raises(UsageError, match=r"70000\.0, which is too large for float16"):
            backend.forward(PROMPTS, intervene={EMBED: {"op": "add", "value": 7e4}})

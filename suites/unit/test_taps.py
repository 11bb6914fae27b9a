"""Taps on modules that emit values as the families do: captures and edits are canonical, the rest keeps its bits.

No engine: a module, rows, and the tables a worker would fill. The hook is the one the workers install.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.conventions import Emission
from harness.errors import EngineError
from harness.interventions import Edit, Plan, parse_interventions
from harness.models.tiny import TINY_MODELS
from harness.points import EMBED, FINAL_NORM, all_points
from harness.vllm.overlays import TapSpec, get_overlay, known_architectures
from harness.vllm.spec import HarnessSpec
from harness.vllm.taps import TapSet, emission_of, install_taps

WIDTH, ROWS, MAX = 16, 6, 8
HOOK = "ln_final.hook_normalized"
DTYPES = [torch.float32, torch.bfloat16]


class Emits(nn.Module):
    """Emits canonical rows as a family's module would."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        weight = torch.rand(WIDTH, generator=draw) + 0.5
        weight[0] = 0.0  # a channel that is not divided
        if kind == "gemma":
            weight = weight - 1.0
        self.weight = nn.Parameter(weight.to(dtype))
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=draw).to(dtype))
        self.kind = kind

    @property
    def emission(self) -> Emission:
        return {
            "plain": Emission(),
            "llama": Emission(self.weight),
            "gemma": Emission(self.weight, plus_one=True),
            "layer norm": Emission(self.weight, offset=self.bias),
            "scaled": Emission(factor=12.0),
        }[self.kind]

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.emission.emitted(rows)


KINDS = ["plain", "llama", "gemma", "layer norm", "scaled"]
CHANNELS = torch.randn(WIDTH, generator=torch.manual_seed(3)).tolist()
SPECS = {
    "suppress": {"op": "suppress"},
    "scale": {"op": "scale", "factor": -1.7},
    "add a number": {"op": "add", "value": 0.3},
    "add per channel": {"op": "add", "value": CHANNELS},
    "set a number": {"op": "set", "value": 0.1},
    "set per channel": {"op": "set", "value": CHANNELS},
}


def tapped(kind: str, dtype: torch.dtype) -> tuple[Emits, TapSet]:
    module = Emits(kind, dtype)
    taps = install_taps(
        [(TapSpec(HOOK, "norm", WIDTH), module, module.emission)],
        max_tokens=MAX,
        max_programs=2,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return module, taps


def step(module: Emits, taps: TapSet, rows: torch.Tensor, programs: Any = ()) -> tuple[Any, torch.Tensor]:
    """What the module returns, and the canonical capture."""
    taps.open_step(len(rows))
    taps.edit_step(programs)
    with torch.no_grad():
        out = module(rows)
    taps.close_step()
    tap = taps.taps[HOOK]
    return out, tap.emission.canonical(tap.rows[: len(rows)].clone())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPECS)
def test_an_edit_lands_as_the_canonical_value(kind: str, dtype: torch.dtype, spec: str) -> None:
    module, taps = tapped(kind, dtype)
    rows = torch.randn(ROWS, WIDTH, generator=torch.manual_seed(5)).to(dtype)
    clean, before = step(module, taps, rows)
    [[edit]] = parse_interventions(
        {HOOK: SPECS[spec]}, widths={HOOK: WIDTH}, nonfireable={}, lengths=[ROWS], dtype=dtype
    )
    taps.load(Plan(((edit,),), ()))
    edited, after = step(module, taps, rows, [(2, 4, 1)])

    others = [0, 1, 4, 5]
    assert torch.equal(edited[others].view(torch.uint8), clean[others].view(torch.uint8))
    assert torch.equal(after[others], before[others])
    wanted = edit.apply(before[2:4].double())
    # One rounding, of what is emitted, and the capture's own.
    eps = torch.finfo(dtype).eps
    emission = module.emission
    divisor = emission.emitted(wanted * 0 + 1) - emission.emitted(wanted * 0)
    size = (emission.emitted(wanted).abs() + clean[2:4].double().abs()) / divisor.abs() + wanted.abs()
    assert bool(((after[2:4].double() - wanted).abs() <= eps * size).all())
    if spec == "suppress":
        assert not bool(after[2:4].any())
    if edit.scale == 0.0:
        assert torch.equal(after[2:4], emission.read_back(edit.bias, dtype).expand(2, WIDTH))
    assert torch.equal(module.emission.canonical(edited[2:4]), after[2:4])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["set a number", "set per channel"])
def test_what_is_set_lies_rounded_in_the_table(kind: str, spec: str) -> None:
    """A compiled graph may use the table's numbers before it rounds them, and a LayerNorm sees the difference."""
    module, taps = tapped(kind, torch.bfloat16)
    [[edit]] = parse_interventions(
        {HOOK: SPECS[spec]}, widths={HOOK: WIDTH}, nonfireable={}, lengths=[ROWS], dtype=torch.bfloat16
    )
    taps.load(Plan(((edit,),), ()))
    bias = taps.taps[HOOK].bias[1]
    assert bias.dtype == torch.float32
    assert torch.equal(bias, module.emission.bias(0.0, edit.bias).bfloat16().float().expand(WIDTH))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_emitted_is_rounded_once(kind: str) -> None:
    """bf16: against the same map in fp64, no value is off by more than half a unit, but for fp32's own rounding."""
    module, taps = tapped(kind, torch.bfloat16)
    rows = torch.randn(ROWS, WIDTH, generator=torch.manual_seed(6)).bfloat16()
    clean, _ = step(module, taps, rows)
    for spec in SPECS.values():
        [[edit]] = parse_interventions(
            {HOOK: spec}, widths={HOOK: WIDTH}, nonfireable={}, lengths=[ROWS], dtype=torch.bfloat16
        )
        taps.load(Plan(((edit,),), ()))
        edited, _ = step(module, taps, rows, [(0, ROWS, 1)])
        emission = module.emission
        exact = emission.emitted(edit.apply(emission.canonical(clean.double())))
        half = torch.finfo(torch.bfloat16).eps / 2
        size = torch.maximum(exact.abs(), clean.double().abs())
        assert bool(((edited.double() - exact).abs() <= half * exact.abs() + 2**-22 * (1 + size)).all())


# --- inputs, parts, and shares of ranks ---------------------------------------------------------------------------


class Projects(nn.Module):
    """Two query heads, one key-value head, side by side; and a block that is given its stream in two halves."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        return (hidden_states * 2.0 if residual is None else hidden_states + residual), None


def installed(module: nn.Module, *specs: TapSpec, place: tuple[int, int] = (0, 1)) -> TapSet:
    return install_taps(
        [(spec, module, Emission()) for spec in specs],
        max_tokens=MAX,
        max_programs=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        place=place,
    )


def heads_of(width: int = 8) -> list[TapSpec]:
    return [
        TapSpec("blocks.0.attn.hook_q", "qkv", 2 * width, heads=2),
        TapSpec("blocks.0.attn.hook_k", "qkv", width, heads=1, before=(2,)),
        TapSpec("blocks.0.attn.hook_v", "qkv", width, heads=1, before=(2, 1)),
    ]


def run(module: nn.Module, taps: TapSet, *args: Any, program: int = 0, **kwargs: Any) -> Any:
    n = (args or tuple(kwargs.values()))[0].shape[0]
    taps.open_step(n)
    taps.edit_step([(0, n, program)] if program else [])
    out = module(*args, **kwargs)
    taps.close_step()
    return out


def test_parts_that_stand_side_by_side_are_read_and_edited_each_for_itself() -> None:
    module = Projects()
    taps = installed(module, *heads_of())
    rows = torch.randn(5, 32, generator=torch.manual_seed(1))
    clean = run(module, taps, rows)[0]
    assert torch.equal(clean, rows * 2)
    for (name, tap), columns in zip(
        taps.taps.items(), (slice(0, 16), slice(16, 24), slice(24, 32)), strict=True
    ):
        assert torch.equal(tap.rows[:5], clean[:, columns])
        taps.load(Plan(((Edit(name, "scale", 3.0, torch.zeros(()), None),),), ()))
        edited = run(module, taps, rows, program=1)[0]
        others = [i for i in range(32) if i not in range(32)[columns]]
        assert torch.equal(edited[:, columns], clean[:, columns] * 3)
        assert torch.equal(edited[:, others], clean[:, others])


@pytest.mark.parametrize("as_keyword", [True, False])
def test_an_argument_is_read_and_edited_before_the_module_runs(as_keyword: bool) -> None:
    module = Projects()
    taps = installed(module, TapSpec("blocks.0.attn.hook_in", "attn", 8, argument="hidden_states"))
    rows = torch.randn(4, 8, generator=torch.manual_seed(2))
    given = {"hidden_states": rows} if as_keyword else {}
    out = run(module, taps, *([] if as_keyword else [rows]), **given)[0]
    tap = taps.taps["blocks.0.attn.hook_in"]
    assert torch.equal(tap.rows[:4], rows)
    taps.load(Plan(((Edit(tap.spec.name, "suppress", 0.0, torch.zeros(()), None),),), ()))
    edited = run(module, taps, *([] if as_keyword else [rows]), program=1, **given)[0]
    assert bool(out.any())
    assert not bool(edited.any())


def test_a_stream_in_two_halves_is_read_as_its_sum() -> None:
    module = Projects()
    taps = installed(module, TapSpec("blocks.0.hook_in", "block", 8, argument="hidden_states", sums=True))
    tap = taps.taps["blocks.0.hook_in"]
    delta, residual = torch.randn(2, 3, 8, generator=torch.manual_seed(4))
    out = run(module, taps, delta, residual)[0]
    assert torch.equal(tap.rows[:3], delta + residual)
    assert torch.equal(out, delta + residual)
    value = torch.arange(8.0)
    taps.load(Plan(((Edit(tap.spec.name, "set", 0.0, value, None),),), ()))
    assert torch.equal(run(module, taps, delta, residual, program=1)[0], value.expand(3, 8))
    assert torch.equal(run(module, taps, delta)[0], delta * 2), "a first block has no other half"


def test_ranks_have_their_own_heads_or_the_same_one() -> None:
    spec = heads_of()
    assert [spec[0].share(rank, 2) for rank in (0, 1)] == [(0, 8), (8, 16)]
    assert [spec[1].share(rank, 2) for rank in (0, 1)] == [(0, 8), (0, 8)]
    assert [one.columns(2) for one in spec] == [(0, 8), (8, 16), (16, 24)]
    eight = TapSpec("blocks.0.attn.hook_k", "qkv", 16, heads=2, before=(8,))
    assert [eight.share(rank, 4) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert eight.columns(4) == (16, 24)


def test_a_rank_edits_its_own_numbers() -> None:
    module = Projects()
    taps = installed(module, heads_of()[0], place=(1, 2))
    taps.load(Plan(((Edit("blocks.0.attn.hook_q", "set", 0.0, torch.arange(16.0), None),),), ()))
    rows = torch.randn(2, 24, generator=torch.manual_seed(7))
    assert torch.equal(run(module, taps, rows, program=1)[0][:, :8], torch.arange(8.0, 16.0).expand(2, 8))


def test_a_module_whose_forward_is_called_directly_is_read_and_edited_too() -> None:
    module = Projects()
    specs = [
        TapSpec("blocks.0.attn.hook_rot_q", "attn", 8, argument="hidden_states"),
        TapSpec("blocks.0.attn.hook_z", "attn", 8),
    ]
    taps = install_taps(
        [(spec, module, Emission()) for spec in specs],
        max_tokens=MAX,
        max_programs=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        direct=[module],
    )
    rows = torch.randn(3, 8, generator=torch.manual_seed(9))
    taps.open_step(3)
    module.forward(rows)
    taps.close_step()
    given, made = (tap.rows[:3].clone() for tap in taps.taps.values())
    assert torch.equal(given, rows)
    assert torch.equal(made, rows * 2)
    taps.load(Plan(((Edit(specs[0].name, "scale", 3.0, torch.zeros(()), None),),), ()))
    taps.open_step(3)
    taps.edit_step([(1, 2, 1)])
    out = module.forward(rows)[0]
    taps.close_step()
    assert torch.equal(out[1], rows[1] * 6)
    assert torch.equal(out[[0, 2]], rows[[0, 2]] * 2)
    assert taps.fires() == {spec.name: 2 for spec in specs}
    taps.remove(traced=False)
    assert "forward" not in vars(module)


def test_two_taps_at_one_place_are_refused() -> None:
    with pytest.raises(
        EngineError, match=r"has a tap already \(blocks\.0\.attn\.hook_q\), at the same place"
    ):
        installed(Projects(), heads_of()[0], heads_of()[0])


def test_an_argument_that_is_not_there_is_refused() -> None:
    with pytest.raises(EngineError, match=r"Projects takes no argument 'query' but hidden_states, residual"):
        installed(Projects(), TapSpec("blocks.0.attn.hook_rot_q", "attn", 8, argument="query", heads=1))


def test_a_step_is_taken_as_copies_and_sizes_may_change() -> None:
    taps = installed(Projects(), *heads_of())
    names = list(taps.taps)
    for total in (1, 1, 3, 1):
        for number, name in enumerate(names):
            taps.taps[name].rows.fill_(10.0 * number + total)
        taken = taps.take(names, total)
        for name in names:
            taps.taps[name].rows.fill_(-1.0)
        assert list(taken) == names
        for number, rows in enumerate(taken.values()):
            assert rows.tolist() == [[10.0 * number + total] * rows.shape[1]] * total
        assert len({rows.untyped_storage().data_ptr() for rows in taken.values()}) == len(names)
    assert list(taps.take(names[1:], 1)) == names[1:]
    assert taps.take([], 1) == {}
    taps.remove(traced=False)
    with pytest.raises(KeyError):
        taps.take(names, 1)


def test_rows_taken_between_steps_may_be_changed_and_trained_on() -> None:
    taps = installed(Projects(), *heads_of())
    with torch.inference_mode():  # as vLLM runs its steps
        taken = taps.take(list(taps.taps), 2)
    for rows in taken.values():
        rows.add_(1)
        (rows * torch.ones((), requires_grad=True)).sum().backward()


def test_only_taps_that_a_program_edits_do_its_arithmetic() -> None:
    """And only in steps that have rows of a program, until the edits are cleared."""
    taps = installed(Projects(), *heads_of())
    edited, *others = taps.taps.values()

    def on(rows: list[tuple[int, int, int]]) -> list[bool]:
        taps.open_step(3)
        taps.edit_step(rows)
        found = [tap.switch.editing for tap in (edited, *others)]
        taps.close_step()
        assert not any(tap.switch.editing for tap in taps.taps.values())
        return found

    taps.load(Plan(((Edit(edited.spec.name, "scale", 3.0, torch.zeros(()), None),),), ()))
    assert on([(0, 2, 1)]) == [True, False, False]
    assert on([]) == [False] * 3
    taps.clear_edits()
    assert on([(0, 2, 1)]) == [False] * 3


def test_nothing_is_left_after_removal() -> None:
    module = Projects()
    taps = installed(module, *heads_of(), TapSpec("blocks.0.hook_in", "qkv", 32, argument="hidden_states"))
    assert len(dict(module.named_buffers())) == 4 * 3 + 2
    taps.remove(traced=False)
    assert not dict(module.named_buffers())
    assert not [name for name in vars(module) if name.startswith("_tap")]
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


# --- specs and overlays ------------------------------------------------------------------------------------------


def configs() -> dict[str, Any]:
    return {tiny.architecture: tiny.config() for tiny in TINY_MODELS}


def test_specs_travel_as_json_and_tell_families_apart() -> None:
    """The families with one tree differ by convention alone, and that must be in the compile key."""
    told = set()
    for architecture, config in configs().items():
        spec = HarnessSpec(tuple(get_overlay(architecture).taps(config)))
        sent = json.dumps(spec.to_config(), sort_keys=True)
        assert HarnessSpec.from_config(json.loads(sent)) == spec
        assert [tap.name for tap in spec.taps] == all_points(4)
        assert {tap.width for tap in spec.taps} == {64}
        told.add(sent)
    # Those of Llama's own layout are told the same, and so are GPT-2 and GPT-J.
    assert len(told) == 12
    assert set(configs()) <= set(known_architectures())


@pytest.mark.parametrize("architecture", sorted(configs()))
def test_bare_specs_get_the_conventions_of_their_model(architecture: str) -> None:
    """What the plugin sends: where the modules are, and no more."""
    overlay, config = get_overlay(architecture), configs()[architecture]
    bare = HarnessSpec(
        tuple(TapSpec(name, path, width) for name, (path, width) in overlay.capture_specs(config).items()),
        bare=True,
    )
    sent = HarnessSpec.from_config(bare.to_config())
    assert sent == bare
    assert bare.completed(overlay, config) == HarnessSpec(tuple(overlay.taps(config)))


def test_what_an_engine_holds_is_looked_up() -> None:
    weight, bias = torch.rand(WIDTH), torch.rand(WIDTH)
    model = SimpleNamespace(
        norm=SimpleNamespace(weight=weight, bias=bias),
        normalizer=torch.tensor(55.4256).bfloat16(),
        config=SimpleNamespace(embedding_multiplier=12),
    )
    norm = TapSpec(FINAL_NORM, "norm", WIDTH, divisor="norm.weight", plus_one=True, offset="norm.bias")
    found = emission_of(model, norm)
    assert found.weight is weight
    assert found.offset is bias
    assert found.plus_one
    by_buffer, by_config = (
        emission_of(model, TapSpec(EMBED, "embed", WIDTH, factor=path))
        for path in ("normalizer", "config.embedding_multiplier")
    )
    assert (by_buffer.factor, by_config.factor) == (
        55.5,
        12.0,
    )  # the buffer is rounded, and so is what it does
    assert emission_of(model, TapSpec("blocks.0.hook_out", "block", WIDTH, sums=True)).plain
    with pytest.raises(EngineError, match=r"ln_final.hook_normalized: this model has no norm\.gain"):
        emission_of(model, TapSpec(FINAL_NORM, "norm", WIDTH, divisor="norm.gain"))

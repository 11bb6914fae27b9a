"""Edits inside the engine do to every later hook and row what the same edits do in the reference, and nothing else.

Every check goes through ``parity.check_edits``: a clean call, the edited one and a clean one again, judged on the
edited values, on the change against the clean call, on rows no edit can reach (equal in every bit, other requests
included), on values that must read back exactly, and on nothing being left behind.
"""

from __future__ import annotations

import pytest

from harness.errors import UsageError
from harness.prompts import of_length
from suites.edits import OPS, POSITIONS, Sizes, hooks_by_depth, randn

tiny = pytest.mark.parity(smoke={"models": ("tiny-llama",)})


def _rotated(parity, rotation, lengths):
    """A batch with one request per hook; op and positions differ from hook to hook, and two requests are clean."""
    hooks = hooks_by_depth(parity)
    prompts, specs = [], []
    sizes = Sizes(parity)
    for h, hook in enumerate(hooks):
        n = lengths[h % len(lengths)]
        prompts.append(of_length(parity, n, seed=h % len(lengths)))
        spec = OPS[(h + rotation) % len(OPS)](sizes.of(hook), parity.geometry.row_width(hook))
        pos = POSITIONS[(2 * h + rotation) % len(POSITIONS)](n)
        specs.append({hook: spec if pos is None else {**spec, "pos": pos}})
    return [*prompts, prompts[0], prompts[1]], [*specs, None, {}]


@tiny
@pytest.mark.parametrize("rotation", range(len(OPS)))
def test_every_op_at_every_hook(parity, rotation):
    """Six rotations meet every op with every hook, and with every kind of position."""
    rotate(parity, rotation)


def rotate(parity, rotation, *, must_bite=True):
    """One rotation; every edit must be seen in the reference, unless noise may hide it."""
    prompts, specs = _rotated(parity, rotation, (70, 33, 12))
    parity.check_edits(prompts, specs, label=f"rotation {rotation}", must_bite=must_bite)


@pytest.mark.parity(tokenizer=True)
def test_edits_on_real_text(parity):
    """The same on a trained model: English prompts, massive activations, thirty blocks; a rotation per mode."""
    rotation = 0 if parity.config.mode == "compiled" else 3
    prompts, specs = _rotated(parity, rotation, (24, 12, 7))
    parity.check_edits(prompts, specs, label=f"rotation {rotation}")


@pytest.mark.parity(needs=("chunking",), smoke={"models": ("tiny-llama",)})
def test_around_a_chunk_border(parity):
    """One prompt in two chunks: the last row of the first, the first of the second, both, and all from there on."""
    step = parity.step
    prompt = of_length(parity, step + 6)
    hook = f"blocks.{parity.n_layers // 2}.hook_out"
    value = randn(3, parity.width, Sizes(parity).of(hook))
    for pos in (step - 1, step, [step - 1, step], list(range(step, step + 6))):
        parity.check_edits([prompt], {hook: {"op": "add", "value": value, "pos": pos}}, label=f"pos {pos}")


@tiny
def test_several_hooks_at_once(parity):
    """One request with five edits at different hooks and rows: each row gets just the edits that name it."""
    sizes, last = Sizes(parity), parity.n_layers - 1
    n = 40
    add = {"op": "add", "value": randn(4, parity.width, sizes.of("embed.hook_out")), "pos": [3, 4, 20]}
    specs = {
        "embed.hook_out": add,
        "blocks.0.attn.hook_out": {"op": "scale", "factor": 2.5},
        f"blocks.{last}.mlp.hook_out": {"op": "suppress", "pos": [4, 5, 39]},
        f"blocks.{last}.hook_out": {
            "op": "set",
            "value": sizes.of(f"blocks.{last}.hook_out"),
            "pos": list(range(10, 20)),
        },
        "ln_final.hook_normalized": {"op": "add", "value": 1.5, "pos": [0, 20]},
    }
    parity.check_edits([of_length(parity, n)], specs)


@tiny
def test_one_set_for_the_batch(parity):
    """A single spec set edits every request of a ragged batch alike."""
    hook = f"blocks.{parity.n_layers // 2}.attn.hook_out"
    value = randn(5, parity.width, Sizes(parity).of(hook))
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((33, 2, 70, 7))]
    parity.check_edits(prompts, {hook: {"op": "add", "value": value, "pos": [0, 1]}})


@tiny
def test_every_row_of_the_batch(parity):
    """Every op, somewhere from the first hook to the last, on all rows alike: the least that a backend can be asked."""
    hooks, sizes = hooks_by_depth(parity), Sizes(parity)
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((33, 2, 12))]
    for number in range(len(OPS)):
        hook = hooks[round(number * (len(hooks) - 1) / (len(OPS) - 1))]
        op = OPS[number - 1](sizes.of(hook), parity.geometry.row_width(hook))
        parity.check_edits(prompts, {hook: op}, label=f"{op['op']} at {hook}")


def test_decode_steps(parity):
    """Edits without positions go on at decode steps; edits of decode rows touch those alone."""
    hook = f"blocks.{parity.n_layers // 2}.hook_out"
    value = randn(6, parity.width, Sizes(parity).of(hook))
    prompts = [of_length(parity, n, seed=i) for i, n in enumerate((9, 66, 5))]
    specs = [
        {hook: {"op": "add", "value": value}},
        {hook: {"op": "set", "value": value, "pos": [67, 68]}},
        None,
    ]
    edited = parity.check_edits(prompts, specs, max_new_tokens=4)
    assert edited.lengths == [12, 69, 8]


@pytest.mark.parity(backends=("vllm",), smoke={"models": ("tiny-llama",)})
def test_as_many_programs_as_there_is_room_for(parity):
    """Sixteen requests with an edit each of its own; a seventeenth combination is refused, by number and way out."""
    hook = "blocks.0.mlp.hook_out"
    size = Sizes(parity).of(hook)
    prompts = [of_length(parity, 6, seed=i) for i in range(16)]
    specs = [{hook: {"op": "add", "value": size * (i + 1)}} for i in range(16)]
    edited = parity.check_edits(prompts, specs)
    clean = parity.forward(prompts)
    parity.note("16 programs", seconds_edited=edited.stats["seconds"], seconds_clean=clean.stats["seconds"])
    many = {hook: {"op": "add", "value": -size, "pos": 0}}
    with pytest.raises(UsageError, match=r"needs 17 distinct combinations of edits.*room for 16"):
        parity.forward([*prompts, prompts[0]], intervene=[*specs, many])


@tiny
def test_refusals_cost_nothing(parity):
    """Specs that cannot be done are refused with hook, key and reason; the engine goes on as if nothing was asked."""
    prompts = [of_length(parity, 12)]
    before = parity.forward(prompts)
    hook = "blocks.0.hook_out"
    refused = [
        (
            {hook: {"op": "multiply"}},
            r"hook 'blocks.0.hook_out', key 'op'.*'multiply'.*suppress, scale, add, set",
        ),
        ({hook: {"op": "add", "value": 1.0, "position": 3}}, r"key 'position'.*did you mean 'pos'"),
        ({hook: {"op": "set"}}, r"key 'value': 'set' needs it"),
        ({hook: {"op": "add", "value": [1.0, 2.0]}}, r"key 'value': it holds 2 numbers"),
        ({hook: {"op": "scale", "factor": float("nan")}}, r"key 'factor': nan, which is not finite"),
        (
            {hook: {"op": "suppress", "pos": 12}},
            r"position 12 is past the end of request 0, which has 12 rows",
        ),
        ({hook: {"op": "suppress", "pos": -1}}, r"-1 is negative"),
        ({hook: {"op": "suppress", "pos": True}}, r"True.* is no position"),
        ({"blocks.0.attn.hook_q": {"op": "suppress"}}, r"known but cannot fire"),
        ({"blocks.0.hook_put": {"op": "suppress"}}, r"did you mean"),
        ({hook: lambda value: value}, r"is a callable"),
        ([{}, {}], r"2 spec sets for 1 requests"),
        ("suppress", r"intervene is 'suppress'"),
    ]
    for specs, reason in refused:
        with pytest.raises(UsageError, match=reason):
            parity.forward(prompts, intervene=specs)
    parity.bit_equal(
        list(parity.forward(prompts).captured.values()),
        list(before.captured.values()),
        label="after refusals",
        what=f"captures after {len(refused)} refused calls",
    )

"""What taps cost: memory as predicted from specs, nothing that grows, and time as a ratio to plain vLLM in one run."""

from __future__ import annotations

import contextlib
import functools
import mmap
import statistics
import time

import pytest
import torch

from harness.budgets import plan_memory, sided
from harness.points import TEMPLATES
from harness.prompts import of_length
from harness.vllm.overlays import get_overlay
from harness.vllm.spec import EDIT_PROGRAMS
from suites.probes import boots, run_probe
from suites.trial import expect_red

MIB = 2**20
PROMPT, NEW = 511, 64
CAPTURED = f"prefill of {PROMPT} tokens, captured"
IDLE = f"prefill of {PROMPT} tokens, taps idle"
EDITED = f"prefill of {PROMPT} tokens, edited"
DECODE = f"decode of {NEW} tokens, captured"
READ_BACK = "captures read back"
#: Most that the median ratio to plain vLLM may be.
TIME = {
    CAPTURED: {"compiled": 1.05, "eager": 1.10},
    IDLE: {"compiled": 1.03, "eager": 1.10},
    EDITED: {"compiled": 1.05, "eager": 1.10},
    DECODE: {"compiled": 1.02, "eager": 1.10},
}
#: Reading captures back from the workers, over one copy of the same bytes into fresh memory: 30 % of its speed.
TRANSFER = 1 / 0.3
ROUNDS = 12
LONG = {"step": 512, "length": 640}

everywhere = pytest.mark.parity(
    models=("tiny-llama", "smollm2-135m"),
    backends=("vllm",),
    steps=(64,),
    smoke={"models": ("tiny-llama",), "dtypes": ("bf16",), "modes": ("eager",)},
)
on_ranks = pytest.mark.parity(
    models=("tiny-llama",),
    backends=("vllm",),
    topologies=("tp2", "tp2pp2"),
    extra_topologies=("tp2", "tp2pp2"),
    every_point=True,
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",), "topologies": ("tp2",)},
)
timed = pytest.mark.parity(
    models=("smollm2-135m",),
    backends=("vllm",),
    dtypes=("fp32",),
    steps=(64,),
    smoke={"modes": ("compiled",)},
)


def promised(parity, step):
    """The plan of an engine with this one's points."""
    config, topology = parity.hf_config, parity.config.topology
    taps = get_overlay(config.architectures[0]).taps(config, topology.tp, TEMPLATES)
    if parity.config.options.get("hook_points") != "every":
        taps = [tap for tap in taps if tap.name in set(parity.hook_points)]
    return plan_memory(
        taps,
        parity.geometry,
        itemsize=getattr(torch, parity.config.dtype).itemsize,
        max_num_batched_tokens=step,
        max_model_len=parity.config.max_model_len,
        max_programs=parity.config.options.get("max_edit_programs", EDIT_PROGRAMS),
        tensor_parallel_size=topology.tp,
        pipeline_parallel_size=topology.pp,
        tied=config.tie_word_embeddings,
        ends_everywhere=get_overlay(config.architectures[0]).ends_everywhere,
    )


def judge_state(parity):
    """Every rank's taps hold what was promised, within 5 %."""
    plan, held = promised(parity, parity.step), parity.engine.memory()["taps"]
    assert len(held) == len(plan.ranks)
    for rank, (wanted, got) in enumerate(zip(plan.ranks, held, strict=True)):
        for part in ("rows", "tables", "index"):
            assert abs(got[part] - getattr(wanted, part)) <= 0.05 * getattr(wanted, part), (
                f"rank {rank}: {part}"
            )
    parity.note(
        "tap state", promised=[rank.state for rank in plan.ranks], held=[sum(one.values()) for one in held]
    )


@everywhere
def test_taps_hold_what_was_promised(parity):
    """Step buffers, edit tables and row tables are as large as the formula says from the specs alone."""
    judge_state(parity)


@on_ranks
def test_every_rank_holds_its_share(parity):
    """The same on each rank, with heads shared out and every point installed."""
    judge_state(parity)


#: A tied embedding lies on the first and on the last stage; of GPT-2 vLLM makes embedding and final norm on every one.
SHARED_ENDS = ("tiny-llama-tied", "tiny-gpt2")


@pytest.mark.parity(
    models=SHARED_ENDS,
    extra_models=SHARED_ENDS,
    backends=("vllm",),
    topologies=("pp2",),
    extra_topologies=("pp2",),
    steps=(64,),
    smoke={"dtypes": ("fp32",), "modes": ("eager",)},
)
def test_ends_that_more_stages_hold_have_a_tap_on_each(parity):
    """What the first and the last stage both hold is promised for both, whether it fires there or not."""
    judge_state(parity)


@everywhere
def test_points_left_out_cost_nothing(parity):
    """An engine booted for one point holds that one's buffers."""
    hook = f"blocks.{parity.n_layers - 1}.hook_out"
    with parity.variant(hook_points=[hook], max_edit_programs=0) as one:
        (held,) = one.engine.memory()["taps"]
        (wanted,) = promised(one, one.step).ranks
    assert wanted.points == 1
    assert held["rows"] == wanted.rows
    assert held["tables"] == wanted.tables


def judge_growth(parity):
    """Over 200 calls the engine's process grows by less than what one of them captures."""
    prompts = [of_length(parity, n, seed=n) for n in (50, 14)]
    hook = f"blocks.{parity.n_layers // 2}.hook_out"

    def call(number):
        specs = {hook: {"op": "scale", "factor": 1.5, "pos": number % 14}} if number % 2 else None
        parity.forward(prompts, intervene=specs)

    for number in range(20):  # allocators and kernels settle
        call(number)
    before = parity.engine.memory()["resident"]
    for number in range(200):
        call(number)
    grown = parity.engine.memory()["resident"] - before
    one_call = 64 * promised(parity, parity.step).largest.per_token
    target = max(one_call, 4 * MIB)
    parity.note("growth over 200 calls", bytes=grown, captured_per_call=one_call, target=target)
    assert grown <= target, f"{grown / MIB:.1f} MiB in 200 calls; one captures {one_call / MIB:.1f} MiB"


@everywhere
def test_nothing_grows(parity):
    """Captures and edits, 200 times over: what a call held is let go."""
    judge_growth(parity)


@pytest.mark.parametrize(
    ("fault", "check", "says"),
    [("Hungry", judge_state, r"rank 0: rows"), ("Leaky", judge_growth, r"MiB in 200 calls")],
)
@pytest.mark.parity(
    models=("tiny-llama",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_hungry_engine_is_caught(parity, fault, check, says):
    """Buffers that are too long, and captures that are never let go, turn the budget red."""
    expect_red(parity, f"budgets.{fault}", check, says, errors=(AssertionError,))


@pytest.mark.slow
@pytest.mark.parity(
    models=("smollm2-135m",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_boots_give_back_what_they_took(parity):
    """Six engines one after the other in one process: closed, they leave what plain vLLM's leave, and nothing grows."""
    held, taps = {}, 0
    for kind in ("plain", "tapped"):
        found = run_probe(boots, parity.config.model, parity.config.mode, kind)
        held[kind], taps = found["held"], found["taps"]
        parity.note(f"{kind} boots", held=held[kind], taps=taps)
    left = max(tapped - plain for plain, tapped in zip(held["plain"], held["tapped"], strict=True))
    grown = {
        kind: some[-1] - some[1] for kind, some in held.items()
    }  # the first leaves what every process has
    assert left <= 0.25 * taps, (
        f"{left / MIB:.1f} MiB more than plain vLLM after close; taps hold {taps / MIB:.1f}"
    )
    assert grown["tapped"] - grown["plain"] <= 0.25 * taps, {kind: some / MIB for kind, some in grown.items()}


@contextlib.contextmanager
def two_kinds(parity, *, each, **options):
    """So many plain engines and so many with taps, side by side, and the case's own on the first of those with taps.

    ``options`` are of those with taps. The engine that suites share is not booted: it would take memory from these.
    """
    with contextlib.ExitStack() as stack:
        plain = [stack.enter_context(parity.spare_engine(instrument=False, **LONG)) for _ in range(each)]
        tapped = [stack.enter_context(parity.variant(**LONG, **options)) for _ in range(each)]
        yield tapped[0], plain, [one.engine for one in tapped]


def seconds(engine, prompts, **options):
    """What the engine took to run the prompts, as its own process measured it; reading captures back comes after."""
    return float(engine.forward(prompts, return_logits=False, **options).stats["generate_seconds"])


def copied(result):
    """Seconds that one copy of everything a call captured takes, into memory that nobody has touched."""
    started = time.perf_counter()
    with mmap.mmap(-1, sum(rows.nbytes for rows in result.captured.values())) as memory:
        at = 0
        for rows in result.captured.values():
            torch.frombuffer(memory, dtype=rows.dtype, count=rows.numel(), offset=at).copy_(rows.flatten())
            at += rows.nbytes
        return time.perf_counter() - started


def read_back(parity, **options):
    """Reading captures back from an engine in a process of its own, in turn with one copy of the same bytes."""
    alone = {"environment": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}}
    prompt, every = [of_length(parity, PROMPT)], {"capture": parity.hook_points}
    with parity.variant(**LONG, **alone, **options) as own:
        last = own.engine.forward(prompt, **every)
        return sided(
            [lambda: copied(last)],
            [lambda: own.engine.forward(prompt, **every).stats["read_seconds"]],
            rounds=ROUNDS,
        )


def measured(parity, plain, tapped, only=None):
    """Each way of running an engine with taps, in turn with plain vLLM."""
    prompt, short = [of_length(parity, PROMPT)], [of_length(parity, 8)]
    every, decode = {"capture": parity.hook_points}, {"max_new_tokens": NEW}
    edit = {f"blocks.{parity.n_layers // 2}.hook_out": {"op": "scale", "factor": 1.5, "pos": [3, 200]}}
    ways = {
        CAPTURED: (prompt, {}, every),
        IDLE: (prompt, {}, {}),
        EDITED: (prompt, {}, {"intervene": edit}),
        DECODE: (short, decode, every),
    }
    return {
        title: sided(
            [functools.partial(seconds, one, prompts, **both) for one in plain],
            [functools.partial(seconds, one, prompts, **both, **more) for one in tapped],
            rounds=ROUNDS,
        )
        for title, (prompts, both, more) in ways.items()
        if only in (None, title)
    }


def target(title, mode):
    """The most that the ratio of this name may be."""
    return TRANSFER if title == READ_BACK else TIME[title][mode]


def figures(found, at_most):
    """A ratio with its spread, and how far like engines are apart."""
    pair = found.paired
    kinds = {"base": found.base, "other": found.other}
    return {
        "ratio": pair.ratio,
        "quartiles": pair.quartiles,
        "rounds": len(pair.base),
        "apart": found.apart,
        "seconds": {kind: [statistics.median(one) for one in some] for kind, some in kinds.items()},
        "target": at_most,
    }


def judged(parity, title, found):
    """Record a ratio; what is wrong with it, if it is over its target by more than like engines are apart."""
    at_most = target(title, parity.config.mode)
    parity.note(title, **figures(found, at_most))
    if found.paired.ratio <= at_most + found.apart:
        return ""
    base = "one copy's" if title == READ_BACK else "plain vLLM's"
    return (
        f"{title}: {found.paired} of {base} time, at most {at_most:.3g} was promised, "
        f"and like engines were {found.apart:.3f} apart"
    )


@pytest.mark.slow
@timed
def test_time_of_taps(parity, benchmark):
    """Prefill captured, idle and edited, and decode, each in turn with plain vLLM."""
    with two_kinds(parity, each=2) as (own, plain, tapped):
        plan, peaks = promised(own, LONG["step"]).largest, {}
        # Before anything was captured: an allocator that keeps what it was once given would hide the rise.
        for name, (engine, *_), capture in (("plain", plain, []), ("tapped", tapped, own.hook_points)):
            seconds(engine, [of_length(own, PROMPT)])
            peaks[name] = engine.forward_memory([of_length(own, PROMPT)], capture=capture)["resident"]
        found = benchmark.pedantic(measured, (own, plain, tapped), rounds=1)
    over = peaks["tapped"] - peaks["plain"]
    parity.note("peak of a forward", **peaks, capture_state=plan.state, target=1.5 * plan.state)
    for title, one in found.items():
        benchmark.extra_info[title] = figures(one, target(title, parity.config.mode))
    problems = [judged(parity, title, one) for title, one in found.items()]
    if over > 1.5 * plan.state:
        problems.append(
            f"peak {over / MIB:.1f} MiB over plain vLLM's; the state is {plan.state / MIB:.1f} MiB"
        )
    assert not any(problems), "; ".join(filter(None, problems))


@pytest.mark.slow
@timed
def test_time_of_reading_back(parity, benchmark):
    """What a call captured reaches the driver from another process in little more than the time of one copy."""
    found = benchmark.pedantic(read_back, (parity,), rounds=1)
    benchmark.extra_info[READ_BACK] = figures(found, TRANSFER)
    assert not (problem := judged(parity, READ_BACK, found)), problem


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "title"),
    [
        ("Slow", CAPTURED),
        ("Slow", IDLE),
        ("SlowEdits", EDITED),
        ("SlowSteps", DECODE),
    ],
)
@pytest.mark.parity(
    models=("smollm2-135m",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_slow_engine_is_caught(parity, fault, title):
    """A worker that copies thirty times over, each in one place, turns the figure of that place red."""
    with two_kinds(parity, each=1, worker_cls=f"harness.faults.budgets.{fault}") as (own, plain, tapped):
        found = measured(own, plain, tapped, only=title)
    assert "was promised" in judged(parity, title, found[title])


@pytest.mark.slow
@pytest.mark.parity(
    models=("smollm2-135m",), backends=("vllm",), dtypes=("fp32",), modes=("eager",), steps=(64,)
)
def test_a_slow_engine_s_reader_is_caught(parity):
    """A worker that hands rows over as lists of numbers turns that figure red."""
    found = read_back(parity, worker_cls="harness.faults.budgets.SlowReader")
    assert "was promised" in judged(parity, READ_BACK, found)

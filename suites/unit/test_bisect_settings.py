"""Other settings a bisection tries a failing call on."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from harness.backend import BootConfig, Topology
from harness.bisect.bench import Call
from harness.bisect.investigate import investigate
from harness.bisect.settings import able, neighbours, try_settings
from harness.bisect.words import needs
from harness.errors import EngineError
from suites.unit.planted_engine import CALL, CONFIG, FAULTS, Planted


def test_settings_that_can_matter() -> None:
    big = BootConfig(
        "vllm",
        "m",
        "",
        dtype="bfloat16",
        topology=Topology(2, 1),
        max_num_batched_tokens=16,
        max_model_len=320,
    )
    long = Call((tuple(range(40)),))
    found = dict(neighbours(big, long, "simpler"))
    assert list(found) == ["eager", "one rank", "the whole batch in one step of 320", "float32"]
    for name, attribute, value in [
        ("eager", "mode", "eager"),
        ("one rank", "topology", Topology()),
        ("the whole batch in one step of 320", "max_num_batched_tokens", 320),
        ("float32", "dtype", "float32"),
    ]:
        assert getattr(found[name], attribute) == value
        assert able(found[name]) != big
    small = BootConfig("vllm", "m", "", mode="eager")
    assert list(neighbours(small, CALL, "simpler")) == []
    assert [name for name, _ in neighbours(small, CALL, "all")] == [
        "compiled",
        "steps of 16 tokens",
        "bfloat16",
    ]
    assert list(neighbours(big, long, "none")) == list(neighbours(CONFIG, long, "all")) == []


def test_an_engine_for_probes_serves_everything() -> None:
    config = BootConfig(
        "vllm", "m", "", options={"worker_cls": "a.B", "hook_points": ["x"], "max_edit_programs": 0}
    )
    options = able(config).options
    assert options["worker_cls"] == "a.B"
    assert options["hook_points"] == "every"
    assert options["max_edit_programs"] > 4
    assert able(config.with_options(max_edit_programs=99)).options["max_edit_programs"] == 99
    assert able(CONFIG) == CONFIG


def test_other_engines_are_tried_and_errors_are_told(hf_session) -> None:
    sound = Planted(hf_session)
    broken = Planted(hf_session, FAULTS["the MLP"][0])

    class Neighbourly(Planted):
        @contextlib.contextmanager
        def like(self, config):
            if config.mode == "compiled":
                raise EngineError("no compiler\nlast lines of a log")
            yield broken if config.dtype == "float16" else sound

    asked = [("a", CONFIG), ("b", replace(CONFIG, dtype="float16")), ("c", replace(CONFIG, mode="compiled"))]
    tried = try_settings(Neighbourly(hf_session), asked, CALL, disturbed=False)
    assert [one.wrong for one in tried] == [False, True, None]
    assert tried[2].error == "no compiler"
    narrowed = investigate(broken, CALL).narrowed
    told = list(needs(narrowed, tried))
    assert told[-3:] == ["a: right there", "b: wrong there, too", "c: not run (no compiler)"]

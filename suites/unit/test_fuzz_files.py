"""Files and words from outside, at random: each is read, or refused with one clear error; nothing in it is run."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import shutil
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.cli import VERBS, main
from harness.errors import UsageError
from harness.geometry import Geometry
from harness.models import load_config
from harness.reference.families import tree_of_config
from harness.report.build import render
from harness.store import RESULTS, read_run, tally
from harness.store.frames import to_frames
from harness.trial.records import curves, faults
from harness.vllm.overlays import get_overlay
from suites.unit.fuzz import one_line
from suites.unit.synthetic_run import declaration, make_verdict, result, write_run


def spoil(value: Any, rng: random.Random, rate: float) -> Any:
    """``value`` with some of what is in it replaced, left out or doubled."""
    if rng.random() < rate:
        return copy.copy(
            rng.choice(
                [
                    None,
                    True,
                    -1,
                    0.5,
                    10**30,
                    "",
                    "NaN",
                    "x" * 9,
                    [],
                    {},
                    [[]],
                    [None],
                    {"a": {}},
                    "<b>spoilt",
                ]
            )
        )
    if isinstance(value, dict):
        return {k: spoil(v, rng, rate) for k, v in value.items() if rng.random() > rate / 2}
    if isinstance(value, list):
        return [spoil(v, rng, rate) for v in value if rng.random() > rate / 2]
    return value


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "20261129-174455-smoke"
    verdicts = [make_verdict(layers=2), make_verdict(layers=2, broken_from="blocks.0.mlp.hook_out")]
    cases = [declaration(n) for n in range(3)]
    found = [
        result(cases[0], "passed", verdicts[:1]),
        result(cases[1], "failed", verdicts, message="broken"),
        result(cases[2], "skipped", skip_class="no-hardware", reason="none here"),
    ]
    found[0]["verdicts"].append(
        {"label": "sensitivity", "verdict": None, "detail": {"columns": ["kind"], "faults": [["x"]]}}
    )
    return write_run(folder, cases, found)


class TestResults:
    @given(st.integers(0, 2**32), st.sampled_from([0.002, 0.02, 0.2]))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_records_are_read_or_named_as_damaged(self, whole_run, tmp_path_factory, seed, rate):
        """Whatever stands in a line: it is read, or counted among the damaged; the rest of the run is there."""
        rng = random.Random(seed)
        lines = (whole_run / RESULTS).read_text().splitlines()
        spoilt = [json.dumps(spoil(json.loads(line), rng, rate)) for line in lines]
        folder = tmp_path_factory.mktemp("spoilt")
        (folder / RESULTS).write_text("\n".join(spoilt) + "\n")
        try:
            records = read_run(folder)
            tally(records)
            to_frames(records)
            curves([records])
            faults([records])
            page = render(records)
        except UsageError as error:
            one_line(error)
        else:
            assert page.startswith("<!")
            assert "<b>spoilt" not in page, "what stands in a record is text"
        shutil.rmtree(folder)

    @given(st.binary(max_size=300))
    def test_any_bytes_are_a_run_without_records(self, tmp_path_factory, noise):
        folder = tmp_path_factory.mktemp("noise")
        (folder / RESULTS).write_bytes(noise)
        with contextlib.suppress(UsageError):
            records = read_run(folder)
            assert not records.cases
            render(records)


class TestCheckpointConfig:
    @given(st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.4]))
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_config_is_read_or_refused(self, checkpoint, tmp_path_factory, seed, rate):
        """Sizes of a model that cannot be are refused before anything is loaded."""
        rng = random.Random(seed)
        fields = json.loads((checkpoint / "config.json").read_text())
        folder = tmp_path_factory.mktemp("config")
        (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(spoil(fields, rng, rate)))
        try:
            config = load_config(folder)
            tree = tree_of_config(config)
            geometry = Geometry.of(config)
            overlay = get_overlay((config.architectures or [""])[0])
            specs_of = overlay.capture_specs(config)
        except UsageError as error:
            one_line(error)
        else:
            assert (
                min(geometry.layers, geometry.width, geometry.heads, geometry.kv_heads, geometry.head_dim) > 0
            )
            assert specs_of
            assert tree
        shutil.rmtree(folder)

    def test_code_that_ships_with_a_checkpoint_is_not_run(self, checkpoint, tmp_path):
        marker = tmp_path / "ran"
        fields = json.loads((checkpoint / "config.json").read_text())
        fields |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
        (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
        with pytest.raises(UsageError, match="never run"):
            load_config(folder)
        assert not marker.exists()


words = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "--tp",
            "--pp",
            "--hooks",
            "--dtype",
            "--step",
            "--svg",
            "--json",
            "--html",
            "--out",
            "-1",
            "0",
            "1e9",
            "nan",
        ]
    ),
    st.sampled_from(
        ["tiny-llama", "/", "/dev/null", ".", "\0", "a\nb", "--", "every", "blocks.*.hook_out", "\udcff"]
    ),
)


class TestCommand:
    @given(
        # `doctor` imports vLLM, which takes seconds, and takes no words.
        st.sampled_from([name for name in VERBS if name != "doctor"]),
        st.lists(words, max_size=4),
    )
    @settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_any_words_give_a_status(self, tmp_path_factory, capsys, verb, arguments):
        with contextlib.chdir(tmp_path_factory.getbasetemp()):
            try:
                status = main([verb, *arguments])
            except SystemExit as stop:  # --help
                status = stop.code
        said = capsys.readouterr()
        assert status in (0, 1, 2, 4, 5)
        if status == 2:
            assert said.err.startswith("vllm-parity: ")
            assert said.err.count("\n") == 1

"""The reference's results on disk: read back bit for bit, by content, and computed again where anything is wrong."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from harness.interventions import parse_interventions
from harness.reference import disk
from harness.reference.disk import DiskCache
from harness.reference.references import References
from suites.unit.small_llama import IDS, POINTS, WIDTH, randomised, tiny_config

OTHER = [IDS[0], *IDS[2:]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    randomised(tiny_config("Llama"), "Llama").save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _everything_is_worth_a_file(monkeypatch):
    """Models this small compute faster than a disk reads."""
    monkeypatch.setattr(disk, "_WORTH", float("inf"))


def references(folder, **options) -> References:
    return References(max_loaded=2, disk=DiskCache(folder, **options))


def edits(factor: float):
    return parse_interventions(
        {"blocks.0.hook_out": {"op": "scale", "factor": factor}},
        widths=dict.fromkeys(POINTS, WIDTH),
        nonfireable={},
        lengths=[len(IDS)],
        dtype=torch.float32,
    )


def same(a, b) -> bool:
    runs = zip((a.truth, *a.same), (b.truth, *b.same), strict=True)
    return all(
        torch.equal(x.captured[name][0], y.captured[name][0]) and torch.equal(x.logits[0], y.logits[0])
        for x, y in runs
        for name in POINTS
    )


def test_another_run_computes_nothing(checkpoint, tmp_path):
    first, second = references(tmp_path), references(tmp_path)
    pair = first.get(checkpoint, "bf16", [IDS], POINTS)
    assert (first.computed, first.disk.kept, first.disk.misses) == (4, 4, 4)
    assert same(pair, second.get(checkpoint, "bf16", [IDS], POINTS))
    assert (second.computed, second.disk.hits) == (0, 4)
    assert second.seconds["load"] == 0


def test_everything_that_numbers_depend_on_is_in_the_name(checkpoint, tmp_path, monkeypatch):
    """Tokens, dtype, edits, attention, threads, weights: each asks for results of its own."""
    get = {"path": checkpoint, "engine_dtype": "bf16", "sequences": [IDS], "capture": POINTS, "jitters": 0}
    references(tmp_path).get(**get)

    def computed(**changed):
        fresh = references(tmp_path)
        fresh.attn_implementation = changed.pop("attention", "sdpa")
        fresh.get(**{**get, **changed})
        return fresh.computed

    assert computed() == 0
    assert computed(sequences=[OTHER]) == 2
    assert computed(engine_dtype="fp32") == 2
    assert computed(edits=edits(0.5)) == 2
    assert computed(edits=edits(0.25)) == 2
    assert computed(edits=edits(0.25)) == 0
    assert computed(attention="eager") == 2
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    assert computed(path=other) == 0, "a copy of a checkpoint is the same content"
    changed = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**changed, "rms_norm_eps": 1e-3}))
    disk._of_checkpoint.cache_clear()
    assert computed(path=other) == 2
    monkeypatch.setattr(disk, "_surroundings", lambda: ("another torch",))
    assert computed() == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "a flipped bit", "no safetensors"])
def test_a_damaged_file_is_computed_again_and_replaced(checkpoint, tmp_path, caplog, damage):
    pair = references(tmp_path).get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        data = bytearray(path.read_bytes())
        if damage == "a flipped bit":
            data[-5] ^= 1
        kept = {"truncated": data[: len(data) // 2], "empty": b"", "no safetensors": b"\xff" * 500}
        path.write_bytes(kept.get(damage, bytes(data)))
    fresh = references(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert same(pair, fresh.get(checkpoint, "bf16", [IDS], POINTS, jitters=0))
    assert fresh.computed == 2
    assert caplog.text.count("is computed again") == 2
    last = references(tmp_path)
    last.get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    assert last.computed == 0


def test_what_was_used_longest_ago_goes_first(checkpoint, tmp_path):
    references(tmp_path).get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    for path in tmp_path.glob("*.safetensors"):
        os.utime(path, (time.time() - 99, time.time() - 99))
    references(tmp_path, max_bytes=size * 3 // 2).get(checkpoint, "bf16", [OTHER], POINTS, jitters=0)
    newest = references(tmp_path)
    newest.get(checkpoint, "bf16", [OTHER], POINTS, jitters=0)
    assert newest.computed == 0
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= size * 3 // 2
    oldest = references(tmp_path)
    oldest.get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    assert oldest.computed >= 1


def test_a_folder_of_thousands_is_listed_now_and_then(checkpoint, tmp_path, monkeypatch):
    """Once per entry would make each case slower than the one before."""
    listed = []
    glob = Path.glob

    def counted(self, pattern):
        listed.extend([pattern] if self == tmp_path else [])
        return glob(self, pattern)

    monkeypatch.setattr(Path, "glob", counted)
    many = references(tmp_path)
    for first in range(12):
        many.get(checkpoint, "bf16", [[first, *IDS]], POINTS, jitters=0)
    assert len(list(glob(tmp_path, "*.safetensors"))) == 24
    assert len(listed) == 1


def test_a_folder_that_cannot_be_written_costs_nothing(checkpoint, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    blocked = References(max_loaded=2, disk=DiskCache(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING):
        blocked.get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    assert blocked.computed == 2
    assert "could not be kept" in caplog.text


def test_what_is_computed_faster_than_read_is_not_kept(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_WORTH", 0.0)
    first = references(tmp_path)
    first.get(checkpoint, "bf16", [IDS], POINTS, jitters=0)
    assert first.disk.kept == 0
    assert not list(tmp_path.iterdir())


def test_logits_that_were_not_kept_are_a_miss(checkpoint, tmp_path):
    references(tmp_path).get(checkpoint, "bf16", [IDS], POINTS, jitters=1)
    again = references(tmp_path)
    pair = again.get(checkpoint, "bf16", [IDS], POINTS, jitters=1, logits=True)
    assert all(run.logits[0].numel() for run in pair.same)

"""The cache of built models is atomic and verified: what is damaged, half-written or in the way is never served."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.errors import HarnessError, UsageError
from harness.models import cache, materialise

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOAD = b"weights " * 1000


class Recipe:
    """A build that writes two small files and counts its runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, folder: Path) -> None:
        self.runs += 1
        (folder / "sub").mkdir()
        (folder / "model.bin").write_bytes(PAYLOAD)
        (folder / "sub" / "config.json").write_text("{}")


def test_an_entry_is_built_once_and_described_by_its_manifest(own_cache: Path) -> None:
    recipe = Recipe()
    entry = materialise("toy", 3, recipe)
    assert entry == own_cache / "models" / "toy-v3"
    assert materialise("toy", 3, recipe) == entry
    assert recipe.runs == 1
    manifest = json.loads((entry / cache.MANIFEST).read_text())
    assert manifest["files"] == {
        "model.bin": {"size": len(PAYLOAD), "sha256": hashlib.sha256(PAYLOAD).hexdigest()},
        "sub/config.json": {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()},
    }


def test_another_recipe_version_is_another_entry(own_cache: Path) -> None:
    recipe = Recipe()
    assert materialise("toy", 1, recipe) != materialise("toy", 2, recipe)
    assert recipe.runs == 2
    assert (own_cache / "models" / "toy-v1").is_dir()


def flip_a_byte(entry: Path) -> None:
    """Keep size and time stamp: only the hash can tell."""
    path = entry / "model.bin"
    stat = path.stat()
    path.write_bytes(b"W" + PAYLOAD[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def truncate(entry: Path) -> None:
    (entry / "model.bin").write_bytes(PAYLOAD[:-1])


def lose_a_file(entry: Path) -> None:
    (entry / "sub" / "config.json").unlink()


def add_a_file(entry: Path) -> None:
    (entry / "adapter_config.json").write_text("{}")


def lose_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).unlink()


def garble_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text('{"format": 1, "files": [')


def reshape_the_manifest(entry: Path) -> None:
    (entry / cache.MANIFEST).write_text('["not", "a", "manifest"]')


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_a_byte, "SHA-256 differs"),
        (truncate, "7999 bytes, 8000 were written"),
        (lose_a_file, "missing ['sub/config.json']"),
        (add_a_file, "not listed ['adapter_config.json']"),
        (lose_the_manifest, "MANIFEST.json is missing or unreadable"),
        (garble_the_manifest, "MANIFEST.json is missing or unreadable"),
        (reshape_the_manifest, "MANIFEST.json is missing or unreadable"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.usefixtures("own_cache")
def test_a_damaged_entry_is_rebuilt_and_the_log_says_why(
    damage: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    damage(entry)
    monkeypatch.setattr(cache, "_verified", {})  # what another process sees
    with caplog.at_level(logging.WARNING, logger="harness.models.cache"):
        assert materialise("toy", 1, recipe) == entry
    assert recipe.runs == 2
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "rebuilding" in caplog.text
    assert reason in caplog.text
    assert sorted(path.name for path in entry.parent.iterdir()) == [".toy-v1.lock", "toy-v1"]


@pytest.mark.usefixtures("own_cache")
def test_a_change_after_verification_is_seen_in_the_same_process() -> None:
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    (entry / "model.bin").write_bytes(b"W" + PAYLOAD[1:])
    materialise("toy", 1, recipe)
    assert recipe.runs == 2


def test_what_a_killed_build_left_is_removed_and_never_served(
    own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = own_cache / "models" / ".toy-v1.tmp-4242"
    leftover.mkdir(parents=True)
    (leftover / "model.bin").write_bytes(b"half")
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert not leftover.exists()
    assert "left half-written by an earlier process" in caplog.text


def test_a_process_killed_half_way_blocks_nobody(own_cache: Path) -> None:
    code = (
        "import sys, time\n"
        "from harness.models import materialise\n"
        "def build(folder):\n"
        "    (folder / 'model.bin').write_bytes(b'half')\n"
        "    print('building', flush=True)\n"
        "    time.sleep(600)\n"
        "materialise('toy', 1, build)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "building\n"
        child.send_signal(signal.SIGKILL)
    assert list((own_cache / "models").glob(".toy-v1.tmp-*")), "the kill came too late to prove anything"
    assert not (own_cache / "models" / "toy-v1").exists()
    recipe = Recipe()
    entry = materialise("toy", 1, recipe)
    assert (entry / "model.bin").read_bytes() == PAYLOAD
    assert not list((own_cache / "models").glob(".toy-v1.tmp-*"))


def test_processes_that_ask_at_once_build_once(own_cache: Path) -> None:
    code = (
        "import os, time\n"
        "from harness.models import materialise\n"
        "def build(folder):\n"
        "    with (folder.parent.parent / 'builds').open('a') as stream:\n"
        "        stream.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(1)\n"
        "    (folder / 'model.bin').write_bytes(b'whole')\n"
        "print(materialise('slow', 1, build))\n"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [child.communicate()[0].strip() for child in children] == [
        str(own_cache / "models" / "slow-v1")
    ] * 3
    assert [child.returncode for child in children] == [0, 0, 0]
    assert len((own_cache / "builds").read_text().splitlines()) == 1


def test_a_failing_build_leaves_nothing(own_cache: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "model.bin").write_bytes(b"half")
        msg = "no such luck"
        raise UsageError(msg)

    with pytest.raises(UsageError, match="no such luck"):
        materialise("toy", 1, build)
    assert [path.name for path in (own_cache / "models").iterdir()] == [".toy-v1.lock"]
    assert materialise("toy", 1, Recipe()).is_dir()


@pytest.mark.usefixtures("own_cache")
def test_a_recipe_that_writes_nothing_is_an_error() -> None:
    with pytest.raises(HarnessError, match="wrote no file"):
        materialise("toy", 1, lambda _: None)


@pytest.mark.usefixtures("own_cache")
def test_a_full_disk_names_the_setting_that_helps() -> None:
    def build(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(HarnessError, match=r"No space left.*VLLM_PARITY_CACHE"):
        materialise("toy", 1, build)


def test_an_unusable_cache_folder_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "file"))
    with pytest.raises(UsageError, match="VLLM_PARITY_CACHE"):
        materialise("toy", 1, Recipe())


@pytest.mark.parametrize("name", ["", "../escape", "a/b", "A", ".hidden"])
def test_an_entry_name_cannot_leave_the_cache(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a cache entry"):
        materialise(name, 1, Recipe())


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_ENV, "~/somewhere")
    assert cache.cache_dir() == Path.home() / "somewhere"
    monkeypatch.setenv(cache.CACHE_ENV, "  ")
    assert cache.cache_dir().name == "vllm-parity"

"""Fixtures that several files share. They import torch and transformers themselves: most files need neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel

    from harness.session import ParitySession


class RedRun(NamedTuple):
    """A finished run whose cases failed."""

    folder: Path  #: where it was started
    run: Path  #: its records
    stdout: str


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Tensors of unit tests are small: with two threads on a busy machine most of the time goes into waiting."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, and no memory of what was verified before."""
    from harness.models import cache

    monkeypatch.setenv(cache.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_verified", {})
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, built once for this session outside any cache."""
    from harness.models.tiny import TINY_LLAMA

    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    folder.mkdir()
    TINY_LLAMA.build(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama of `small_llama`, saved once; tests only read it."""
    from suites.unit.small_llama import randomised, tiny_config

    folder = tmp_path_factory.mktemp("small-llama")
    randomised(tiny_config()).save_pretrained(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    """The same, loaded at fp32 for one test, which may change it."""
    from harness.reference.load import load_model

    return load_model(checkpoint, "fp32")


@pytest.fixture(scope="session")
def red_run(tmp_path_factory: pytest.TempPathFactory) -> RedRun:
    """A real run of `red_suite` on the reference backend, as a CI would start it. Tests only read it."""
    from suites.unit import mini_suite, red_suite

    folder = tmp_path_factory.mktemp("red")
    github = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        "GITHUB_WORKSPACE": str(folder.parent),
        "GITHUB_SERVER_URL": "https://github.example",
        "GITHUB_REPOSITORY": "me/project",
        "GITHUB_RUN_ID": "7",
    }
    done = mini_suite.run(
        folder, "--junit-xml", str(folder / "junit.xml"), source=red_suite.SOURCE, env=github
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return RedRun(folder, mini_suite.only_run(folder), done.stdout)


@pytest.fixture
def another_default() -> Iterator[None]:
    """What an engine's process may have made of torch's default dtype."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def hf_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParitySession]:
    """A run of the reference as the engine, for engines made in this process."""
    from harness.plan import Plan
    from harness.session import ParitySession

    session = ParitySession(Plan(backend="hf"), tmp_path_factory.mktemp("run"), argv=[])
    yield session
    session.close()

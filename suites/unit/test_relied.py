"""vLLM's private names: all there in the installed release, and one that moved is named with what it is for."""

from __future__ import annotations

import pytest

from harness.vllm.internals import relied

pytest.importorskip("vllm")


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def platform(request) -> str:
    return request.param


def test_all_are_there_in_the_installed_release(platform):
    assert relied.missing(platform) == []


def test_a_method_that_moved_is_named(monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.delattr(GPUModelRunner, "_model_forward")
    [line] = relied.missing("cpu")
    assert line == (
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner has no _model_forward, "
        "for knowing whose rows a step computes, and what requests leave behind"
    )


def test_a_class_that_moved_is_named(monkeypatch):
    from vllm.model_executor.models import utils

    assert relied.missing("cpu") == []  # what takes the name from there has been imported before it is gone
    monkeypatch.delattr(utils, "PPMissingLayer")
    [line] = relied.missing("cpu")
    assert "utils has no PPMissingLayer, for knowing stubs of other stages" in line


@pytest.mark.parametrize(
    ("owner", "names", "says"),
    [
        (
            "vllm.v1.worker.gpu_input_batch.InputBatch",
            ("request_rows",),
            "InputBatch has no request_rows, for a test",
        ),
        ("vllm.v1.no_such_module.Thing", ("x",), "no vllm.v1.no_such_module.Thing (No module named"),
        ("vllm.config.NoSuchConfig", ("x",), "no vllm.config.NoSuchConfig"),
    ],
)
def test_what_instances_lack_and_what_has_no_owner(monkeypatch, owner, names, says):
    monkeypatch.setattr(relied, "RELIED", (relied.Relied(owner, names, "a test"),))
    [line] = relied.missing("cpu")
    assert says in line


class Assigns:
    """A mention of self.only_told = … in words is not there below."""

    annotated: int

    def __init__(self) -> None:
        self.plain = 1
        self.typed: int = 2
        self.first, self.second = 3, 4
        if self.compared == 5:
            self.plain_too = 6


@pytest.mark.parametrize("name", ["annotated", "plain", "typed", "first", "second", "__init__"])
def test_what_a_class_gives_its_instances(name):
    assert relied._has(Assigns, name)


@pytest.mark.parametrize("name", ["compared", "plai", "lain", "three"])
def test_what_it_does_not(name):
    assert not relied._has(Assigns, name)


def test_a_platform_s_own_names_are_asked_there_only(monkeypatch):
    only = relied.Relied("vllm.no_such", ("x",), "a test", platform="xpu")
    monkeypatch.setattr(relied, "RELIED", (only,))
    assert relied.missing("cpu") == []
    assert len(relied.missing("xpu")) == 1

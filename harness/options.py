"""pytest's options, and what they ask for: a plan, with the defaults filled in only where nothing was said.

An option left out is None here, so that a run that is gone on with can tell it from one that was named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.backend import MODES
from harness.expectations import DEFAULT_FOLDER, Ledger, load
from harness.plan import DEFAULT_MODELS, ONE_RANK, PROFILES, Plan

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    import pytest

__all__ = ["AXES", "add_options", "asked_for", "ledger_of", "plan_of"]

DEFAULT_DTYPES = ("fp32", "bf16")
#: Field of the plan → the option that sets it.
AXES = {
    "profile": "--profile",
    "models": "--model",
    "dtypes": "--dtype",
    "modes": "--engine-mode",
    "topologies": "--topology",
    "backend": "--backend",
}


def add_options(parser: pytest.Parser) -> None:
    """Declare the options; every one has a default that runs on two cores with no hub."""
    group = parser.getgroup("vllm-parity", "vLLM Parity Harness")
    models, dtypes = ", ".join(DEFAULT_MODELS), ", ".join(DEFAULT_DTYPES)
    group.addoption(
        "--model",
        action="append",
        metavar="NAME",
        help=f"bundled name, checkpoint folder or Hugging Face id; repeatable. Default: {models}",
    )
    group.addoption(
        "--dtype",
        action="append",
        metavar="DTYPE",
        help=f"fp32, bf16 or fp16; repeatable. Default: {dtypes}",
    )
    group.addoption("--engine-mode", choices=("compiled", "eager", "both"), help="Default: both")
    group.addoption(
        "--topology",
        action="append",
        metavar="TPxPPy",
        help="tp1, tp2, pp2, tp2pp2; repeatable. Default: tp1",
    )
    group.addoption(
        "--backend",
        metavar="NAME[@PYTHON]",
        help="the backend on trial, and the interpreter it lives in if that is not this one. Default: vllm",
    )
    profiles = "; ".join(f"{name}: {profile.description}" for name, profile in PROFILES.items())
    group.addoption("--profile", dest="parity_profile", metavar="NAME", help=f"{profiles}. Default: smoke")
    group.addoption(
        "--report-dir",
        default="reports",
        metavar="DIR",
        help="runs are written below it. Default: %(default)s",
    )
    group.addoption(
        "--expectations",
        metavar="DIR",
        help=f"the ledger of known bugs. Default: {DEFAULT_FOLDER} below pytest's root, where there is one",
    )
    group.addoption(
        "--reference-cache",
        default="",
        metavar="DIR",
        help="where the reference's results are kept by content, at most 4 GiB; 'off' keeps none. "
        "Default: below the model cache",
    )
    group.addoption("--boot-timeout", type=float, default=600.0, metavar="S", help="Default: %(default)s s")
    group.addoption("--step-timeout", type=float, default=300.0, metavar="S", help="Default: %(default)s s")
    group.addoption(
        "--resume",
        metavar="RUN",
        help="go on with a run that stopped early, in its own folder and with its own options: the folder of a run, or "
        "'last' for the newest below --report-dir. Cases that passed, failed or were skipped for a reason keep their "
        "result",
    )
    group.addoption(
        "--resume-failed",
        action="store_true",
        help="with --resume: run failed cases again too. One that then passes still keeps the run from being green",
    )


def asked_for(option: argparse.Namespace) -> dict[str, Any]:
    """Field of the plan → value, of the options that were given."""
    mode = option.engine_mode
    given = {
        "profile": option.parity_profile,
        "models": tuple(option.model or ()),
        "dtypes": tuple(option.dtype or ()),
        "modes": MODES if mode == "both" else (mode,) if mode else (),
        "topologies": tuple(option.topology or ()),
        "backend": option.backend,
    }
    return {name: value for name, value in given.items() if value}


def plan_of(option: argparse.Namespace) -> Plan:
    """What the options ask for.

    Raises:
        UsageError: something no engine can be booted for.
    """
    defaults = {"models": DEFAULT_MODELS, "dtypes": DEFAULT_DTYPES, "topologies": ONE_RANK}
    return Plan(**{**defaults, **asked_for(option)})


def ledger_of(option: argparse.Namespace, root: Path) -> Ledger:
    """The known bugs.

    Raises:
        UsageError: the ledger cannot be read.
    """
    if option.expectations is None:
        default = root / DEFAULT_FOLDER
        return load(default) if default.is_dir() else Ledger()
    return load(root / option.expectations)

"""The ``parity`` fixture: what a suite calls to run an engine, compare it and fail the case where it is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from harness.backend import Topology
from harness.edit_check import EditedCall, problems_of
from harness.judging import Judged
from harness.logit_check import logit_problems
from harness.parity.text import failure_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from harness.backend import BootConfig
    from harness.interventions import Requests
    from harness.parity.types import CaseVerdict
    from harness.pool import Engine
    from harness.results import ForwardResult
    from harness.session import ParitySession

__all__ = ["Parity"]


class Parity(Judged):
    """One engine and everything it is judged with.

    Attributes:
        config: which engine.
    """

    def check_edits(
        self,
        prompts: Sequence[Sequence[int]],
        intervene: Any,
        *,
        max_new_tokens: int = 1,
        label: str = "edits",
        must_bite: bool = True,
    ) -> ForwardResult:
        """Run prompts without, with and again without edits, and fail the case unless all is as it must be.

        See :mod:`harness.edit_check` for what is judged.

        Args:
            prompts: token ids.
            intervene: specs as :mod:`harness.interventions` reads them.
            max_new_tokens: greedy steps; edits without ``pos`` go on at decode steps.
            label: names the findings in the record.
            must_bite: whether each edit has to change its hook well above the noise.

        Returns:
            The edited call.
        """
        __tracebackhide__ = True
        clean, edited, after = (
            self.forward(prompts, intervene=specs, max_new_tokens=max_new_tokens)
            for specs in (None, intervene, None)
        )
        edits = self.edits(intervene, edited.lengths)
        call = EditedCall(self, prompts, edits, clean, edited, after, label, must_bite)
        problems = problems_of(call)
        if problems:
            pytest.fail("\n\n".join(problems), pytrace=False)
        return edited

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        result: ForwardResult,
        *,
        label: str = "activations",
        edits: Requests | None = None,
    ) -> None:
        """Like :meth:`judge`, and fail the case where parity is broken."""
        __tracebackhide__ = True
        verdict = self.judge(prompts, result, label=label, edits=edits)
        if not verdict.passed:
            pytest.fail(failure_message(verdict), pytrace=False)

    def check_logits(
        self,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[torch.Tensor],
        *,
        label: str = "logits",
        edits: Requests | None = None,
    ) -> None:
        """Fail the case unless logits (n, d_vocab) of these sequences equal the reference's, row by row."""
        __tracebackhide__ = True
        problems = logit_problems(self, sequences, rows, label=label, edits=edits)
        if problems:
            pytest.fail("\n\n".join(problems), pytrace=False)

    def bit_equal(
        self, actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, label: str, what: str
    ) -> None:
        """Fail the case unless two lists of tensors agree in every bit; NaNs agree with nothing."""
        __tracebackhide__ = True
        if not actual or len(actual) != len(expected):
            pytest.fail(f"{what}: {len(actual)} tensors against {len(expected)}", pytrace=False)
        differing = [
            (index, tuple(a.shape), tuple(e.shape))
            for index, (a, e) in enumerate(zip(actual, expected, strict=True))
            if not _same_bits(a, e)
        ]
        detail = {
            "tensors": len(actual),
            "elements": sum(t.numel() for t in actual),
            "differing": len(differing),
        }
        self.record(label, None, {**detail, "claim": f"{what}: equal in every bit"})
        if differing:
            index, got, want = differing[0]
            shapes = f"shapes {got} and {want}"
            if got == want:
                gap = (actual[index].double() - expected[index].double()).abs()
                shapes = f"largest difference {float(gap.max()):.3e} at {divmod(int(gap.argmax()), got[-1])}"
            message = (
                f"{what}: {len(differing)} of {len(actual)} tensors differ, first is number {index}: {shapes}"
            )
            pytest.fail(message, pytrace=False)

    @contextlib.contextmanager
    def spare_engine(
        self, *, step: int | None = None, length: int | None = None, **options: Any
    ) -> Iterator[Engine]:
        """A second engine like this one but for ``options``, which nobody else uses; closed at the end.

        Args:
            step: tokens per step.
            length: longest request.
            **options: of the backend; one of None is left out.
        """
        changed = dataclasses.replace(
            self.config.with_options(**options),
            max_num_batched_tokens=step or self.config.max_num_batched_tokens,
            max_model_len=length or self.config.max_model_len,
        )
        engine = self._session.pool.boot(changed)
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def planted(self, fault: str, *, side: str = "worker", **options: Any) -> Iterator[Parity]:
        """The same checks on an engine whose worker is broken on purpose; its verdicts are not the case's.

        ``fault`` is a class of :mod:`harness.faults`: a worker (``workers.StaleBuffer``) or, with ``driver`` for
        ``side``, a driver (``logits.MaskIgnored``).
        """
        planted: dict[str, Any] = {f"{side}_cls": f"harness.faults.{fault}"}
        with self.spare_engine(**planted, **options) as engine:
            yield _OnTrial(self._session, engine)

    @contextlib.contextmanager
    def variant(self, **options: Any) -> Iterator[Parity]:
        """The same checks on a second engine that differs by ``options``; what they find is the case's."""
        with self.spare_engine(**options) as engine:
            yield _OnEngine(self._session, engine)

    @contextlib.contextmanager
    def like(self, config: BootConfig) -> Iterator[Parity]:
        """The same checks on an engine of another configuration, which nobody else uses; closed at the end."""
        engine = self._session.pool.boot(self._session.located(config))
        try:
            yield _OnEngine(self._session, engine)
        finally:
            engine.close()

    def on_one_rank(self) -> Engine:
        """The engine like this one but for its topology."""
        return self._session.engine(dataclasses.replace(self.config, topology=Topology()))

    def plain_logits(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[torch.Tensor]:
        """Raw logits of the same engine with nothing of the harness in it; booted for this call."""
        with self.spare_engine(instrument=False) as plain:
            return plain.raw_logits(prompts, max_new_tokens=max_new_tokens)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes agree (0.0 and -0.0 do not) and nothing in them is NaN."""
    import torch

    if a.dtype != b.dtype or a.shape != b.shape or bool(torch.isnan(a).any()):
        return False
    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


class _OnEngine(Parity):
    """The checks on an engine of one's own, which the pool hands to nobody else."""

    def __init__(self, session: ParitySession, engine: Engine) -> None:
        super().__init__(session, engine.config)
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """That engine."""
        return self._engine


class _OnTrial(_OnEngine):
    """A broken engine: judged like any other, but its red verdicts are what the case wants and not its result."""

    @property
    def hook_points(self) -> list[str]:
        """What the broken engine says it serves."""
        return list(self._engine.supported_hook_points)

    def keep(self, *_: Any, **__: Any) -> None:
        """Nothing: that it is wrong is known, and was asked for."""

    def record(self, label: str, verdict: CaseVerdict | None, detail: dict[str, Any]) -> None:
        sentence = (
            verdict.divergence.sentence if verdict is not None and verdict.divergence else "no divergence"
        )
        self._session.record_verdict(f"planted: {label}", None, {**detail, "found": sentence})

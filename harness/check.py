"""The ``parity`` fixture: what a suite calls to run an engine, compare it and say what was found."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from harness.artifacts import Evidence
from harness.asking import undeclared_in_call
from harness.backend import Topology
from harness.edit_check import EditedCall, problems_of
from harness.interventions import parse_interventions, plain_specs
from harness.logit_check import logit_problems
from harness.parity.text import failure_message
from harness.parity.verdict import compare
from harness.points import nonfireable_points
from harness.prompts import calibration
from harness.reference.load import as_dtype
from harness.reference.references import JITTERS
from harness.reference.run import teacher_forced
from harness.routes import Routes
from harness.routing import follow_routes, settle_routes
from harness.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from harness.backend import BootConfig
    from harness.interventions import Requests
    from harness.parity.rows import Captures
    from harness.parity.types import CaseVerdict
    from harness.pool import Engine
    from harness.reference.experts import Choice
    from harness.reference.references import Pair
    from harness.results import ForwardResult
    from harness.session import ParitySession

__all__ = ["Parity"]


class Parity(Subject):
    """One engine and everything it is judged with.

    Attributes:
        config: which engine.
    """

    def __init__(self, session: ParitySession, config: BootConfig) -> None:
        super().__init__(session, config)
        #: The calls judged so far, so that a buffer left over from one of them is recognised.
        self._judged: list[tuple[str, dict[str, list[torch.Tensor]]]] = []

    def forward(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> ForwardResult:
        """Run prompts on the engine, capturing every point unless told otherwise; the rest as the driver takes it."""
        names = self.hook_points if capture is None else list(capture)
        if reason := undeclared_in_call(self.capabilities, prompts, names, kwargs):
            self.not_applicable(f"{self.config.backend_name} declares no {reason}")
        return self.engine.forward(prompts, capture=names, **kwargs)

    def judge(
        self,
        prompts: Sequence[Sequence[int]],
        result: ForwardResult,
        *,
        label: str = "activations",
        edits: Requests | None = None,
    ) -> CaseVerdict:
        """Compare an engine's captures with the reference at the same tokens, and record the verdict.

        Decode rows are judged with the engine's own tokens fed to the reference, so one early flip of a near tie does
        not void the rest.
        """
        sequences, names = teacher_forced(prompts, result.new_tokens), list(result.captured)
        rows = result.rows_by_hook()
        verdict, truth = self._settled(prompts, sequences, rows, edits)
        self.record(
            label,
            verdict,
            {"prompt_lengths": [len(p) for p in prompts], "rows": result.lengths, **result.stats},
        )
        self.keep(
            label,
            verdict,
            prompts,
            result.new_tokens,
            lambda: self._sides(sequences, rows, names, edits),
            edits,
        )
        self._judged.append((f"the call before ({label})", truth))
        return verdict

    def verdict_of(
        self, prompts: Sequence[Sequence[int]], result: ForwardResult, rows: dict[str, list[torch.Tensor]]
    ) -> CaseVerdict:
        """What :meth:`judge` would say if ``result`` held these rows (hook → one (n_i, width) per request).

        Nothing is recorded.
        """
        return self._settled(prompts, teacher_forced(prompts, result.new_tokens), rows, None)[0]

    def _settled(
        self,
        prompts: Sequence[Sequence[int]],
        sequences: Sequence[Sequence[int]],
        rows: dict[str, list[torch.Tensor]],
        edits: Requests | None,
    ) -> tuple[CaseVerdict, dict[str, list[torch.Tensor]]]:
        """The verdict once routes are followed and, where it is red, noise is measured properly; and the truth."""
        names = list(rows)
        verdict, truth = self._verdict(prompts, sequences, rows, names, edits)
        while follow_routes(self, sequences, rows, verdict, edits):
            verdict, truth = self._verdict(prompts, sequences, rows, names, edits)
        if not verdict.passed:
            # Before an engine is called broken, the reference's noise is measured properly: an ill-conditioned row's
            # error is one draw, and three draws can all be small. A real fault stays far outside either way.
            verdict, truth = self._verdict(
                prompts, sequences, rows, names, edits, again=verdict.failed_requests
            )
        return verdict, truth

    def _verdict(
        self,
        prompts: Sequence[Sequence[int]],
        sequences: Sequence[Sequence[int]],
        rows: dict[str, list[torch.Tensor]],
        names: Sequence[str],
        edits: Requests | None,
        *,
        again: Sequence[int] | None = None,
    ) -> tuple[CaseVerdict, dict[str, list[torch.Tensor]]]:
        """The verdict and the truth; ``again`` names the requests that failed before, and asks for an explanation."""
        pair = self.reference(sequences, names, edits=edits, more_for=again or ())
        verdict = compare(
            rows,
            pair.truth.captured,
            [run.captured for run in pair.same],
            dtype=self.config.dtype,
            n_layers=self.n_layers,
            k=self.k,
            noise=self.noise,
            explain=again is not None,
            step=self.step,
            earlier=self._judged,
            prompt_lengths=[len(prompt) for prompt in prompts],
            final_norm_weight=self.final_norm_weight,
        )
        return verdict, pair.truth.captured

    def _sides(
        self,
        sequences: Sequence[Sequence[int]],
        rows: dict[str, list[torch.Tensor]],
        names: Sequence[str],
        edits: Requests | None,
    ) -> tuple[Captures, Captures, list[Captures]]:
        pair = self.reference(sequences, names, edits=edits)
        return rows, pair.truth.captured, [run.captured for run in pair.same]

    def keep(
        self,
        label: str,
        verdict: CaseVerdict,
        prompts: Sequence[Sequence[int]],
        new_tokens: Sequence[Sequence[int]],
        sides: Callable[[], tuple[Captures, Captures, Sequence[Captures]]],
        edits: Requests | None = None,
        *,
        kind: str = "values",
    ) -> None:
        """Save what a failed comparison is about, see :class:`~harness.artifacts.Evidence`; nothing if it passed."""
        if not verdict.passed:
            evidence = Evidence(kind, self.config, prompts, new_tokens, edits, sides)
            self._session.keep(label, verdict, evidence)

    def reference(
        self,
        sequences: Sequence[Sequence[int]],
        names: Sequence[str],
        *,
        jitters: int = JITTERS,
        edits: Requests | None = None,
        logits: bool = False,
        more_for: Sequence[int] = (),
        choices: Sequence[tuple[Choice, ...]] | None = None,
    ) -> Pair:
        """The truth and the reference's realisations for this engine's checkpoint and dtype.

        ``more_for`` names sequences that get many realisations, because they failed with few. ``choices`` are where the
        truth goes to other experts than it prefers; None: wherever this engine was found to.
        """
        references, path, dtype = self._session.references, self.config.path, self.config.dtype
        asked: dict[str, Any] = {
            "edits": edits,
            "logits": logits,
            "choices": choices or self.routes.taken(sequences, edits),
        }
        pair = references.get(path, dtype, sequences, names, jitters=jitters, **asked)
        if not more_for:
            return pair
        return references.with_more(pair, more_for, path, dtype, sequences, names, **asked)

    @cached_property
    def routes(self) -> Routes:
        """Where tokens of a mixture go."""
        return Routes(self._session, self.config, self.hf_config)

    def settle_routes(
        self, prompts: Sequence[Sequence[int]], result: ForwardResult, edits: Requests | None = None
    ) -> None:
        """Find out where a mixture's tokens went, before anything is concluded from a difference of two calls."""
        if self.routes.exist:
            sequences, rows = teacher_forced(prompts, result.new_tokens), result.rows_by_hook()
            settle_routes(self, sequences, rows, edits)
            self._settled(prompts, sequences, rows, edits)

    def edits(self, intervene: Any, lengths: Sequence[int]) -> Requests:
        """Read specs as the engine does, for requests of so many rows."""
        return parse_interventions(
            plain_specs(intervene),
            widths=self.geometry.widths(self.hook_points),
            nonfireable=nonfireable_points(self.n_layers),
            lengths=lengths,
            dtype=as_dtype(self.config.dtype),
        )

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

    def note(self, label: str, **detail: Any) -> None:
        """Put figures or findings that no verdict holds into the case's record."""
        self._session.record_verdict(label, None, detail)

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

    @property
    def noise(self) -> dict[str, float]:
        """The reference's own error per hook at this dtype, measured once per run on the calibration prompts."""
        return self._session.noise(self.config, self.hook_points, lambda: calibration(self))

    @cached_property
    def final_norm_weight(self) -> torch.Tensor:
        """The final norm's weight as the checkpoint has it, (width,)."""
        return self._session.final_norm_weight(self.config)

    def record(self, label: str, verdict: CaseVerdict | None, detail: dict[str, Any]) -> None:
        """Add a finding to the case's record."""
        self._session.record_verdict(label, verdict, detail)


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

"""What is found of an engine beside its reference: calls, verdicts and their place in the case's record."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.artifacts import Evidence
from harness.asking import undeclared_in_call
from harness.errors import CaptureError
from harness.interventions import parse_interventions, plain_specs
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
    from collections.abc import Callable, Sequence

    import torch

    from harness.backend import BootConfig
    from harness.interventions import Requests
    from harness.parity.rows import Captures
    from harness.parity.types import CaseVerdict
    from harness.reference.experts import Choice
    from harness.reference.references import Pair
    from harness.results import ForwardResult
    from harness.session import ParitySession

__all__ = ["Judged"]


class Judged(Subject):
    """One engine and the reference it is judged by; nothing here fails a case.

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
        result = self.engine.forward(prompts, capture=names, **kwargs)
        # What is judged is what came: less than was asked for must not pass for all of it.
        if set(result.hooks) != set(names) or len(result.new_tokens) != len(prompts):
            missing = sorted(set(names) - set(result.hooks)) or sorted(set(result.hooks) - set(names))
            msg = (
                f"{self.config.backend_name} was asked for {len(names)} points of {len(prompts)} prompts and gave "
                f"{len(result.hooks)} of {len(result.new_tokens)}"
                + (f"; {missing[0]} is the first that differs" if missing else "")
            )
            raise CaptureError(msg)
        return result

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
        sequences, names = teacher_forced(prompts, result.new_tokens), result.hooks
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
        seen: set[object] = set()
        while follow_routes(self, sequences, rows, verdict, edits, seen=seen):
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
        verdict = self.compare(
            prompts,
            rows,
            pair.truth.captured,
            [run.captured for run in pair.same],
            noise=self.noise,
            explain=again is not None,
            earlier=self._judged,
        )
        return verdict, pair.truth.captured

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        rows: Captures,
        truth: Captures,
        same: Sequence[Captures],
        **options: Any,
    ) -> CaseVerdict:
        """:func:`harness.parity.verdict.compare` with what holds for every call of this engine; nothing is recorded.

        Args:
            prompts: what the call was given.
            rows: of the engine, hook → one (n_i, width) per request.
            truth: of the reference, likewise.
            same: its realisations, likewise.
            options: the rest, as that function takes it.
        """
        return compare(
            rows,
            truth,
            same,
            dtype=self.config.dtype,
            n_layers=self.n_layers,
            k=self.k,
            step=self.step,
            prompt_lengths=[len(prompt) for prompt in prompts],
            final_norm_weight=self.final_norm_weight,
            **options,
        )

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

    def note(self, label: str, **detail: Any) -> None:
        """Put figures or findings that no verdict holds into the case's record."""
        self._session.record_verdict(label, None, detail)

"""The ``parity`` fixture: what a suite calls to run an engine, compare it and say what was found."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

from harness.asking import undeclared, undeclared_in_call
from harness.backend import Topology
from harness.conventions import Emission
from harness.edit_check import EditedCall, problems_of
from harness.geometry import Geometry
from harness.interventions import parse_interventions, plain_specs
from harness.logit_check import logit_problems
from harness.parity.text import failure_message
from harness.parity.verdict import compare
from harness.points import TEMPLATES, all_points, every_point, nonfireable_points, select
from harness.prompts import calibration
from harness.reference.load import as_dtype
from harness.reference.references import JITTERS
from harness.reference.run import teacher_forced
from harness.routing import follow_routes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from harness.backend import BootConfig
    from harness.capabilities import Capabilities
    from harness.interventions import Requests
    from harness.parity.types import CaseVerdict
    from harness.pool import Engine
    from harness.reference.experts import Choice
    from harness.reference.references import Pair
    from harness.results import ForwardResult
    from harness.session import ParitySession

__all__ = ["Parity"]


class Parity:
    """One engine and everything it is judged with.

    Attributes:
        config: which engine.
    """

    def __init__(self, session: ParitySession, config: BootConfig) -> None:
        self._session = session
        self.config = session.located(config)
        #: The calls judged so far, so that a buffer left over from one of them is recognised.
        self._judged: list[tuple[str, dict[str, list[torch.Tensor]]]] = []

    @property
    def engine(self) -> Engine:
        """The live engine."""
        return self._session.engine(self.config)

    @cached_property
    def hf_config(self) -> Any:
        """The model's Hugging Face config."""
        from harness.models import load_config

        return load_config(self.config.path)

    @property
    def vocab_size(self) -> int:
        """Token ids run from 0 to one below this."""
        return int(self.hf_config.vocab_size)

    @cached_property
    def geometry(self) -> Geometry:
        """The model's sizes."""
        return Geometry.of(self.hf_config)

    @property
    def n_layers(self) -> int:
        """Blocks of the model."""
        return self.geometry.layers

    @property
    def width(self) -> int:
        """Width of the residual stream."""
        return self.geometry.width

    @property
    def k(self) -> float:
        """How many times the reference's own error an engine may make."""
        return self._session.k

    @property
    def capabilities(self) -> Capabilities:
        """What the engine's backend declares."""
        return self.engine.capabilities

    def requires(self, *names: str) -> None:
        """Make the case not applicable to a backend that does not declare each of these capabilities."""
        if reason := undeclared(self.capabilities, *names):
            self.not_applicable(f"{self.config.backend_name} declares no {reason}")

    def emission(self, hook: str) -> Emission:
        """How what the engine works on at ``hook`` holds the point's value, at the engine's dtype."""
        if not self.capabilities.is_emitted(hook):
            return Emission()
        from harness.reference.weights import emission

        return emission(self.config.path, hook, as_dtype(self.config.dtype))

    @property
    def profile(self) -> str:
        """How much of the matrix this run covers: ``smoke``, ``full`` or ``nightly``."""
        return self._session.plan.profile

    @property
    def examples(self) -> int:
        """How many examples a property-based test tries in this profile."""
        return self._session.plan.examples

    @property
    def hook_points(self) -> list[str]:
        """What the engine must serve, whatever it says itself: the usual points, or those it was booted for.

        A backend that declares what it can capture is held to that much of them; with none the case is not applicable.
        """
        asked = self.config.options.get("hook_points")
        if asked is None:
            return self.capabilities.points(all_points(self.n_layers)) or self.not_applicable(
                f"{self.config.backend_name} declares none of the points captured here"
            )
        return self.every_point if asked == "every" else select(asked, every_point(self.n_layers))

    @cached_property
    def every_point(self) -> list[str]:
        """Every point that this family has on both sides, by the tables of both."""
        from harness.reference.families import tree_of_config
        from harness.vllm.overlays import get_overlay

        overlay = get_overlay(self.hf_config.architectures[0])
        missing = overlay.nonfiring_hooks(self.config.topology.tp)
        both = [template for template in TEMPLATES if template not in missing]
        return tree_of_config(self.hf_config).points(self.n_layers, both)

    @property
    def step(self) -> int:
        """Tokens per step; longer prompts are served in chunks."""
        return self.config.max_num_batched_tokens

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the checkpoint ships a tokenizer."""
        from harness.models import has_tokenizer

        return has_tokenizer(self.config.path)

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer; a model without one makes the case not applicable."""
        if not self.has_tokenizer:
            self.not_applicable(f"{self.config.model} ships no tokenizer")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.config.path)

    def needs(self, module: str, what: str) -> None:
        """Skip the case, in the class of missing machinery, unless a module can be imported here."""
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no-hardware: {what}")

    def not_applicable(self, reason: str) -> Any:
        """Skip the case, in the class of things that make no sense for this model."""
        pytest.skip(f"not-applicable: {reason}")

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
        sequences = teacher_forced(prompts, result.new_tokens)
        names = list(result.captured)
        rows = result.rows_by_hook()
        verdict, truth = self._verdict(prompts, sequences, rows, names, edits)
        while follow_routes(self, sequences, rows, verdict, edits):
            verdict, truth = self._verdict(prompts, sequences, rows, names, edits)
        if not verdict.passed:
            # Before an engine is called broken, the reference's noise is measured properly: an ill-conditioned row's
            # error is one draw, and three draws can all be small. A real fault stays far outside either way.
            verdict, truth = self._verdict(
                prompts, sequences, rows, names, edits, again=verdict.failed_requests
            )
        self.record(
            label,
            verdict,
            {"prompt_lengths": [len(p) for p in prompts], "rows": result.lengths, **result.stats},
        )
        self._judged.append((f"the call before ({label})", truth))
        return verdict

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
            "choices": choices or self.choices(sequences, edits),
        }
        pair = references.get(path, dtype, sequences, names, jitters=jitters, **asked)
        if not more_for:
            return pair
        return references.with_more(pair, more_for, path, dtype, sequences, names, **asked)

    @cached_property
    def is_mixture(self) -> bool:
        """Whether its tokens go to experts."""
        from harness.reference.families import tree_of_config

        return bool(tree_of_config(self.hf_config).router)

    def router(self, block: int) -> torch.Tensor:
        """A block's router at the engine's dtype, (experts, width)."""
        return self._session.references.router(self.config.path, self.config.dtype, block)

    def choices(
        self, sequences: Sequence[Sequence[int]], edits: Requests | None = None
    ) -> list[tuple[Choice, ...]]:
        """Per sequence, where this engine was found to go to other experts than the truth prefers."""
        taken = self._session.routes
        return [taken.get(self._route(ids, edits, i), ()) for i, ids in enumerate(sequences)]

    def take(self, ids: Sequence[int], edits: Requests | None, choices: tuple[Choice, ...]) -> None:
        """Have the truth of one sequence, with the first of ``edits``, go where this engine goes from now on."""
        self._session.routes[self._route(ids, edits, 0)] = choices

    def _route(self, ids: Sequence[int], edits: Requests | None, number: int) -> tuple[Any, ...]:
        here = frozenset(edit.digest for edit in edits[number]) if edits is not None else frozenset()
        return (self.config.to_json(), tuple(ids), here)

    def settle_routes(
        self, prompts: Sequence[Sequence[int]], result: ForwardResult, edits: Requests | None = None
    ) -> None:
        """Find out where a mixture's tokens went, before anything is concluded from a difference of two calls."""
        if not self.is_mixture:
            return
        sequences, rows = teacher_forced(prompts, result.new_tokens), result.rows_by_hook()
        while follow_routes(
            self,
            sequences,
            rows,
            self._verdict(prompts, sequences, rows, list(rows), edits)[0],
            edits,
        ):
            pass

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

    def record(self, label: str, verdict: CaseVerdict | None, detail: dict[str, Any]) -> None:
        sentence = (
            verdict.divergence.sentence if verdict is not None and verdict.divergence else "no divergence"
        )
        self._session.record_verdict(f"planted: {label}", None, {**detail, "found": sentence})

"""The truth and the reference's realisations of every sequence the suites ask for, computed once and kept."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.conventions import dtype_name
from harness.errors import UsageError
from harness.models import load_config, resolve
from harness.points import (
    FIREABLE_TEMPLATES,
    PATTERN,
    TEMPLATES,
    HookPoint,
    check_capture,
    nonfireable_points,
)
from harness.reference.entries import Asked, Entry
from harness.reference.families import attention_of, tree_of, tree_of_config
from harness.reference.load import as_dtype, load_model
from harness.reference.roles import Role, giving_weights, jittered, model_role, threads_for
from harness.reference.run import ReferenceRun, per_sequence, run_reference
from harness.reference.truth import load_truth, truth_dtype
from harness.tokens import check_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from harness.interventions import Edit, Requests
    from harness.reference.disk import DiskCache
    from harness.reference.experts import Choice, Routing
    from harness.reference.families import ModuleTree

__all__ = ["DEFAULT_ATTENTION", "JITTERS", "MANY_JITTERS", "Pair", "References"]

logger = logging.getLogger(__name__)

#: What transformers picks by itself, and so what R stands for, unless its family leaves no choice. Noise per hook (rms
#: over 241 rows) of eager attention ÷ that of sdpa: 0.94 to 1.10 at fp32; at bf16, where eager rounds its
#: probabilities, 0.96 to 1.24 on SmolLM2 and 1.17 to 1.25 on the tiny Llama. The choice moves a bound by a quarter at
#: most.
DEFAULT_ATTENTION = "sdpa"
_DEFAULT_BYTES = 1 << 30
#: Jittered realisations of R that every case gets.
JITTERS = 2
#: … and that requests get that fail with those: an ill-conditioned row's error is one draw, and a few can all be small.
MANY_JITTERS = 10


@dataclass(frozen=True)
class Pair:
    """The runs a verdict needs: T, and R = the reference at the engine's dtype, in several realisations.

    The first of ``same`` is R itself; in the others its embedding is moved by a unit in the last place and its linear
    layers run in oneDNN, see
    :mod:`harness.reference.realisations`. ``embed.hook_out`` is R's own in all of them.
    """

    truth: ReferenceRun
    same: tuple[ReferenceRun, ...]


@dataclass
class References:
    """The truth and the reference of every sequence the suites ask for, computed once.

    Kept per checkpoint, engine dtype, single sequence and its edits, with every hook point, so a new batch of known
    prompts or another set of hooks costs nothing. The least recently used sequences go first once ``max_bytes`` is
    reached. Only ``max_loaded`` models are in memory at a time.

    Attributes:
        max_loaded: models kept; T and R of one checkpoint are two.
        max_bytes: limit on the kept rows; what a caller holds is not counted.
        attn_implementation: of R, where its family leaves a choice; T is always eager.
        computed: sequences run so far, for tests and the report.
        seconds: time spent loading models and in their forwards.
        disk: where results outlive the run; None: nowhere.
    """

    max_loaded: int = 1
    max_bytes: int = _DEFAULT_BYTES
    attn_implementation: str = DEFAULT_ATTENTION
    computed: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"load": 0.0, "forward": 0.0})
    disk: DiskCache | None = None
    _entries: OrderedDict[tuple[Any, ...], Entry] = field(default_factory=OrderedDict)
    _held: int = 0
    _models: OrderedDict[tuple[str, torch.dtype, Role], PreTrainedModel] = field(default_factory=OrderedDict)
    _configs: dict[str, tuple[PreTrainedConfig, ModuleTree]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the kept rows."""
        return self._held

    def get(
        self,
        path: str | Path,
        engine_dtype: torch.dtype | str,
        sequences: Sequence[Sequence[int]],
        capture: Sequence[str],
        *,
        jitters: int = JITTERS,
        edits: Requests | None = None,
        logits: bool = False,
        choices: Sequence[tuple[Choice, ...]] | None = None,
    ) -> Pair:
        """Return T and R for ``sequences``, in their order, computing only what isn't kept.

        Args:
            path: checkpoint folder, bundled name or hub id.
            engine_dtype: dtype of the engine on trial.
            sequences: token ids, n_i each.
            capture: hook names.
            jitters: how many realisations of R beside the plain one.
            edits: per sequence, applied in T and in every realisation of R, each at its own dtype.
            logits: whether the jittered realisations' logits are wanted too; T's and R's own always come.
            choices: per sequence, where T goes to other experts than it prefers. R always goes to those T goes to.

        Raises:
            UsageError: everything the caller got wrong, before a model is loaded.
        """
        dtype = as_dtype(engine_dtype)
        truth_dtype(dtype)
        folder = str(resolve(path).fetch().resolve())
        config, tree = self._config(folder)
        layers = config.num_hidden_layers
        supported, missing = tree.points(layers), nonfireable_points(layers, tree.missing)
        names = check_capture(capture, supported, missing)
        prompts = check_prompts(
            sequences, vocab_size=config.vocab_size, max_len=config.max_position_embeddings
        )
        edited = per_sequence(edits, prompts)
        editable = tree.points(layers, TEMPLATES)
        check_capture([edit.hook for here in edited for edit in here], editable, missing)
        _refuse_past_the_end(edited, prompts)
        # Begin with the model that is loaded already: half the loads where few are kept.
        further = [f"jitter{seed}" for seed in range(1, jitters + 1)]
        roles: list[Role] = ["truth", "same", *further]
        if not tree.router:  # … of a mixture the truth comes first: the others go the way it goes
            roles.sort(key=lambda role: (folder, dtype, model_role(role)) not in self._models)
        asked = [
            Asked(tuple(ids), here, tuple(choices[i]) if choices else ())
            for i, (ids, here) in enumerate(zip(prompts, edited, strict=True))
        ]
        runs = {role: self._run(folder, dtype, role, asked, names, logits) for role in roles}
        return Pair(truth=runs["truth"], same=tuple(runs[role] for role in ("same", *further)))

    def with_more(
        self,
        pair: Pair,
        which: Sequence[int],
        path: str | Path,
        engine_dtype: torch.dtype | str,
        sequences: Sequence[Sequence[int]],
        capture: Sequence[str],
        *,
        edits: Requests | None = None,
        logits: bool = False,
        choices: Sequence[tuple[Choice, ...]] | None = None,
    ) -> Pair:
        """``pair`` with :data:`MANY_JITTERS` realisations for the sequences ``which``.

        The others have their last realisation repeated, which changes nothing where the largest error counts.
        """
        chosen = list(which)
        more = self.get(
            path,
            engine_dtype,
            [sequences[i] for i in chosen],
            capture,
            jitters=MANY_JITTERS,
            edits=None if edits is None else [edits[i] for i in chosen],
            logits=logits,
            choices=None if choices is None else [choices[i] for i in chosen],
        )
        last = pair.same[-1]
        extra = [
            _replaced(last, dict(zip(chosen, range(len(chosen)), strict=True)), one) for one in more.same
        ]
        return Pair(pair.truth, (*pair.same, *extra[len(pair.same) :]))

    def router(self, path: str | Path, engine_dtype: torch.dtype | str, block: int) -> torch.Tensor:
        """Weight of a block's router, (experts, width), as the engine of that dtype has it, at the truth's dtype."""
        dtype = as_dtype(engine_dtype)
        model = self._model(str(resolve(path).fetch().resolve()), dtype, "truth")
        return model.get_parameter(f"{tree_of(model).router.format(i=block)}.weight").detach()

    def close(self) -> None:
        """Forget every model and every row; safe to call twice."""
        self._models.clear()
        self._entries.clear()
        self._held = 0

    def _run(
        self,
        folder: str,
        dtype: torch.dtype,
        role: Role,
        asked: list[Asked],
        names: list[str],
        logits: bool,
    ) -> ReferenceRun:
        """One role's run. Its entries are held here, so evicting some of them meanwhile does no harm."""
        templates = {HookPoint.parse(name).template for name in names}
        # The usual points are kept together, so that the next caller finds them; of the others there are many.
        wanted = next(
            kind for kind in (FIREABLE_TEMPLATES, TEMPLATES, (*TEMPLATES, PATTERN)) if templates <= set(kind)
        )
        held: dict[tuple[Any, ...], Entry] = {}
        for one in asked:
            if one.key not in held:
                held[one.key] = self._entry(folder, dtype, role, one, templates=wanted, logits=logits)
        entries = [held[one.key] for one in asked]
        self._evict()
        return ReferenceRun(
            prompts=[list(one.ids) for one in asked],
            captured={name: [entry.captured[name] for entry in entries] for name in names},
            logits=[entry.logits for entry in entries],
            routing=[entry.routing for entry in entries],
        )

    def _entry(
        self,
        folder: str,
        dtype: torch.dtype,
        role: Role,
        asked: Asked,
        *,
        templates: tuple[str, ...],
        logits: bool,
    ) -> Entry:
        """What is kept of one sequence, or computed now."""
        key = (folder, dtype, role, asked.key, templates)
        entry = self._entries.get(key)
        if entry is None or (logits and not entry.logits.numel()):
            found = self._fetch(folder, dtype, role, asked, templates, logits=logits)
            self._held += found.nbytes - (entry.nbytes if entry is not None else 0)
            entry = self._entries[key] = found
        self._entries.move_to_end(key)
        return entry

    def _fetch(
        self,
        folder: str,
        dtype: torch.dtype,
        role: Role,
        asked: Asked,
        templates: tuple[str, ...],
        *,
        logits: bool,
    ) -> Entry:
        """From the disk, or from the model."""
        place: Path | None = None
        if self.disk is not None:
            # The tree too: a package may bring it, and mend it.
            how = f"{self.attn_implementation} {logits} {self._config(folder)[1]}"
            place = self.disk.path(folder, dtype, role, asked, templates, how)
            if (found := self.disk.load(place)) is not None:
                return found
        like: Routing | None = None
        if role != "truth" and self._config(folder)[1].router:
            like = self._entry(folder, dtype, "truth", asked, templates=templates, logits=False).routing
        model = self._model(folder, dtype, model_role(role))
        started = time.monotonic()
        entry = self._compute(model, role, asked, like, templates=templates, logits=logits)
        seconds = time.monotonic() - started
        self.seconds["forward"] += seconds
        if self.disk is not None and place is not None:
            self.disk.save(place, entry, seconds)
        return entry

    def _compute(
        self,
        model: PreTrainedModel,
        role: Role,
        asked: Asked,
        like: Routing | None,
        *,
        templates: tuple[str, ...],
        logits: bool,
    ) -> Entry:
        names = tree_of(model).points(model.config.num_hidden_layers, templates)
        choices = asked.choices if like is None else ()  # the truth's routing holds them already
        with (
            threads_for(model),
            jittered(model, role),
            giving_weights(model, wanted=PATTERN in templates),
        ):
            run = run_reference(model, [asked.ids], names, [asked.edits], choices=choices, like=like)
        self.computed += 1
        # A further realisation mostly serves as a measure of noise in the captures; logits would double what is kept.
        kept = run.logits[0] if logits or not role.startswith("jitter") else run.logits[0][:0]
        return Entry({name: rows[0] for name, rows in run.captured.items()}, kept, run.routing[0])

    def _model(self, folder: str, dtype: torch.dtype, role: Role) -> PreTrainedModel:
        key = (folder, dtype, role)
        if key not in self._models:
            # Freed before the next is loaded: two large models at once may not fit.
            while len(self._models) >= max(self.max_loaded, 1):
                self._models.popitem(last=False)
            started = time.monotonic()
            self._models[key] = (
                load_truth(folder, dtype)
                if role == "truth"
                else load_model(
                    folder,
                    dtype,
                    attn_implementation=attention_of(self._config(folder)[0], self.attn_implementation),
                )
            )
            took = time.monotonic() - started
            self.seconds["load"] += took
            logger.info(
                "reference: loaded %s of %s for an engine at %s, %.1f s",
                role,
                folder,
                dtype_name(dtype),
                took,
            )
        self._models.move_to_end(key)
        return self._models[key]

    def _config(self, folder: str) -> tuple[PreTrainedConfig, ModuleTree]:
        """A checkpoint's config and its family's module tree, read once."""
        if folder not in self._configs:
            config = load_config(folder)
            self._configs[folder] = config, tree_of_config(config)
        return self._configs[folder]

    def _evict(self) -> None:
        """Drop the least recently used sequences until the limit holds."""
        while self._entries and self._held > self.max_bytes:
            _, entry = self._entries.popitem(last=False)
            self._held -= entry.nbytes


def _replaced(base: ReferenceRun, places: dict[int, int], other: ReferenceRun) -> ReferenceRun:
    """``base`` with the sequences in ``places`` taken from ``other``: number in base → number in other."""

    def merged(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [theirs[places[i]] if i in places else one for i, one in enumerate(ours)]

    return ReferenceRun(
        prompts=base.prompts,
        captured={name: merged(rows, other.captured[name]) for name, rows in base.captured.items()},
        logits=merged(base.logits, other.logits),
        routing=[other.routing[places[i]] if i in places else one for i, one in enumerate(base.routing)],
    )


def _refuse_past_the_end(edits: list[tuple[Edit, ...]], prompts: list[list[int]]) -> None:
    """A position without a row would leave the reference clean, and edits paired with the wrong sequence unnoticed."""
    for number, (ids, here) in enumerate(zip(prompts, edits, strict=True)):
        for edit in here:
            if edit.pos and edit.pos[-1] >= len(ids):
                last = f"hook {edit.hook!r}: position {edit.pos[-1]}"
                msg = f"{last} is past the end of sequence {number}, which has {len(ids)} rows"
                raise UsageError(msg)

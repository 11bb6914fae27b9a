"""The reference as a backend: the harness can judge transformers itself, with no engine in sight.

Plain and slow on purpose: every step runs the whole sequence again, without a cache, one request at a time, so what it
returns depends on nothing but the tokens.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self

import torch

from harness.backend import BootConfig, Topology
from harness.conventions import dtype_name
from harness.errors import UsageError
from harness.geometry import Geometry
from harness.interventions import parse_interventions
from harness.models import load_config, resolve
from harness.points import REBUILT_TEMPLATES, TEMPLATES, check_capture, nonfireable_points
from harness.reference.families import architecture_of, attention_of, tree_of
from harness.reference.load import as_dtype, load_model
from harness.reference.references import DEFAULT_ATTENTION
from harness.reference.run import forward_logits, run_reference
from harness.results import ForwardResult, pad_rows
from harness.tokens import check_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from harness.interventions import Edit

__all__ = ["ReferenceBackend", "boot_reference"]

_OPTIONS = ("attn_implementation",)


class ReferenceBackend:
    """transformers behind the :class:`~harness.backend.Backend` protocol, registered as ``hf``.

    ``max_num_batched_tokens`` has no meaning here: a prompt is one forward. Generation is greedy and never stops at
    an end token.
    """

    def __init__(self, model: PreTrainedModel, config: BootConfig, *, boot_seconds: float = 0.0) -> None:
        tree, layers = tree_of(model), model.config.num_hidden_layers
        self.supported_hook_points: Sequence[str] = tree.points(layers, TEMPLATES)
        self.non_fireable_hook_points = nonfireable_points(
            layers,
            {**tree.missing, **dict.fromkeys(REBUILT_TEMPLATES, "this backend gives no attention weights")},
        )
        self.config = config
        self._model: PreTrainedModel | None = model
        self._boot_seconds = boot_seconds

    @classmethod
    def boot(cls, config: BootConfig) -> Self:
        """Load the model of ``config.path`` at ``config.dtype``.

        Raises:
            UsageError: several ranks, compiled mode, an unknown option or architecture, an unreadable checkpoint,
                or a ``max_model_len`` the model has no positions for; before weights are loaded.
        """
        started = time.monotonic()
        if config.topology != Topology():
            msg = f"backend 'hf' runs on one rank; topology {config.topology} is for engines, use tp1"
            raise UsageError(msg)
        if config.mode != "eager":
            msg = f"backend 'hf' has no {config.mode} mode; use eager"
            raise UsageError(msg)
        unknown = sorted(set(config.options) - set(_OPTIONS))
        if unknown:
            msg = f"backend 'hf' knows no option {unknown[0]!r}; it knows {', '.join(_OPTIONS)}"
            raise UsageError(msg)
        hf_config = load_config(config.path)
        architecture_of(hf_config)
        if not 0 < config.max_model_len <= hf_config.max_position_embeddings:
            positions = hf_config.max_position_embeddings
            msg = f"max_model_len is {config.max_model_len}, but the model has positions for 1 to {positions} tokens"
            raise UsageError(msg)
        attention = config.options.get("attn_implementation") or attention_of(hf_config, DEFAULT_ATTENTION)
        model = load_model(config.path, config.dtype, attn_implementation=attention)
        return cls(model, config, boot_seconds=time.monotonic() - started)

    def describe(self) -> dict[str, Any]:
        """What is running, JSON-able."""
        model = self._alive()
        return {
            "backend": "hf",
            "transformers": version("transformers"),
            "torch": torch.__version__,
            "architecture": type(model).__name__,
            "attn_implementation": model.config._attn_implementation,  # noqa: SLF001  (transformers has no other name)
            "dtype": dtype_name(model.dtype),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
            "boot_seconds": round(self._boot_seconds, 3),
        }

    def forward(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] = (),
        intervene: Any | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = False,
    ) -> ForwardResult:
        """Run each prompt and ``max_new_tokens - 1`` greedy steps after it.

        A row belongs to the forward that first computed it, as in an engine: a prompt's rows are bit-equal however
        many tokens follow. Edits, see :mod:`harness.interventions`, reach the rows of decode steps too.

        Raises:
            UsageError: ids, names, edits or a number of tokens that cannot be served; the backend is closed.
        """
        model = self._alive()
        geometry = Geometry.of(model.config)
        names = check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            msg = f"max_new_tokens is {max_new_tokens!r}; it is an int from 1"
            raise UsageError(msg)
        prompts = self._check(input_ids, max_new_tokens)
        edits = parse_interventions(
            intervene,
            widths=geometry.widths(self.supported_hook_points),
            nonfireable=self.non_fireable_hook_points,
            lengths=[len(prompt) + max_new_tokens - 1 for prompt in prompts],
            dtype=model.dtype,
        )
        started = time.monotonic()
        captured: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        logits: list[torch.Tensor] = []
        new_tokens: list[list[int]] = []
        for prompt, here in zip(prompts, edits, strict=True):
            rows, request_logits, new = _generate(model, prompt, names, max_new_tokens, here)
            for name in names:
                captured[name].append(rows[name])
            logits.append(request_logits)
            new_tokens.append(new)
        return ForwardResult(
            captured={
                name: pad_rows(rows).unflatten(-1, geometry.shape(name)) for name, rows in captured.items()
            },
            lengths=[len(rows) for rows in logits],
            new_tokens=new_tokens,
            logits=pad_rows(logits, fill=float("-inf")) if return_logits else None,
            stats={"seconds": time.monotonic() - started, "forwards": len(prompts) * max_new_tokens},
        )

    def raw_logits(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The model's own logits of each prompt, (n_prompt, d_vocab) fp32, with no hook installed."""
        model = self._alive()
        return [forward_logits(model, ids) for ids in self._check(input_ids, 1)]

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _alive(self) -> PreTrainedModel:
        if self._model is None:
            msg = "this reference is closed; boot another"
            raise UsageError(msg)
        return self._model

    def _check(self, input_ids: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Every row that is computed needs a position, so decode steps count."""
        room = self.config.max_model_len - (max_new_tokens - 1)
        return check_prompts(input_ids, vocab_size=self._alive().config.vocab_size, max_len=room)


def _generate(
    model: PreTrainedModel, prompt: list[int], names: list[str], steps: int, edits: tuple[Edit, ...]
) -> tuple[dict[str, torch.Tensor], torch.Tensor, list[int]]:
    """Greedy decode of one request: rows per hook (n_prompt+k-1, width), logits, k new tokens."""
    ids = list(prompt)
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    logits: list[torch.Tensor] = []
    for step in range(steps):
        run = run_reference(model, [ids], names, [edits])
        fresh = slice(0 if step == 0 else -1, None)
        for name in names:
            rows[name].append(run.captured[name][0][fresh])
        logits.append(run.logits[0][fresh])
        ids.append(int(run.logits[0][-1].argmax()))
    return {name: torch.cat(parts) for name, parts in rows.items()}, torch.cat(logits), ids[len(prompt) :]


def boot_reference(
    model_name: str | Path,
    dtype: torch.dtype | str | None = None,
    *,
    attn_implementation: str | None = None,
    max_model_len: int | None = None,
) -> ReferenceBackend:
    """Boot transformers on a bundled name, a checkpoint's folder or a hub id.

    Args:
        model_name: as :func:`harness.models.resolve` takes it.
        dtype: None: the checkpoint's own, fp32 where it names none.
        attn_implementation: transformers' name, ``sdpa`` or ``eager``; None: sdpa, where that is right.
        max_model_len: None: as many positions as the model has.

    Raises:
        UsageError: as :meth:`ReferenceBackend.boot`.
    """
    path = resolve(model_name).fetch()
    hf_config = load_config(path)
    architecture_of(hf_config)
    config = BootConfig(
        backend="hf",
        model=str(model_name),
        path=str(path),
        dtype=dtype_name(as_dtype(dtype or hf_config.dtype or torch.float32)),
        mode="eager",
        max_model_len=hf_config.max_position_embeddings if max_model_len is None else max_model_len,
        options={} if attn_implementation is None else {"attn_implementation": attn_implementation},
    )
    return ReferenceBackend.boot(config)

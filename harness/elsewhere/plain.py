"""The plain protocol, and what makes a :class:`~harness.backend.Backend` of whoever follows it.

A plain backend imports nothing of this project. It is never asked for what cannot be done: names, ids, edits and
capabilities are checked here before it is called. Edits arrive as one factor and one bias per point, and what comes
back is checked for shape and dtype before anything is compared.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch

from harness.backend import Topology
from harness.capabilities import Capabilities
from harness.conventions import Emission
from harness.elsewhere.rows import Expected, check_rows
from harness.errors import EngineError, UndeclaredError, UsageError
from harness.geometry import Geometry
from harness.interventions import parse_interventions
from harness.points import TEMPLATES, check_capture, every_point, nonfireable_points
from harness.results import NO_TOKEN, ForwardResult, pad_rows
from harness.tokens import check_prompts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.backend import BootConfig
    from harness.interventions import Requests

__all__ = ["Plain", "PlainBackend", "PlainClass", "Reply", "Runner"]


class PlainBackend(Protocol):
    """What to write for a backend that knows nothing of this project; ``docs/backends.md`` has an example."""

    #: Names and values of :class:`~harness.capabilities.Capabilities`; may be made by ``boot``.
    capabilities: Mapping[str, Any]

    @classmethod
    def boot(cls, config: Any) -> Self:
        """Load ``config.path`` at ``config.dtype``, ``float32``; see :class:`~harness.backend.BootConfig`."""

    def describe(self) -> dict[str, Any]:
        """Versions and whatever else a reader should know, JSON-able."""

    def run(
        self,
        prompts: list[list[int]],
        *,
        capture: list[str],
        edits: list[list[dict[str, Any]]],
        new_tokens: int,
        logits: bool,
    ) -> dict[str, Any]:
        """Run the prompts as one batch.

        Args:
            prompts: token ids.
            capture: names of points, all of them declared.
            edits: per prompt; each has ``hook``, ``op``, ``rows`` (positions, None for every row), ``scale`` and
                ``bias`` (fp32, () or (width,)): the value x becomes x · scale + bias, and just the bias where the
                scale is 0. Computed in fp32 and rounded once.
            new_tokens: greedy tokens to make, 1 unless ``decode`` is declared.
            logits: whether they are wanted.

        Returns:
            ``captured``: point → one (rows, width) per prompt, or (rows, heads, head_dim), at the config's dtype, of
            the value after the edit; rows are the prompt's tokens and all new ones but the last. ``new_tokens``: per
            prompt; may be left out where ``decode`` is not declared. ``logits``: one (rows, vocabulary) per prompt.
            ``stats``: JSON-able.
        """

    def close(self) -> None:
        """Release everything; safe to call twice."""


class Reply(NamedTuple):
    """What one call gave, as it came."""

    captured: Mapping[str, Sequence[torch.Tensor]]
    new_tokens: Sequence[Sequence[int]]
    logits: Sequence[torch.Tensor] | None
    stats: dict[str, Any]
    seconds: float


class Runner(Protocol):
    """Where a plain backend runs: here, or in another interpreter."""

    def run(
        self,
        prompts: list[list[int]],
        *,
        capture: list[str],
        edits: list[list[dict[str, Any]]],
        new_tokens: int,
        logits: bool,
    ) -> Reply:
        """See :meth:`PlainBackend.run`."""

    def close(self) -> None:
        """See :meth:`PlainBackend.close`."""


class _Here:
    """A plain backend in this very process."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def run(self, prompts: list[list[int]], **asked: Any) -> Reply:
        started = time.perf_counter()
        found = self._backend.run(prompts, **asked)
        seconds = time.perf_counter() - started
        return Reply(
            found["captured"],
            [[int(token) for token in tokens] for tokens in found.get("new_tokens") or ()],
            found.get("logits"),
            found.get("stats") or {},
            seconds,
        )

    def close(self) -> None:
        if hasattr(self._backend, "close"):
            self._backend.close()


class Plain:
    """A plain backend behind the :class:`~harness.backend.Backend` protocol.

    Raises:
        EngineError: what it declares makes no sense, or no such model can be read.
        UndeclaredError: a mode or ranks it does not declare.
    """

    def __init__(
        self, config: BootConfig, runner: Runner, capabilities: Any, describe: Mapping[str, Any]
    ) -> None:
        from harness.models import load_config

        self.config = config
        self.name = config.backend_name
        self._runner = runner
        self._describe = dict(describe)
        self.capabilities = Capabilities.read(capabilities, self.name)
        self._refuse_boot()
        hf_config = load_config(config.path)
        self._vocab = int(hf_config.vocab_size)
        self._geometry = Geometry.of(hf_config)
        known = every_point(self._geometry.layers)
        self.supported_hook_points = self.capabilities.points(known)
        for pattern in self.capabilities.capture or ():
            if not Capabilities(capture=(pattern,)).points(known):
                msg = f"backend {self.name}: it declares the point {pattern!r}; there are {', '.join(TEMPLATES)}"
                raise EngineError(msg)
        undeclared = dict.fromkeys(known, f"backend {self.name} does not declare it")
        self.non_fireable_hook_points = {
            name: reason for name, reason in undeclared.items() if name not in self.supported_hook_points
        } | nonfireable_points(self._geometry.layers)

    def _refuse_boot(self) -> None:
        if self.config.mode == "compiled" and not self.capabilities.compiled:
            msg = f"backend {self.name} declares no compiled mode; use --engine-mode eager"
            raise UndeclaredError(msg)
        if self.config.topology != Topology() and not self.capabilities.ranks:
            msg = f"backend {self.name} declares no ranks; {self.config.topology} is for engines, use --topology tp1"
            raise UndeclaredError(msg)

    @property
    def lost(self) -> bool:
        """Whether its worker is gone, so that only a fresh one can answer."""
        return bool(getattr(self._runner, "lost", False))

    def describe(self) -> dict[str, Any]:
        """What the backend says of itself, and what it declares."""
        return {"backend": self.name, **self._describe, "capabilities": self.capabilities.to_json()}

    def forward(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] = (),
        intervene: Any | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = False,
    ) -> ForwardResult:
        """See :meth:`harness.backend.Backend.forward`.

        Raises:
            UsageError: names, ids or edits that cannot be served.
            CaptureError: rows of another number, shape or dtype than what was asked for.
            EngineError: it failed.
        """
        names = check_capture(capture, self.supported_hook_points, self.non_fireable_hook_points)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            msg = f"max_new_tokens is {max_new_tokens!r}; it is an int from 1"
            raise UsageError(msg)
        room = self.config.max_model_len - (max_new_tokens - 1)
        prompts = check_prompts(input_ids, vocab_size=self._vocab, max_len=room)
        lengths = [len(prompt) + max_new_tokens - 1 for prompt in prompts]
        requests = parse_interventions(
            intervene,
            widths=self._geometry.widths(self.supported_hook_points),
            nonfireable=self.non_fireable_hook_points,
            lengths=lengths,
            dtype=getattr(torch, self.config.dtype),
        )
        # Without tokens of its own the next one is what its logits say.
        logits = return_logits or (self.capabilities.logits and not self.capabilities.decode)
        reply = self._runner.run(
            prompts,
            capture=names,
            edits=self._sent(requests),
            new_tokens=max_new_tokens,
            logits=logits,
        )
        expected = Expected(
            self.name, self._geometry, self.config.dtype, names, lengths, max_new_tokens, logits, self._vocab
        )
        check_rows(expected, reply, decode=self.capabilities.decode)
        tokens: Sequence[Sequence[int]] = reply.new_tokens or [[NO_TOKEN] for _ in prompts]
        if reply.logits and not reply.new_tokens:
            tokens = [[int(rows[-1].argmax())] for rows in reply.logits]
        return ForwardResult(
            captured={name: self._canonical(name, reply.captured[name]) for name in names},
            lengths=lengths,
            new_tokens=[list(new) for new in tokens],
            logits=pad_rows(list(reply.logits), fill=float("-inf"))
            if reply.logits and return_logits
            else None,
            stats={**reply.stats, "seconds": reply.seconds},
        )

    def raw_logits(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Logits of a call that captures and edits nothing, (n_prompt, d_vocab) fp32."""
        result = self.forward(input_ids, return_logits=True)
        return [result.logit_rows(number) for number in range(len(result.lengths))]

    def close(self) -> None:
        """Release everything; safe to call twice."""
        self._runner.close()

    def _emission(self, hook: str) -> Emission:
        if not self.capabilities.is_emitted(hook):
            return Emission()
        from harness.reference.weights import emission

        return emission(self.config.path, hook, getattr(torch, self.config.dtype))

    def _canonical(self, hook: str, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        how = self._emission(hook)
        padded = pad_rows([how.canonical(one.flatten(1)) for one in rows])
        return padded.view(*padded.shape[:2], *self._geometry.shape(hook))

    def _sent(self, requests: Requests) -> list[list[dict[str, Any]]]:
        return [
            [
                {
                    "hook": edit.hook,
                    "op": edit.op,
                    "scale": edit.scale,
                    "bias": self._emission(edit.hook).bias(edit.scale, edit.bias),
                    "rows": None if edit.pos is None else list(edit.pos),
                }
                for edit in edits
            ]
            for edits in requests
        ]


class PlainClass:
    """A plain backend's class as :func:`harness.backend.load_backend` gives it out: boots it in this process."""

    def __init__(self, cls: Any) -> None:
        self._cls = cls

    def boot(self, config: BootConfig) -> Plain:
        """Boot it.

        Raises:
            EngineError, UsageError: as :class:`Plain`.
        """
        started = time.monotonic()
        backend = self._cls.boot(config)
        described = {"boot_seconds": round(time.monotonic() - started, 3), **backend.describe()}
        return Plain(config, _Here(backend), backend.capabilities, described)

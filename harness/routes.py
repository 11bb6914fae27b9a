"""Where an engine's tokens were found to go to other experts than the truth prefers; see :mod:`harness.routing`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from harness.reference.families import tree_of_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.backend import BootConfig
    from harness.interventions import Requests
    from harness.reference.experts import Choice
    from harness.session import ParitySession

__all__ = ["Routes"]


class Routes:
    """The routes of one engine, kept for the whole run: the next comparison of a sequence begins where the last ended.

    Args:
        session: keeps what was found, and the reference's routers.
        config: of the engine.
        hf_config: the model's Hugging Face config.
    """

    def __init__(self, session: ParitySession, config: BootConfig, hf_config: Any) -> None:
        self._session = session
        self._config = config
        self._hf_config = hf_config

    @cached_property
    def exist(self) -> bool:
        """Whether tokens go to experts at all."""
        return bool(tree_of_config(self._hf_config).router)

    def router(self, block: int) -> torch.Tensor:
        """A block's router as the engine of its dtype has it, (experts, width)."""
        return self._session.references.router(self._config.path, self._config.dtype, block)

    def taken(
        self, sequences: Sequence[Sequence[int]], edits: Requests | None = None
    ) -> list[tuple[Choice, ...]]:
        """Per sequence, where this engine was found to go to other experts than the truth prefers."""
        known = self._session.routes
        return [known.get(self._key(ids, edits, i), ()) for i, ids in enumerate(sequences)]

    def take(self, ids: Sequence[int], edits: Requests | None, choices: tuple[Choice, ...]) -> None:
        """Have the truth of one sequence, with the first of ``edits``, go where this engine goes from now on."""
        self._session.routes[self._key(ids, edits, 0)] = choices

    def _key(self, ids: Sequence[int], edits: Requests | None, number: int) -> tuple[Any, ...]:
        here = frozenset(edit.digest for edit in edits[number]) if edits is not None else frozenset()
        return (self._config.to_json(), tuple(ids), here)

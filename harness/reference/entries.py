"""One sequence in the reference's memory: what was asked, what came out, and both as bytes for the disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from harness.reference.experts import Route

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.interventions import Edit
    from harness.reference.experts import Choice, Routing

__all__ = ["Asked", "Entry"]

_HOOK, _LOGITS, _ROUTER, _EXPERTS = "hook/", "logits", "router/", "experts/"


@dataclass(frozen=True)
class Asked:
    """One sequence, its edits, and where T goes to other experts than it prefers."""

    ids: tuple[int, ...]
    edits: tuple[Edit, ...]
    choices: tuple[Choice, ...]

    @property
    def key(self) -> tuple[Any, ...]:
        """What stands for it; edits in no order, since a forward decides it by their hooks."""
        return (self.ids, frozenset(edit.digest for edit in self.edits), self.choices)

    def update(self, sha: Any) -> None:
        """Feed all of it to a hash."""
        edits = sorted(repr(edit.digest) for edit in self.edits)
        sha.update(repr((self.ids, edits, tuple(map(tuple, self.choices)))).encode())


@dataclass(frozen=True)
class Entry:
    """What one model computed for it.

    Attributes:
        captured: hook → (n, width), or (n, heads · n) of a pattern.
        logits: (n, d_vocab) fp32; (0, d_vocab) where they are not kept.
        routing: of a mixture of experts.
    """

    captured: dict[str, torch.Tensor]
    logits: torch.Tensor
    routing: Routing

    @cached_property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything, by names that :meth:`from_tensors` reads."""
        found = {f"{_HOOK}{name}": rows for name, rows in self.captured.items()}
        found[_LOGITS] = self.logits
        for block, route in self.routing.items():
            found |= {f"{_ROUTER}{block}": route.logits, f"{_EXPERTS}{block}": route.experts}
        return found

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Self:
        """Undo :meth:`tensors`.

        Raises:
            KeyError: a part is missing.
        """
        blocks = sorted(int(name.removeprefix(_ROUTER)) for name in tensors if name.startswith(_ROUTER))
        return cls(
            {name.removeprefix(_HOOK): rows for name, rows in tensors.items() if name.startswith(_HOOK)},
            tensors[_LOGITS],
            {block: Route(tensors[f"{_ROUTER}{block}"], tensors[f"{_EXPERTS}{block}"]) for block in blocks},
        )


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, dtypes, shapes and bytes, in no order."""
    sha = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()

"""How a role's forward differs from the plain one: on which model it runs, how it attends, what is moved."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from harness.points import BLOCK_OUT
from harness.reference.hooks import module_paths
from harness.reference.realisations import jitter, onednn_linears

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

__all__ = ["Role", "giving_weights", "jittered", "model_role", "threads_for"]

#: ``truth``, ``same`` (R itself) or ``jitter<seed>`` (a further realisation of R).
Role = str
#: Parameters below which a forward is mostly the starting of kernels.
_SMALL = 10_000_000


def model_role(role: Role) -> Role:
    """The jittered realisations run on R's own model."""
    return "truth" if role == "truth" else "same"


@contextmanager
def threads_for(model: PreTrainedModel) -> Iterator[None]:
    """Within it small models run on one thread: they are no faster on more, and ten times slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if model.num_parameters() < _SMALL else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def giving_weights(model: PreTrainedModel, *, wanted: bool) -> Iterator[None]:
    """Within it attention is computed so that its weights can be seen, where they are wanted."""
    before = model.config._attn_implementation  # noqa: SLF001  (transformers has no other name)
    if not wanted or before == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def jittered(model: PreTrainedModel, role: Role) -> Iterator[None]:
    """Within it, a jittered role's forward starts from a moved embedding and multiplies in oneDNN."""
    if not role.startswith("jitter"):
        yield
        return
    seed = int(role.removeprefix("jitter"))
    # Moved where the first block takes it in, so that the embedding's own capture stays R's.
    first = model.get_submodule(module_paths(model, [BLOCK_OUT.format(i=0)])[BLOCK_OUT.format(i=0)])

    def move(
        _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (jitter(args[0], seed), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": jitter(kwargs["hidden_states"], seed)}

    handle = first.register_forward_pre_hook(move, with_kwargs=True)
    try:
        with onednn_linears(model):
            yield
    finally:
        handle.remove()

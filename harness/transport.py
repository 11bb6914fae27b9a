"""Messages between the suite and an engine's process: a JSON header and safetensors bytes, never pickle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from harness.errors import EngineError
from harness.results import ForwardResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection

    import torch

__all__ = ["PROTOCOL", "pack_result", "receive", "send", "unpack_result"]

#: Bumped when a message changes its meaning; both ends say theirs.
PROTOCOL = 1


def send(
    connection: Connection, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Send one message: the header, then the tensors (possibly none)."""
    plain = {name: tensor.contiguous() for name, tensor in (tensors or {}).items()}
    # All of it is made before the first byte goes: the other end takes a header for a message that is coming.
    payload = save_tensors(plain) if plain else b""
    connection.send_bytes(json.dumps({"protocol": PROTOCOL, **header}).encode())
    connection.send_bytes(payload)


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Receive one message.

    Raises:
        EOFError: the other end is gone.
        EngineError: what came is no message, or one of another protocol version.
    """
    head, payload = connection.recv_bytes(), connection.recv_bytes()
    try:
        header = json.loads(head)
        tensors = load_tensors(payload) if payload else {}
    except (ValueError, RecursionError, SafetensorError) as error:
        msg = f"what came over the pipe is no message ({type(error).__name__}: {error})"
        raise EngineError(msg) from error
    if not isinstance(header, dict):
        msg = f"what came over the pipe is no message: its header is {type(header).__name__}"
        raise EngineError(msg)
    if header.get("protocol") != PROTOCOL:
        msg = f"the engine's process speaks protocol {header.get('protocol')!r}, this one {PROTOCOL}"
        raise EngineError(msg)
    return header, tensors


def pack_result(result: ForwardResult) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Split a result into a header and tensors; the engine's own output stays behind."""
    tensors = {f"captured/{name}": tensor for name, tensor in result.captured.items()}
    if result.logits is not None:
        tensors["logits"] = result.logits
    header = {
        "lengths": result.lengths,
        "new_tokens": result.new_tokens,
        "stats": result.stats,
        "starts": result.starts,
        "prompts": result.prompts,
    }
    return header, tensors


def unpack_result(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> ForwardResult:
    """Undo :func:`pack_result`; hooks come back in forward order as the header cannot carry it.

    Raises:
        EngineError: that is no result.
    """
    from harness.points import HookPoint

    try:
        names = sorted(
            (n.removeprefix("captured/") for n in tensors if n.startswith("captured/")), key=HookPoint.parse
        )
        return ForwardResult(
            captured={name: tensors[f"captured/{name}"] for name in names},
            lengths=list(header["lengths"]),
            new_tokens=[list(tokens) for tokens in header["new_tokens"]],
            logits=tensors.get("logits"),
            stats=dict(header["stats"]),
            starts=list(header["starts"]),
            prompts=[list(ids) for ids in header["prompts"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        msg = f"the engine's process answered a forward with no result ({type(error).__name__}: {error})"
        raise EngineError(msg) from error

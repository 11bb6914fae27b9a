"""Which peers there are, and what each runs in."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LIMIT", "OURS", "PEERS", "Peer"]


@dataclass(frozen=True)
class Peer:
    """One way of collecting activations.

    Attributes:
        name: its key in records and on the command line.
        title: what a reader sees.
        runner: module in ``harness/peers/runners``.
        requirements: file in ``requirements/peers``, without its ending; None: the shared environment is enough.
        plugins: vLLM's general plugins it needs, as ``VLLM_PLUGINS`` takes them.
        environment: variables of its own, by name and value.
        forced: pins that refuse this Python and are pure Python: installed all the same, and said so.
        collects: False for what only shows how fast it could be.
        note: what a reader has to know beside the figures.
    """

    name: str
    title: str
    runner: str
    requirements: str | None = None
    plugins: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    forced: tuple[str, ...] = field(default=())
    collects: bool = True
    note: str = ""


#: The names that others are compared with.
OURS, LIMIT = "harness", "vllm"

PEERS = (
    Peer(LIMIT, "plain vLLM", "vllm_plain", collects=False, note="collects nothing: the limit"),
    Peer(
        OURS,
        "this harness on vLLM",
        "harness_vllm",
        note="boots its engine with large pages for PyTorch's memory (THP_MEM_ALLOC_ENABLE=1); the others do not",
    ),
    Peer(
        "harness-in-process",
        "this harness, vLLM in the caller's process",
        "harness_vllm",
        environment=(("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),),
        note="vLLM's own switch, VLLM_ENABLE_V1_MULTIPROCESSING=0: nothing has to reach another process, and where the "
        "engine crashes, so does the caller",
    ),
    Peer(
        "hf-hidden-states",
        "transformers, output_hidden_states",
        "hf_hidden_states",
        note="the last block's residual stream is not among its values: the final norm has been applied",
    ),
    Peer("hf-hooks", "transformers, forward hooks", "hf_hooks"),
    Peer(
        "transformer-lens",
        "TransformerLens, TransformerBridge",
        "transformer_lens_bridge",
        "transformer-lens",
    ),
    Peer("nnsight", "nnsight on transformers", "nnsight_transformers", "nnsight"),
    Peer(
        "vllm-lens",
        "vllm-lens",
        "vllm_lens_engine",
        "vllm-lens",
        plugins="activations",
        forced=("vllm-lens",),
    ),
    Peer(
        "transformer-lens-vllm",
        "TransformerLens' vLLM source",
        "transformer_lens_vllm",
        "transformer-lens",
        plugins="tl_vllm_capture",
        note="on this vLLM, outside the releases it asks for; its engine runs in the caller's process",
    ),
    Peer(
        "transformer-lens-own-vllm",
        "TransformerLens' vLLM source, its own vLLM",
        "transformer_lens_vllm",
        "transformer-lens-own-vllm",
        plugins="tl_vllm_capture",
    ),
    Peer("nnsight-vllm", "nnsight on vLLM", "nnsight_vllm", "nnsight"),
)

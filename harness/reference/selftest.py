"""The reference proves itself: what the hooks say must agree with other ways of reading the same model.

A harness that trusts its reference turns the reference's mistakes into the engine's. Each hook point is read a second
time by a path that shares neither the module table nor the hook with the first: rows of the embedding matrix, the
NEXT block's input, ``output_hidden_states``, the inputs of the last projections, the head's input, arithmetic.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from harness.conventions import MIN_DIVISOR, safe_divisor
from harness.errors import CaptureError
from harness.points import ATTN_OUT, BLOCK_OUT, EMBED, FINAL_NORM, MLP_OUT
from harness.reference.hooks import points_of, tree_of
from harness.reference.run import forward_logits, run_reference
from harness.reference.truth import RecordNarrowing, exact_forward

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel

    from harness.reference.hooks import ModuleTree

__all__ = ["BOUNDS", "check_reference"]

#: How far two readings may be apart per row, ‖a - b‖ / scale, as (multiple of the dtype's eps, multiple of the eps
#: products are summed in, fp32's or better). eps is 2⁻⁷ at bf16, a rounding costs at most half of it. Copies of one
#: tensor agree bit for bit. Largest seen on SmolLM2 at 120 tokens, in eps at (bf16, fp32), beside each.
BOUNDS = {
    "copy": (0, 0),
    "projection": (1, 16),  # one rounding of the output, and the sums' order: 0.4, 4.9
    "embedding": (1, 0),  # one multiplication
    "residual": (2, 0),  # two additions, perhaps two multiplications: 0.7, 0.7
    "norm": (2, 4),  # rounded normalised, times the weight, divided by it: 0.6, 1.7
    "logits": (2, 16),  # the norm's three roundings, then as a projection: 0.4, 3.3
}
#: The last projection of each branch, by whichever of these names the family has: its output is the branch's.
_LAST_PROJECTION = {
    ATTN_OUT: ("self_attn.o_proj", "attn.out_proj"),
    MLP_OUT: ("mlp.down_proj", "mlp.fc_out"),
}


@dataclass
class _Readings:
    """Both readings of one sequence; every tensor (n, width) at the model's dtype, logits (n, d_vocab) fp32."""

    model: PreTrainedModel
    ids: list[int]
    captured: dict[str, torch.Tensor]  #: the reading under test
    logits: torch.Tensor
    block_in: dict[int, torch.Tensor] = field(default_factory=dict)
    projection_in: dict[str, torch.Tensor] = field(
        default_factory=dict
    )  #: hook → input of its last projection
    head_in: torch.Tensor | None = None
    hidden_states: list[torch.Tensor] = field(default_factory=list)
    narrowing: dict[str, int] = field(default_factory=dict)


def check_reference(model: PreTrainedModel, ids: Sequence[int]) -> list[str]:
    """Check the hooks of ``model`` on one sequence.

    Checks of every capture: shape, dtype, finite, no row constant over its channels, and unchanged by later
    forwards. Then the second readings: the embedding against the first block's input and the matrix's rows; each
    block's output against the next one's input and against ``output_hidden_states`` (whose last entry is after the
    final norm); attention and MLP against their last projections; ``out = before + attn + mlp``, by way of the family's
    factor and norms; the final norm from the last block's output with the config's eps; the logits from the normalised
    rows, with bias, soft-cap and scale. At fp64: no operation on an fp64 tensor that returns a narrower one.

    Args:
        model: a loaded model, see :func:`~harness.reference.load.load_model`.
        ids: two different tokens at least, or a shift by one row can't be seen.

    Returns:
        One line per defect, naming hook and position; empty when all is well.
    """
    try:
        run = run_reference(model, [ids], points_of(model))
        read = _Readings(
            model, list(ids), {hook: rows[0] for hook, rows in run.captured.items()}, run.logits[0]
        )
        problems = _malformed(read)
        if problems:
            return problems
        before = {hook: rows.clone() for hook, rows in read.captured.items()}
        _read_again(read)
        forward_logits(model, read.ids[::-1])
        changed = [hook for hook, rows in read.captured.items() if not torch.equal(rows, before[hook])]
        problems += [f"{hook}: a later forward changed it" for hook in changed]
        for check in (_embedding, _block_outputs, _projections, _residuals, _final_norm, _logits):
            problems += check(read)
    except CaptureError as error:
        return [str(error)]
    return problems + [
        f"fp64: {operation} took fp64 and returned a narrower float, {count} times"
        for operation, count in read.narrowing.items()
    ]


def _malformed(read: _Readings) -> list[str]:
    """Everything that can be said of one capture alone."""
    config, n_rows = read.model.config, len(read.ids)
    expected = dict.fromkeys(points_of(read.model), ((n_rows, config.hidden_size), read.model.dtype))
    problems = [f"{hook}: not captured" for hook in expected if hook not in read.captured]
    values = {**read.captured, "logits": read.logits}
    expected["logits"] = ((n_rows, config.vocab_size), torch.float32)
    for hook, rows in values.items():
        shape, dtype = expected[hook]
        if tuple(rows.shape) != shape:
            problems.append(f"{hook}: shape {tuple(rows.shape)}, expected {shape}")
            continue
        if rows.dtype != dtype:
            problems.append(f"{hook}: {rows.dtype}, expected {dtype}")
        bad = ~rows.isfinite().all(dim=-1)
        # All-zero rows are the classic of a capture that never happened (vLLM issue 46301).
        flat = (rows == rows[:, :1]).all(dim=-1)
        for rows_bad, what in ((bad, "not finite"), (flat, "constant over its channels")):
            where = rows_bad.nonzero().flatten().tolist()
            if where:
                problems.append(
                    f"{hook}: {len(where)} of {n_rows} rows {what}, the first at position {where[0]}"
                )
    return problems


def _read_again(read: _Readings) -> None:
    """One more forward, read at module inputs and through ``output_hidden_states``."""
    model = read.model
    tokens = torch.tensor([read.ids], device=model.device)
    with _reading_inputs(read), exact_forward(model.dtype), RecordNarrowing() as recorder:
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    read.hidden_states = [states[0].detach().cpu() for states in out.hidden_states]
    read.narrowing = recorder.found


@contextmanager
def _reading_inputs(read: _Readings) -> Iterator[None]:
    """Keep the inputs of blocks, last projections and head. Finds them without the table of ``hooks``."""
    handles: list[Any] = []

    def keep(module: nn.Module, store: dict[Any, torch.Tensor], key: Any) -> None:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else kwargs["hidden_states"]
            store[key] = value[0].detach().to("cpu", copy=True)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    head: dict[str, torch.Tensor] = {}
    try:
        for index, layer in enumerate(_layers(read.model)):
            keep(layer, read.block_in, index)
            for template in _LAST_PROJECTION:
                keep(_last_projection(layer, template)[1], read.projection_in, template.format(i=index))
        keep(read.model.get_output_embeddings(), head, "in")
        yield
        read.head_in = head.get("in")
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's list of blocks: the one list of that length below the base model."""
    count = model.config.num_hidden_layers
    lists = [m for m in model.base_model.children() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        msg = f"{type(model).__name__}: found {len(lists)} lists of {count} blocks, expected one"
        raise CaptureError(msg)
    return lists[0]


def _last_projection(layer: nn.Module, template: str) -> tuple[str, nn.Linear]:
    """Name and module of the linear layer whose output is the branch's of ``template``."""
    named = dict(layer.named_modules())
    found = [name for name in _LAST_PROJECTION[template] if isinstance(named.get(name), torch.nn.Linear)]
    if len(found) != 1:
        names = " or ".join(_LAST_PROJECTION[template])
        msg = f"{type(layer).__name__} has no linear layer {names}, by which {template} is read again"
        raise CaptureError(msg)
    module: nn.Linear = named[found[0]]
    return found[0], module


def _apart(
    name: str,
    got: torch.Tensor,
    want: torch.Tensor,
    kind: str,
    what: str,
    *,
    scale: torch.Tensor | None = None,
    eps: float | None = None,
) -> list[str]:
    """Compare (n, width) with (n, width), row by row, and say where the worst row is.

    ``scale`` (n,) is what the difference is measured against, ‖want‖ by default; ``eps`` that of the dtype whose
    roundings separate the two, ``got``'s by default.
    """
    got64, want64 = got.double(), want.double()
    scale = want64.norm(dim=-1) if scale is None else scale
    # A row of zeros must equal a row of zeros: 0/0 is agreement, anything else over 0 is not.
    difference = (got64 - want64).norm(dim=-1)
    error = torch.where(difference == 0, difference, difference / scale)
    eps = eps or torch.finfo(got.dtype).eps
    rounding, summing = BOUNDS[kind]
    bound = rounding * eps + summing * min(eps, torch.finfo(torch.float32).eps)
    wrong = ~(error <= bound)
    if not bool(wrong.any()):
        return []
    worst = int(error.nan_to_num(nan=float("inf")).argmax())
    count = f"{int(wrong.sum())} of {len(error)} rows"
    size = f"{float(error[worst]):.2e} (bound {bound:.1e})"
    return [f"{name}: {count} differ from {what}, the worst at position {worst} by {size}"]


def _rounding_scale(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Per row, (n,) fp64: what the rounding errors of ``rows @ matrix.T`` are measured against.

    The larger of ``√ΣᵥΣⱼ (xⱼ Wᵥⱼ)²``, to which independent roundings of the terms add up, and of the product's own
    norm, for those of the running sums. Where large terms cancel, as in SmolLM2's logits, the product has fewer good
    digits than what it comes from; where they add up, as in its block 24, it is the running sum that rounds.
    """
    wide = matrix.detach().cpu().double()
    terms = (rows.double().square() @ wide.square().sum(dim=0)).sqrt()
    return torch.maximum(terms, (rows.double() @ wide.T).norm(dim=-1))


def _embedding(read: _Readings) -> list[str]:
    """What the first block takes in; and the matrix's rows times one number, whichever the family has it be."""
    got = read.captured[EMBED]
    rows = read.model.get_input_embeddings().weight.detach().cpu()[read.ids].double()
    factor = float((got.double() * rows).sum() / rows.square().sum())
    return _apart(EMBED, got, read.block_in[0], "copy", "the input of block 0") + _apart(
        EMBED, got, rows * factor, "embedding", f"the embedding matrix's rows, times {factor:g}"
    )


def _block_outputs(read: _Readings) -> list[str]:
    problems: list[str] = []
    for index in range(read.model.config.num_hidden_layers - 1):
        hook = BLOCK_OUT.format(i=index)
        following = read.block_in[index + 1]
        problems += _apart(hook, read.captured[hook], following, "copy", f"the input of block {index + 1}")
        states = read.hidden_states[index + 1]
        problems += _apart(hook, read.captured[hook], states, "copy", f"hidden_states[{index + 1}]")
    return problems


def _projections(read: _Readings) -> list[str]:
    problems: list[str] = []
    for index, layer in enumerate(_layers(read.model)):
        for template in _LAST_PROJECTION:
            hook = template.format(i=index)
            path, module = _last_projection(layer, template)
            wanted = read.projection_in[hook].double() @ module.weight.detach().cpu().double().T
            if module.bias is not None:
                wanted += module.bias.detach().cpu().double()
            scale = _rounding_scale(read.projection_in[hook], module.weight)
            what = f"{path} of its input"
            problems += _apart(hook, read.captured[hook], wanted, "projection", what, scale=scale)
    return problems


def _residuals(read: _Readings) -> list[str]:
    tree, config = tree_of(read.model), read.model.config
    factor = float(getattr(config, tree.branch_factor)) if tree.branch_factor else 1.0
    problems: list[str] = []
    for index, layer in enumerate(_layers(read.model)):
        hook = BLOCK_OUT.format(i=index)
        before = BLOCK_OUT.format(i=index - 1) if index else EMBED
        branches = [read.captured[t.format(i=index)].double() * factor for t in (ATTN_OUT, MLP_OUT)]
        if tree.branch_norms is not None:
            branches = [
                _normalised(rows, config, centred=False) * _gain(layer.get_submodule(norm), tree)
                for rows, norm in zip(branches, tree.branch_norms, strict=True)
            ]
        parts = [read.captured[before].double(), *branches]
        total = torch.stack(parts).sum(dim=0)
        # Against what is added, not the sum: where a block cancels its input the sum is all rounding.
        scale = torch.stack([part.norm(dim=-1) for part in parts]).sum(dim=0)
        what = f"{before} + attention + MLP"
        kind = "residual" if tree.branch_norms is None else "norm"
        problems += _apart(hook, read.captured[hook], total, kind, what, scale=scale)
    return problems


def _normalised(rows: torch.Tensor, config: PreTrainedConfig, *, centred: bool) -> torch.Tensor:
    """By definition, x / sqrt(mean(x²) + eps), perhaps of x - mean(x), with the config's eps (not the module's)."""
    name = "layer_norm_epsilon" if centred else "rms_norm_eps"
    eps = getattr(config, name, None)
    if eps is None:
        msg = f"the config has no {name}: the norms are of another kind than the family's entry says"
        raise CaptureError(msg)
    x = rows.double()
    x = x - x.mean(dim=-1, keepdim=True) if centred else x
    normalised: torch.Tensor = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return normalised


def _gain(norm: nn.Module, tree: ModuleTree) -> torch.Tensor:
    """What a norm multiplies by, (width,) fp64."""
    weight: torch.Tensor = norm.weight.detach().cpu().double()  # type: ignore[operator]
    return weight + 1.0 if tree.plus_one else weight


def _weighted(read: _Readings) -> torch.Tensor:
    """What the final norm must have returned, by its captured value, (n, width) fp64."""
    norm, tree = _norm(read.model), tree_of(read.model)
    weighted = read.captured[FINAL_NORM].double() * safe_divisor(_gain(norm, tree))
    if tree.layer_norm:
        weighted += norm.bias.detach().cpu().double()  # type: ignore[operator]
    return weighted


def _final_norm(read: _Readings) -> list[str]:
    tree, config = tree_of(read.model), read.model.config
    last = read.captured[BLOCK_OUT.format(i=config.num_hidden_layers - 1)]
    normalised = _normalised(last, config, centred=tree.layer_norm)
    gain = _gain(_norm(read.model), tree)
    kept = gain.abs() < MIN_DIVISOR
    normalised[:, kept] *= gain[kept]
    name = FINAL_NORM
    problems = _apart(name, read.captured[name], normalised, "norm", "the last block's output, normalised")
    weighted = _weighted(read)
    for value, what in ((read.head_in, "the head's input"), (read.hidden_states[-1], "hidden_states[-1]")):
        if value is None:
            problems.append(f"{name}: the head never ran")
        else:
            problems += _apart(f"{name} · weight", weighted.to(read.model.dtype), value, "norm", what)
    return problems


def _logits(read: _Readings) -> list[str]:
    """``(normalised · weight) @ W_U.T``, plus the head's bias, soft-capped and scaled as the config says."""
    weighted, config = _weighted(read), read.model.config
    head = read.model.get_output_embeddings()
    unembed = head.weight
    wanted = weighted @ unembed.detach().cpu().double().T
    scale = _rounding_scale(weighted, unembed)
    if getattr(head, "bias", None) is not None:
        wanted += head.bias.detach().cpu().double()
    if cap := getattr(config, "final_logit_softcapping", None):
        wanted = cap * torch.tanh(wanted / cap)
    if divisor := getattr(config, "logits_scaling", None):
        wanted, scale = wanted / divisor, scale / divisor
    eps = max(torch.finfo(read.model.dtype).eps, torch.finfo(torch.float32).eps)
    return _apart(
        "logits", read.logits, wanted, "logits", f"{FINAL_NORM} · weight @ W_U.T", scale=scale, eps=eps
    )


def _norm(model: PreTrainedModel) -> nn.Module:
    """The final norm, found as the base model's only norm outside its blocks."""
    norms = [m for m in model.base_model.children() if type(m).__name__.endswith(("RMSNorm", "LayerNorm"))]
    if len(norms) != 1:
        msg = f"{type(model).__name__}: found {len(norms)} final norms, expected one"
        raise CaptureError(msg)
    return norms[0]

"""A script of a few lines that shows a wrong value with the library itself and transformers, and nothing of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.adapters import ADAPTERS
from harness.adapters.repros import REPROS
from harness.elsewhere import split_name
from harness.points import ATTN_OUT, FINAL_NORM, HookPoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.audit.smallest import Smallest
    from harness.reference.families import ModuleTree

__all__ = ["minimal_script"]

_UNTOKENIZED = "# it has no tokenizer; where the library wants one, save any beside it: it is not used"
_CHANGES = {
    "suppress": "torch.zeros_like(value)",
    "scale": "value * {factor}",
    "add": "value + {value}",
    "set": "torch.full_like(value, {value})",
}


def minimal_script(smallest: Smallest, backend: str, tree: ModuleTree, folder: Path | None = None) -> str:
    """The script; empty where the library is not one of ours to write for, or the family reads otherwise than a Llama.

    Args:
        smallest: the call.
        backend: as it was named on the command line.
        tree: of the checkpoint, which says where transformers has the points.
        folder: of the checkpoint; one without a tokenizer is said to be so, since libraries insist on one.
    """
    adapter = ADAPTERS.get(split_name(backend)[0])
    repro = REPROS.get(adapter.module) if adapter else None
    points = list(dict.fromkeys([*smallest.edits, smallest.hook]))
    places = {point: _place(tree, point) for point in points}
    lines = (repro.edited if smallest.edits else repro.clean) if repro else ""
    if repro is None or not lines or not all(places.values()):
        return ""
    paths = {point: place for point, place in places.items() if place}
    weighted = repro.raw and smallest.hook == FINAL_NORM
    found = f'(found / model.get_submodule("{paths[smallest.hook]}").weight)' if weighted else "found"
    return "\n".join(
        [
            "import torch",
            repro.imports,
            "from transformers import AutoModelForCausalLM",
            "",
            f'path, dtype = "path/to/{smallest.model}", torch.{smallest.dtype}  # numbers below are of this checkpoint',
            *([_UNTOKENIZED] if folder is not None and not any(folder.glob("tokenizer*")) else []),
            f'prompt, hook = {list(smallest.prompt)}, "{smallest.hook}"',
            *([f"modules = {_quoted(paths)}"] if "modules" in lines else []),
            *_edit(smallest, lines),
            "",
            lines,
            "",
            *_transformers(smallest, paths),
            f"print({found}[{smallest.row}, :3].tolist())  # {_numbers(smallest.found)}",
            f"print(kept[0][{smallest.row}, :3].tolist())  # {_numbers(smallest.expected)}",
        ]
    )


def _place(tree: ModuleTree, point: str) -> str:
    """The module in transformers, where a hook on its output is all there is to it."""
    plain = not (tree.router or tree.embed_factor or tree.plus_one or tree.layer_norm or tree.flat)
    reading = tree.reading(HookPoint.parse(point))
    return reading.path if plain and reading.side == "out" and reading.part is None else ""


def _edit(smallest: Smallest, lines: str) -> list[str]:
    if not smallest.edits:
        return []
    ((at, spec),) = smallest.edits.items()
    theirs = "intervene=edits" in lines
    said = [f'edits = {{"{at}": {_quoted(spec)}}}' if theirs else f'at = "{at}"']
    change = _CHANGES[spec["op"]].format(**spec)
    return [*said, "", "", "def change(value):", f"    return {change}", ""]


def _transformers(smallest: Smallest, paths: Mapping[str, str]) -> list[str]:
    """The same in transformers: a hook at each module."""
    edited = next(iter(smallest.edits), None)
    both = edited == smallest.hook
    lines = ["kept = []", "", ""]
    if edited and not both:
        lines += ["def alter(module, args, output):", f"    value = change({_value(edited)})"]
        lines += [f"    return {_output(edited)}", "", ""]
    lines += ["def keep(module, args, output):"]
    value = _value(smallest.hook)
    lines += [f"    value = {f'change({value})' if both else value}", "    kept.append(value[0])"]
    lines += [f"    return {_output(smallest.hook)}"] if both else []
    lines += ["", "", "model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)"]
    if edited and not both:
        lines += [f'model.get_submodule("{paths[edited]}").register_forward_hook(alter)']
    lines += [f'model.get_submodule("{paths[smallest.hook]}").register_forward_hook(keep)']
    return [*lines, "model(torch.tensor([prompt]))"]


def _value(point: str) -> str:
    if HookPoint.parse(point).template == ATTN_OUT:
        return "output[0]"
    return "output / module.weight" if point == FINAL_NORM else "output"


def _output(point: str) -> str:
    if HookPoint.parse(point).template == ATTN_OUT:
        return "(value, *output[1:])"
    return "value * module.weight" if point == FINAL_NORM else "value"


def _quoted(mapping: Mapping[str, Any]) -> str:
    parts = (f'"{key}": {_word(value)}' for key, value in mapping.items())
    return f"{{{', '.join(parts)}}}"


def _word(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)

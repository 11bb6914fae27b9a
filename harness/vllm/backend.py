"""The vLLM side as a :class:`~harness.backend.Backend`, instrumented or, for the observer effect, plain."""

from __future__ import annotations

import os
import pkgutil
import time
from typing import TYPE_CHECKING, Any, Self

from harness.backend import Topology
from harness.geometry import Geometry
from harness.models import load_config
from harness.vllm.boot import boot_vllm, check_boot
from harness.vllm.driver import VLLMDriver
from harness.vllm.environment import boot_environment
from harness.vllm.kv_cache import kv_cache_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from harness.backend import BootConfig
    from harness.results import ForwardResult

__all__ = ["VLLMBackend"]


class VLLMBackend:
    """One vLLM engine behind the protocol the suites speak."""

    def __init__(self, driver: VLLMDriver, config: BootConfig) -> None:
        self.driver = driver
        self.config = config
        self.supported_hook_points = driver.supported_hook_points
        self.non_fireable_hook_points = driver.non_fireable_hook_points

    @classmethod
    def check(cls, config: BootConfig) -> None:
        """Refuse what cannot be booted without importing vLLM or loading a weight."""
        check_boot(
            config.path,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            tensor_parallel_size=config.topology.tp,
            pipeline_parallel_size=config.topology.pp,
        )

    @classmethod
    def boot(cls, config: BootConfig) -> Self:
        """Boot as ``config`` says; ``options`` go to ``boot_vllm``, except these.

        ``environment`` and ``threads``, how many each rank computes with, are set for good: an engine behind this
        protocol has its process to itself. ``instrument`` False leaves out all that is ours. ``driver_cls`` names a
        subclass of the driver, as ``worker_cls`` does one of the worker: for faults planted on this side.
        """
        options = dict(config.options)
        os.environ.update(options.pop("environment", {}))
        if threads := options.pop("threads", None):
            _set_threads(threads)
        driver_cls = options.pop("driver_cls", None)
        if options.pop("instrument", True):
            bridge = boot_vllm(
                config.path,
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
                enable_batching=config.mode == "eager",
                tensor_parallel_size=config.topology.tp,
                pipeline_parallel_size=config.topology.pp,
                **options,
            )
            if driver_cls is not None:
                bridge.driver.__class__ = pkgutil.resolve_name(driver_cls)
            return cls(bridge.driver, config)
        return cls(_boot_plain(config, options), config)

    def describe(self) -> dict[str, Any]:
        """Versions, platform, runner and boot seconds."""
        import torch
        import transformers
        import vllm
        from vllm.platforms import current_platform

        runner = "V2" if self.driver.llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "architecture": self.driver.hf_config.architectures[0],
            "platform": current_platform.device_type,
            "runner": runner,
            **({"threads": torch.get_num_threads()} if self.config.topology == Topology() else {}),
            "boot_seconds": round(self.driver.boot_seconds, 3),
            "hook_points": len(self.supported_hook_points),
        }

    def forward(
        self,
        input_ids: Sequence[Sequence[int]],
        *,
        capture: Sequence[str] = (),
        return_logits: bool = False,
        **kwargs: Any,
    ) -> ForwardResult:
        """See :meth:`VLLMDriver.forward`; logits are made only where they are asked for."""
        return self.driver.forward(input_ids, capture=capture, return_logits=return_logits, **kwargs)

    def raw_logits(
        self, input_ids: Sequence[Sequence[int]], max_new_tokens: int = 1, capture: Sequence[str] = ()
    ) -> list[torch.Tensor]:
        """See :meth:`VLLMDriver.raw_logits`."""
        return self.driver.raw_logits(input_ids, max_new_tokens, capture)

    def worker_logits(self, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """See :meth:`VLLMDriver.worker_logits`."""
        return self.driver.worker_logits(input_ids)

    def layout(self) -> dict[str, Any]:
        """See :class:`harness.vllm.layout.Layout`."""
        return self.driver.layout.to_json()

    def tap_bytes(self) -> list[dict[str, int]]:
        """See :meth:`VLLMDriver.tap_bytes`."""
        return self.driver.tap_bytes()

    def get_param(self, name: str) -> torch.Tensor | None:
        """See :meth:`VLLMDriver.get_param`."""
        return self.driver.get_param(name)

    def close(self) -> None:
        """See :meth:`VLLMDriver.close`."""
        self.driver.close()


def _set_threads(count: int) -> None:
    """Have this process, and ranks that it starts, compute with so many threads."""
    import torch

    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)


def _boot_plain(config: BootConfig, options: dict[str, Any]) -> VLLMDriver:
    """The same engine with nothing of the harness in it; it can only generate and give raw logits."""
    from vllm import LLM

    options = {"max_num_seqs": min(16, config.max_num_batched_tokens), **options}
    geometry = Geometry.of(load_config(config.path))
    options |= kv_cache_argument(options, geometry, config.dtype, config.max_model_len)
    started = time.monotonic()
    with boot_environment(config.topology.tp * config.topology.pp):
        llm = LLM(
            model=config.path,
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enforce_eager=config.mode == "eager",
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            tensor_parallel_size=config.topology.tp,
            pipeline_parallel_size=config.topology.pp,
            **options,
        )
    return VLLMDriver(llm, boot_seconds=time.monotonic() - started)

"""The worker class an instrumented engine runs: the platform's own, with taps installed after the weights.

Named to vLLM as a string (``worker_cls``), so that every process and node imports it for itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.conventions import Emission
from harness.vllm import internals
from harness.vllm.overlays import get_overlay
from harness.vllm.sites import capture_hook, tap_hook
from harness.vllm.spec import HarnessSpec
from harness.vllm.taps import TapSet, emission_of, install_taps
from harness.vllm.worker_extension import TLWorkerExtension

__all__ = ["WORKER_CLASS", "CaptureWorker"]

WORKER_CLASS = "harness.vllm.worker.CaptureWorker"

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = internals.base_worker_class()


class CaptureWorker(TLWorkerExtension, _Base):
    """The platform's worker plus taps. With no spec in the engine's config it behaves as its base."""

    #: What is done with each value that a tap sees.
    tap_hook = staticmethod(tap_hook)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights, then install: late enough for every module to exist, early enough to be compiled."""
        self.prepare_compiler()
        super().load_model(*args, **kwargs)
        internals.prepare_stage_input(self)
        spec = self.harness_spec()
        if spec is None:
            return
        internals.refuse_engine(self)
        self.harness_init(self.install(spec), spec)
        internals.instrument_runner(self, self)

    def prepare_compiler(self) -> None:
        """Before the model is made, which takes the compiler's options as they are then."""
        internals.compile_for_any_threads(self.vllm_config)

    def harness_spec(self) -> HarnessSpec | None:
        """What the driver asked for, out of the engine's own config."""
        return HarnessSpec.from_config(self.vllm_config.additional_config)

    def install(self, spec: HarnessSpec) -> TapSet:
        """Resolve each tap's module on this rank and hook it."""
        hf_config = self.vllm_config.model_config.hf_config
        overlay = get_overlay(hf_config.architectures[0])
        if spec.bare:
            overlay.check(hf_config)
            spec = spec.completed(overlay, hf_config)
        overlay.refuse(spec.taps, internals.ranks_per_stage())
        model = internals.model_of(self)
        modules = [internals.resolve_dot_path(model, tap.path) for tap in spec.taps]
        return install_taps(
            [
                (tap, module, Emission() if module is None else emission_of(model, tap))
                for tap, module in zip(spec.taps, modules, strict=True)
            ],
            max_tokens=internals.step_budget(self),
            max_programs=spec.max_programs,
            dtype=internals.activation_dtype(self),
            device=self.device,
            place=(internals.place_of(self)[1], internals.ranks_per_stage()),
            direct=internals.called_directly(model),
            switched=not internals.is_traced(self),
            # Without room for edits there is none of their arithmetic in the graph either.
            hook=type(self).tap_hook if spec.max_programs else capture_hook,
        )

    def shutdown(self) -> None:
        """Let go of the modules and rows that taps hold: vLLM frees the model, and keeps the worker."""
        super().shutdown()
        self.harness_release()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Learn the driver's keys of new requests and clear the blocks they get, then run the step."""
        if self._taps is not None:
            self.learn_request_keys(scheduler_output)
            self.clear_blocks(scheduler_output)
        return super().execute_model(scheduler_output)

"""Who owns which rows of a step: the model runners, V1 and V2."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from harness.vllm.accumulator import StepRows
from harness.vllm.internals.moved import moved
from harness.vllm.internals.worker import runner_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "filling_blocks",
    "finished_requests",
    "instrument_runner",
    "request_extra_args",
    "segment_by_request",
]


def _shares(requests: Sequence[str], counts: Sequence[int], starts: Sequence[int]) -> list[StepRows]:
    shares, row = [], 0
    for request, count, start in zip(requests, counts, starts, strict=True):
        shares.append(StepRows(request, int(start), int(count), row))
        row += int(count)
    return shares


def segment_by_request(runner: Any, scheduler_output: Any) -> list[StepRows]:
    """Who owns which rows of the step a V1 runner is about to run.

    Relies on ``input_batch.{num_reqs, req_ids, num_computed_tokens_cpu}``, final once ``_model_forward`` is reached,
    and on ``scheduler_output.num_scheduled_tokens``.
    """
    try:
        batch = runner.input_batch
        n = batch.num_reqs
        requests = list(batch.req_ids[:n])
        counts = [scheduler_output.num_scheduled_tokens[r] for r in requests]
        starts = batch.num_computed_tokens_cpu[:n].tolist()
    except AttributeError as error:
        raise moved(f"GPUModelRunner.input_batch as expected ({error})") from error
    return _shares(requests, counts, starts)


class _V1Steps:
    """Mixed into a V1 runner instance: tells the observer what the step holds, around the forward.

    ``_model_forward`` is vLLM's documented override point, reached with the request order final and outside the
    CUDA-graph wrapper, so it runs on graph replay too.
    """

    harness_observer: Any = None
    _harness_scheduled: Any = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._harness_scheduled = scheduler_output
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Callable[..., Any] = super()._model_forward  # type: ignore[misc]
        if self.harness_observer is None or not self.harness_observer.harness_watching():
            return forward(*args, **kwargs)
        with self.harness_observer.harness_step(segment_by_request(self, self._harness_scheduled)):
            return forward(*args, **kwargs)


class _V2Steps:
    """Mixed into a V2 runner instance (default on CUDA). Read in its source, never run by this project yet."""

    harness_observer: Any = None
    _harness_stack: contextlib.ExitStack | None = None

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        observer = self.harness_observer
        if observer is not None and observer.harness_watching() and self._harness_stack is not None:
            counts, starts = batch.num_scheduled_tokens.tolist(), batch.num_computed_tokens_np.tolist()
            shares = _shares(list(batch.req_ids), counts, starts)
            self._harness_stack.enter_context(observer.harness_step(shares))
        return batch

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            self._harness_stack = stack
            stack.callback(setattr, self, "_harness_stack", None)
            return super().execute_model(*args, **kwargs)  # type: ignore[misc]


def instrument_runner(worker: Any, observer: Any) -> None:
    """Re-class this worker's runner instance so that a watching observer's ``harness_step`` surrounds each forward.

    Only the instance changes: another engine's runner in this process keeps its class.
    """
    runner = worker.model_runner
    mixin, needed = (
        (_V2Steps, "prepare_inputs") if runner_name(worker) == "V2" else (_V1Steps, "_model_forward")
    )
    if not hasattr(runner, needed):
        raise moved(f"{type(runner).__name__}.{needed}")
    runner.__class__ = type(f"Observed{type(runner).__name__}", (mixin, type(runner)), {})
    runner.harness_observer = observer


def request_extra_args(scheduler_output: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Requests that start in this step, with the ``extra_args`` their sampling parameters carry."""
    for request in scheduler_output.scheduled_new_reqs:
        extra = getattr(request.sampling_params, "extra_args", None) if request.sampling_params else None
        yield request.req_id, extra or {}


def filling_blocks(scheduler_output: Any) -> list[int]:
    """Blocks of the KV cache that a request gets with this step and does not fill in it: the last of each new run.

    Relies on ``scheduled_new_reqs[].block_ids`` and ``scheduled_cached_reqs.new_block_ids``, lists per cache group;
    blocks are handed out as tokens are scheduled, so those before the last are full once the step has run.
    """
    started = [request.block_ids for request in scheduler_output.scheduled_new_reqs]
    gone_on = scheduler_output.scheduled_cached_reqs.new_block_ids
    return [group[-1] for groups in (*started, *gone_on) for group in groups or () if group]


def finished_requests(scheduler_output: Any) -> Sequence[str]:
    """Ids of requests that ended since the last step (``finished_req_ids``)."""
    return list(scheduler_output.finished_req_ids)

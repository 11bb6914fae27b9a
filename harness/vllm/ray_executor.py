"""vLLM's Ray executor on a platform that declares no device for Ray to count: the CPU.

Ray places workers by devices, and vLLM refuses a platform that names none. Here each rank holds one *logical* device of
a Ray that is started for this engine alone; the ranks are Ray's own worker processes, and specs, commands and captures
go the way they go on a cluster. Only for engines that boot with ``distributed_executor_backend="ray"`` on CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from harness.errors import UsageError

__all__ = ["CPURayExecutor", "declare_devices"]

if TYPE_CHECKING:
    _Base = Any
else:
    _Base = RayExecutorV2


def declare_devices() -> None:
    """Let this process' platform count logical devices by Ray's own key; runs in the driver and in each Ray worker."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    platform.ray_device_key = "GPU"
    platform.device_control_id_to_physical_device_id = classmethod(lambda _, device: int(device))


class CPURayExecutor(_Base):
    """The platform-independent executor, and the Ray it runs on: started with it and stopped with it."""

    def _init_executor(self) -> None:
        import ray

        declare_devices()
        if ray.is_initialized():
            msg = "this process is connected to a Ray already, whose workers know no logical devices: leave it first"
            raise UsageError(msg)
        given = self.parallel_config.ray_runtime_env
        ray.init(
            address="local",
            num_gpus=self.parallel_config.world_size,
            include_dashboard=False,
            runtime_env={
                **(dict(given) if given else {}),
                "worker_process_setup_hook": f"{__name__}.{declare_devices.__name__}",
            },
        )
        try:
            super()._init_executor()
        except BaseException:
            ray.shutdown()  # or the next boot would find a Ray that is nobody's
            raise

    def shutdown(self) -> None:
        """Stop the ranks, then Ray's own processes."""
        import ray

        super().shutdown()
        if ray.is_initialized():
            ray.shutdown()

"""What the `vllm` command runs, for tests beside others on two cores: processes are forks, and do not spin.

On the CPU vLLM insists on spawning, and each process imports everything again: 9 s of a core. Who reads calls
or answers spins for a second after each, so that a server with two ranks takes all of two cores.
"""

import importlib
import multiprocessing
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

_SPIN_S = 0.002
_FORKING = ("v1.engine.utils", "v1.executor.multiproc_executor")
# What each process would import by itself.
_IMPORTED = ("entrypoints.cli.serve", "renderers.hf", "v1.worker.cpu_model_runner", "v1.worker.cpu_worker")


def _wait_soon() -> None:
    """Let readers wait for what they are sent, as they do anyway after a second without."""
    condition: Any = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None:
        return
    begin = condition.__init__

    def begin_impatient(self: Any, is_reader: bool, *args: Any, **kwargs: Any) -> None:
        begin(self, is_reader, *args, **kwargs)
        if is_reader:
            self.busy_loop_s = _SPIN_S

    condition.__init__ = begin_impatient


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    for _name in (*_FORKING, *_IMPORTED):
        _module = importlib.import_module(f"vllm.{_name}")
        if _name in _FORKING:
            _module.get_mp_context = lambda: multiprocessing.get_context("fork")
    _wait_soon()
    main()

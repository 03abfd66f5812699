"""The worker extension of a server that several transfer backends update in turn."""

from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from vllm_plugin import DeltaWorkerExtension


class SwitchingWorkerExtension(DeltaWorkerExtension):
    """Changes the worker's transfer engine, of which vLLM creates one, when it loads the model."""

    def use_transfer(self, backend: str) -> None:
        """Have all further calls go to the engine of this backend. Each is created once, and kept."""
        worker: Any = self
        engines = vars(self).setdefault("transfer_engines", {"delta": worker.weight_transfer_engine})
        if backend not in engines:
            engines[backend] = WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(backend=backend), worker.vllm_config, worker.device, worker.get_model()
            )
        worker.weight_transfer_engine = engines[backend]

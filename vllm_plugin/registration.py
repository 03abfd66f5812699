"""Make the `delta` backend known to vLLM, and prepare the workers in which its engines are made."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from vllm_plugin.cpu_layout import keep_load_layout
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.post_load import watch_loading
from vllm_plugin.rank_engine import remember
from vllm_plugin.serving import leave_order_to_engine, watch

BACKEND = "delta"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "delta"}'` known. Calling it again changes nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, DeltaWeightTransferEngine)


def adopt(worker: object) -> None:
    """Prepare a worker that is about to be constructed, and remember it for its engine."""
    remember(worker)
    keep_load_layout()
    watch_loading()
    watch(
        worker,
        asleep=lambda level: _tell(worker, lambda engine: engine.sleeping(level)),
        awake=lambda: _tell(worker, lambda engine: engine.sleeping(None)),
        reloaded=lambda: _tell(worker, lambda engine: engine.reloaded()),
    )
    leave_order_to_engine(worker)


def _tell(worker: Any, news: Callable[[DeltaWeightTransferEngine], None]) -> None:
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, DeltaWeightTransferEngine):
        news(engine)

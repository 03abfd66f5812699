"""What `--worker-extension-cls` mixes into vLLM's worker: methods for `/collective_rpc`.

All are prefixed `delta_`, since vLLM refuses an extension that hides an attribute of its worker.
Each rank answers for itself.
"""

from dataclasses import asdict
from typing import Any, Self

import vllm

from vllm_plugin.engine import DeltaWeightTransferEngine, adopt


class DeltaWorkerExtension:
    """Mixed into the worker's bases before it is constructed."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        worker = super().__new__(cls)
        adopt(worker)
        return worker

    def delta_status(self) -> dict[str, Any]:
        """Return what this rank serves, as JSON values; needs no open store.

        Keys: `rank`, `vllm`, `initialised`, `store`, `run_id`, `held` (version or None), `state_digest`
        (of the held version), `staged` (version or None), `update_open`, `switch` (see `delta_switch`),
        `torn`, `last_error` (None, or `rank`, `kind`, `message`), `timings` (seconds, of the last update).
        """
        engine = self._delta_engine()
        updater = engine.updater
        held = staged = None
        if updater is not None:
            held, staged = updater.held, updater.staged
        return {
            "rank": engine.rank,
            "vllm": vllm.__version__,
            "initialised": engine.is_open,
            "store": None if updater is None else updater.store.url,
            "run_id": None if updater is None else updater.run_id,
            "held": None if held is None else held.version,
            "state_digest": None if held is None else held.state.total,
            "staged": None if staged is None else staged.version,
            "update_open": engine.update_open,
            "switch": engine.switch,
            "torn": updater is not None and updater.torn,
            "last_error": None if engine.last_error is None else asdict(engine.last_error),
            "timings": {} if updater is None else updater.timings,
        }

    def delta_prefetch(self, version: int) -> bool:
        """Begin to fetch and prove a version while generation goes on; call again until it is True.

        `update_weights` with that version is quick then. It also says what went wrong, if anything did:
        this never raises, since an exception in one rank would confuse vLLM's replies.
        """
        return self._delta_engine().prefetch(version)

    def delta_switch(self, switch: str | None) -> None:
        """Keep a driver's mark that it is switching versions, or None when it is done.

        A driver that is killed while it has generation paused cannot tell its successor; the server can.
        """
        self._delta_engine().switch = switch

    def delta_fingerprint(self) -> dict[str, str]:
        """Digest the bits of each live parameter and buffer of this rank. Reads all of them."""
        return self._delta_engine().live.fingerprint()

    def _delta_engine(self) -> DeltaWeightTransferEngine:
        engine = getattr(self, "weight_transfer_engine", None)
        if not isinstance(engine, DeltaWeightTransferEngine):
            raise TypeError(
                f"the weight transfer engine is {type(engine).__name__}; start vllm with "
                '--weight-transfer-config \'{"backend": "delta"}\''
            )
        return engine

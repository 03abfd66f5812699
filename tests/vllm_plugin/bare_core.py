"""An engine core with a scheduler and without a model: vLLM's own methods, and workers that take notes."""

import json
import warnings
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    # torch warns of itself when vLLM imports it.
    warnings.simplefilter("ignore")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

from vllm_plugin import plugin
from vllm_plugin.admission import REFUSED, VERSION_KEY

BLOCK = 4

# Before the class, which inherits what it wraps.
plugin.load()


class Core(EngineCore):
    """Takes requests, and calls of updates."""

    def __init__(self, **scheduler: Any) -> None:
        self.calls: list[tuple[Any, Any]] = []
        """The methods that workers were called with, and their keyword arguments."""
        self.failing: set[str] = set()
        """Methods that raise in the workers."""
        self.num_dropped = 0
        """Updates that the workers were told to close."""
        self.serving: int | None = None
        """What the workers say that they serve."""
        self.found: list[list[bytes]] = []
        """The hashes of each request whose prefix was looked for."""
        self.resets: list[str] = []
        """The caches that were emptied, and `write`, in order."""
        self.scheduler = object.__new__(Scheduler)
        self.scheduler.kv_cache_manager = SimpleNamespace(get_computed_blocks=self._look_up)
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        self.scheduler.reset_prefix_cache = self._reset_prefixes
        self.scheduler.requests = {}
        self.scheduler.finish_requests = self._finish
        self.step_fn = lambda: ({}, False)
        for name in ("connector", "ec_connector", "aux_output_connector"):
            setattr(self.scheduler, name, scheduler.get(name))
        self.model_executor = SimpleNamespace(
            collective_rpc=self._broadcast, is_sleeping=False, wake_up=lambda tags: None
        )
        self.vllm_config = SimpleNamespace(
            weight_transfer_config=SimpleNamespace(backend="delta"),
            load_config=SimpleNamespace(load_format="auto"),
            model_config=SimpleNamespace(is_multimodal_model=False, is_encoder_decoder=False),
        )
        self._weight_version = "default"
        init_none_hash(sha256)
        self.request_block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.pausing: Future[None] | None = None
        """What a pause answers that has to wait."""

    def _finish(self, names: list[str], _status: Any) -> None:
        for name in names:
            self.scheduler.requests.pop(name, None)

    def _look_up(self, request: Request) -> None:
        self.found.append(list(request.block_hashes))

    def _reset_prefixes(self, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        self.resets.append("prefixes")
        return True

    def reset_encoder_cache(self) -> None:
        self.resets.append("encoder")

    def _broadcast(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        if method == "delta_status":
            return [{"serving": self.serving}]
        if method == "delta_drop":
            self.num_dropped += 1
            return [None]
        self.calls.append((method, kwargs))
        if method == "delta_prefetch":
            return [{"is_done": True}]
        if method in self.failing:
            raise RuntimeError("a worker failed")
        if method == "finish_weight_update":
            self.resets.append("write")
        return [None]

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> "Future[None] | None":
        assert not clear_cache
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        return self.pausing

    def request(self, num_tokens: int = 10, salt: str | None = None) -> Request:
        """Receive one, as a core does on its input thread."""
        return Request(
            request_id="r",
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(max_tokens=5),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self.request_block_hasher,
        )

    def asking(self, wanted: str, name: str = "r", num_computed: int = 0) -> Request:
        """Receive one that accepts versions, of which so many tokens were computed."""
        request = self.request()
        request.request_id, request.num_computed_tokens = name, num_computed
        request.sampling_params.extra_args = {VERSION_KEY: wanted}
        self.scheduler.requests[name] = request
        self.scheduler.add_request = lambda _: None
        self.add_request(request)
        return request

    def told(self) -> dict[str, str]:
        """Why requests were ended, as the client in the same process hears it: one more step."""
        outputs, _ = self.step_fn()
        found = [each for part in outputs.values() for each in part.outputs]
        return {each.request_id: json.loads(each.stop_reason.removeprefix(REFUSED)) for each in found}

    def look_up(self, request: Request) -> list[bytes]:
        """The hashes with which the scheduler looks for a prefix, when the request is scheduled."""
        self.scheduler.kv_cache_manager.get_computed_blocks(request)
        return self.found[-1]

    def end_step(self) -> EngineCoreOutputs:
        """What vLLM reports when a step of the batch queue has ended."""
        outputs = EngineCoreOutputs()
        self._attach_weight_version({0: outputs})
        return outputs

    def update(self, **info: Any) -> None:
        """What the routes of an update call."""
        self.collective_rpc("start_weight_update")
        self.collective_rpc("update_weights", kwargs={"update_info": {"version": 1} | info})
        self.collective_rpc("finish_weight_update")

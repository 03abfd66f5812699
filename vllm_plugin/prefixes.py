"""Let running requests keep their keys and values in an update, and later ones reuse only newer ones.

vLLM finds the keys and values of a prefix by the hashes of its blocks. The first block's hash includes a salt
that a request may bring. Here each application of a version gives another salt to the requests after it. So
they find no block that older weights computed, and nothing is reset or computed again. Design note 0017.

The salt of a request is fixed when vLLM looks for its prefix, because it has no blocks then. So a request
that waits during an update, or is preempted, gets the new salt. A running one keeps the old salt, also for
the blocks that it fills after the update. No later request looks for these.

vLLM's scheduler is in its engine core, and not in its workers. So a wrapper around
`EngineCore.collective_rpc` answers the calls about prefixes there.
"""

import functools
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from patchstore.errors import UsageError

UPDATE_KEY = "new_prefixes"
"""Key of `update_info`; with True, requests get another salt when the version is applied."""

NOT_LOADED = (
    "vLLM's engine core did not load patchstore's plugin, which tells keys and values apart by the weights "
    "that computed them: install patchstore into vLLM's environment (pip install patchstore), and if "
    "VLLM_PLUGINS is set, add patchstore to it; or choose --prefix-cache reset"
)

_SALTS = "_patchstore_salts"
_WRAPPED = "_patchstore_answers_prefixes"


class Salts:
    """The salt of requests that are hashed now, in one engine core."""

    def __init__(self) -> None:
        self.current: str | None = None
        """None before the first application: requests stay as they are."""
        self.is_due = False
        """Whether the update under way asks for another salt."""

    def renew(self) -> None:
        """Give another salt to all requests whose prefix is looked for from here on."""
        # Not the version's number: a server may come back to a version, with blocks that others computed.
        self.current = uuid.uuid4().hex

    def mark(self, request: Any) -> bool:
        """Give a request the present salt, beside the one that it brought; False if it has it already."""
        # Read once: another thread may renew it.
        current = self.current
        given, own = request.__dict__.get(_SALTS, (None, request.cache_salt))
        setattr(request, _SALTS, (current, own))
        if given == current:
            return False
        request.cache_salt = f"{current}/{own}" if own else current
        return True


def tell_apart() -> None:
    """Have vLLM's engine cores answer the calls about prefixes. Calling it again changes nothing.

    Only cores of servers with the backend `delta` answer them. Nothing else changes before the first call.
    """
    from vllm.v1.engine.core import EngineCore

    call = EngineCore.collective_rpc
    if hasattr(call, _WRAPPED):
        return

    @functools.wraps(call)
    def collective_rpc(
        core: Any,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        config = core.vllm_config.weight_transfer_config
        if config is not None and config.backend == "delta":
            if method == "delta_prefixes":
                return _answered(core, *args, **(kwargs or {}))
            if method == "delta_pause":
                return _paused(core, *args, **(kwargs or {}))
            kwargs = _noted(core, method, kwargs)
        return call(core, method, timeout, args, kwargs)

    setattr(collective_rpc, _WRAPPED, True)
    EngineCore.collective_rpc = collective_rpc


def _answered(core: Any, is_new: bool = False) -> list[dict[str, Any]]:
    """Answer whether this core can tell keys and values apart; with `is_new`, renew the salt too."""
    if (reason := uncovered(core)) is not None:
        return [{"error": reason}]
    salts = _salts(core)
    if is_new:
        salts.renew()
    return [{"salt": salts.current}]


def _paused(core: Any, clear_cache: bool = False) -> "list[dict[str, Any]] | Future[Any]":
    """Pause as `/pause?mode=keep` does, without the 20 ms that vLLM's front waits there."""
    if clear_cache and core.vllm_config.model_config.is_multimodal_model:
        return [
            {"error": "vLLM's front has a cache of images or sound, which only its own /pause clears too"}
        ]
    paused = core.pause_scheduler("keep", clear_cache)
    if paused is None:
        return [{}]
    answer: Future[Any] = Future()

    def end(done: "Future[Any]") -> None:
        error = done.exception()
        answer.set_result([{}]) if error is None else answer.set_exception(error)

    # vLLM answers a call that returns a future when that is done.
    paused.add_done_callback(end)
    return answer


def _noted(core: Any, method: object, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Note what a call of an update means for prefixes, and return its arguments for the workers.

    The core does nothing else during the call. So no request is scheduled between the new salt and the write.

    Raises:
        UsageError: it asks for another salt, which this core cannot give, or in a wrong form.
    """
    if method == "update_weights" and kwargs is not None:
        info = kwargs.get("update_info")
        if isinstance(info, Mapping) and UPDATE_KEY in info:
            is_new = info[UPDATE_KEY]
            if not isinstance(is_new, bool):
                raise UsageError(f"[{UsageError.kind}] {UPDATE_KEY} is true or false, not {is_new!r:.80}")
            if is_new and (reason := uncovered(core)) is not None:
                raise UsageError(f"[{UsageError.kind}] {reason}")
            if is_new or hasattr(core, _SALTS):
                _salts(core).is_due = is_new
            rest = {key: value for key, value in info.items() if key != UPDATE_KEY}
            return kwargs | {"update_info": rest}
    elif method == "start_weight_update" and hasattr(core, _SALTS):
        _salts(core).is_due = False
    elif method == "finish_weight_update" and hasattr(core, _SALTS):
        salts = _salts(core)
        if salts.is_due:
            # Also before a write that fails: what is computed until it is undone must not be found either.
            salts.is_due = False
            salts.renew()
    return kwargs


def uncovered(core: Any) -> str | None:
    """Say why keys and values of this core cannot be told apart by their weights; None if they can."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

    scheduler = core.scheduler
    manager = getattr(scheduler, "kv_cache_manager", None)
    instead = "choose --prefix-cache reset"
    is_known = isinstance(scheduler, Scheduler) and callable(getattr(manager, "get_computed_blocks", None))
    if not is_known or not hasattr(Request, "update_block_hashes"):
        return f"this vLLM's scheduler is not one whose prefix cache patchstore knows; {instead}"
    connectors = ("connector", "ec_connector", "aux_output_connector")
    if any(getattr(scheduler, name, None) is not None for name in connectors):
        return (
            "vLLM was started with a connector (such as --kv-transfer-config), which keeps keys and values "
            f"elsewhere; start vLLM without it, or {instead}"
        )
    if core.vllm_config.model_config.is_multimodal_model:
        return (
            "the model takes images or sound, and vLLM keeps what their encoder computed beside the prefix "
            f"cache; {instead}"
        )
    return None


def _salts(core: Any) -> Salts:
    """The salts of a core. From the first call on, its requests are hashed with them."""
    salts: Salts | None = getattr(core, _SALTS, None)
    if salts is not None:
        return salts
    made = Salts()
    manager, hash_blocks = core.scheduler.kv_cache_manager, core.request_block_hasher
    look_up = manager.get_computed_blocks

    def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
        # A request that has blocks keeps the salt that they have.
        if request.num_computed_tokens == 0 and made.mark(request):
            request.block_hashes.clear()
            request.update_block_hashes()
        return look_up(request, *args, **kwargs)

    def hash_new(request: Any) -> Any:
        # When the request is received, on another thread: to hash a long prompt again delays the scheduler.
        # Not later, when it may have a block that is not full yet.
        if _SALTS not in request.__dict__:
            made.mark(request)
        return hash_blocks(request)

    manager.get_computed_blocks = get_computed_blocks
    if hash_blocks is not None:
        core.request_block_hasher = hash_new
    setattr(core, _SALTS, made)
    return made

"""All caches of what a model's weights computed, and what an update does to them.

vLLM keeps results of the weights so that it need not compute them again: keys and values of prefixes, those
that a connector stores elsewhere, what an encoder made of images and sound. After an update they are results
of older weights. This module is the one list of such caches. An update either empties all of them, or gives
later requests another salt, so that these find no key or value that older weights computed.

vLLM's cache of processed images and sound is not one of them: it keeps pixels and samples, which depend on
the request alone. But requests that start over need these again, so workers get them with every request.

Salts: vLLM finds the keys and values of a prefix by the hashes of its blocks. The first block's hash includes
a salt that a request may bring. With `PrefixCache.VERSION` each application of a version gives another salt
to the requests after it, and nothing is computed again. Design note 0017.

The salt of a request is fixed when vLLM looks for its prefix, because it has no blocks then. So a request
that waits during an update, or is preempted, gets the new salt. A running one keeps the old salt, also for
the blocks that it fills after the update. No later request looks for these.
"""

import uuid
from collections.abc import Iterator
from typing import Any

from patchstore.follow.settings import PrefixCache

_SALTS = "_patchstore_salts"
_KV_CONNECTOR = "--kv-transfer-config"
_CONNECTORS = {"connector": _KV_CONNECTOR, "ec_connector": "--ec-transfer-config"}
"""Attribute of vLLM's scheduler -> the option that a connector comes from."""


class Salts:
    """The salt of requests that are hashed now, in one engine core."""

    def __init__(self) -> None:
        self.current: str | None = None
        """None before the first application: requests stay as they are."""

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


class Caches:
    """The caches of one engine core."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self.salts: Salts | None = None
        """None before the first update with `PrefixCache.VERSION`: vLLM is as it was."""
        if self._has_encoder and not getattr(core.scheduler, "use_v2_model_runner", False):
            _send_all_encoder_inputs()

    @property
    def _has_encoder(self) -> bool:
        config = self._core.vllm_config.model_config
        return bool(config.is_multimodal_model or getattr(config, "is_encoder_decoder", False))

    def uncovered(self, mode: PrefixCache) -> str | None:
        """Say which cache would answer for older weights after an update, and what helps; None if none."""
        match mode:
            case PrefixCache.KEEP:
                return None
            case PrefixCache.VERSION:
                return self._unsalted()
            case PrefixCache.RESET:
                return self._unresettable()

    def before_write(self, mode: PrefixCache) -> None:
        """Do what must be done before weights are written, while this core schedules nothing."""
        if mode is PrefixCache.VERSION:
            # Also before a write that fails: what is computed until it is undone must not be found either.
            self._salted().renew()
        elif mode is PrefixCache.RESET and any(self._connectors()):
            # It may refuse. After the write that would be too late.
            self._reset_keys_and_values()

    def reset(self) -> None:
        """Empty all caches. Running requests are preempted, and compute theirs again."""
        # After the write, since a step that was under way may have stored what older weights computed.
        self._reset_keys_and_values()
        if self._has_encoder:
            self._core.reset_encoder_cache()

    def _reset_keys_and_values(self) -> None:
        # Without preempting them vLLM refuses, and later requests would reuse what older weights computed.
        if not self._core.scheduler.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache: blocks are in use")
        for option, connector in self._connectors():
            # vLLM itself takes None, the answer of a connector that did nothing, for success.
            if (answer := connector.reset_cache()) is not True:
                raise RuntimeError(
                    f"{type(connector).__name__} ({option}) did not empty its cache: it answered {answer!r}"
                )

    def _connectors(self) -> Iterator[tuple[str, Any]]:
        """Yield each connector that is no list of others, and the option that it comes from."""
        for name, option in _CONNECTORS.items():
            ahead = [getattr(self._core.scheduler, name, None)]
            while ahead:
                connector = ahead.pop()
                if children := getattr(connector, "_connectors", None):
                    ahead += children
                elif connector is not None:
                    yield option, connector

    def _unresettable(self) -> str | None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        for option, connector in self._connectors():
            # vLLM's own method does nothing.
            if getattr(type(connector), "reset_cache", None) in {None, KVConnectorBase_V1.reset_cache}:
                return (
                    f"{type(connector).__name__} keeps what weights computed outside of vLLM, and has no "
                    "reset_cache to forget it, so requests would be answered for older weights after an "
                    f"update: start vLLM without {option}, or with a connector that has one, such as "
                    "OffloadingConnector"
                )
        return None

    def _unsalted(self) -> str | None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.request import Request

        scheduler = self._core.scheduler
        manager = getattr(scheduler, "kv_cache_manager", None)
        is_known = isinstance(scheduler, Scheduler) and callable(
            getattr(manager, "get_computed_blocks", None)
        )
        instead = self._unresettable() or "choose --prefix-cache reset"
        if not is_known or not hasattr(Request, "update_block_hashes"):
            return f"this vLLM's scheduler is not one whose prefix cache patchstore knows; {instead}"
        held = (*_CONNECTORS, "aux_output_connector")
        if any(getattr(scheduler, name, None) is not None for name in held):
            return (
                "vLLM was started with a connector, which finds what it keeps by tokens and not by salts; "
                f"{instead}"
            )
        if self._core.vllm_config.model_config.is_multimodal_model:
            return (
                "the model takes images or sound, and vLLM keeps what their encoder computed beside the "
                f"prefix cache; {instead}"
            )
        return None

    def _salted(self) -> Salts:
        """The salts of this core. From the first call on, its requests are hashed with them."""
        if self.salts is not None:
            return self.salts
        made = self.salts = Salts()
        manager, hash_blocks = self._core.scheduler.kv_cache_manager, self._core.request_block_hasher
        look_up = manager.get_computed_blocks

        def get_computed_blocks(request: Any, *args: Any, **kwargs: Any) -> Any:
            # A request that has blocks keeps the salt that they have.
            if request.num_computed_tokens == 0 and made.mark(request):
                request.block_hashes.clear()
                request.update_block_hashes()
            return look_up(request, *args, **kwargs)

        def hash_new(request: Any) -> Any:
            # When the request is received, on another thread: to hash a long prompt again delays the
            # scheduler. Not later, when it may have a block that is not full yet.
            if _SALTS not in request.__dict__:
                made.mark(request)
            return hash_blocks(request)

        manager.get_computed_blocks = get_computed_blocks
        if hash_blocks is not None:
            self._core.request_block_hasher = hash_new
        return made


def _send_all_encoder_inputs() -> None:
    """Have vLLM send workers the images and sound of each request, also those that a cached prefix covers.

    vLLM leaves these out, since no encoder runs for them. After a reset the request starts over without its
    prefix, and vLLM's first model runner, which is not sent a request twice, dies of an encoder cache miss.
    """
    from vllm.v1.core.sched import output

    # 0.26 leaves nothing out.
    if hasattr(output, "strip_covered_mm_data"):
        output.strip_covered_mm_data = lambda features, *_args, **_kwargs: features

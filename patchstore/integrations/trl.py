"""TRL's trainers over a store: they publish what changed, and vLLM servers apply it. No NCCL, no gather.

TRL has no argument for another weight sync in `GRPOTrainer` and its siblings. So one method of its class
`VLLMGeneration` asks here first whether a generation belongs to a `ServerSync`. Others are left alone.
"""

import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, wraps
from typing import Any

import torch
from trl.generation import vllm_generation

from patchstore.bucket.records import Manifest
from patchstore.errors import ServerUnavailable, StoreUnavailable, UsageError, WaitTimeout
from patchstore.follow.adapter_server import AdapterServer
from patchstore.follow.http_client import checked_headers
from patchstore.follow.reconcile import Reconciler
from patchstore.follow.settings import Settings
from patchstore.follow.vllm_protocol import NoSuchRoute
from patchstore.follow.vllm_server import VllmServer
from patchstore.follow.wait import wait_until
from patchstore.integrations.transformers import PublishCallback
from patchstore.publish.options import seconds
from patchstore.publish.publisher import Publication
from patchstore.stores.base import Store

_MAY_PASS = (ServerUnavailable, StoreUnavailable)
"""Failures after which it is tried again until the time is over."""
_NUM_TRIES = 3
"""Of what fails otherwise: a step may repair what the one before found, such as expired credentials."""


def _checked_via(via: object) -> str:
    """Return who has servers serve a version."""
    if isinstance(via, str) and (via in {"apply", "follow"} or via.startswith(("http://", "https://"))):
        return via
    raise UsageError(
        'via must be "apply" (this process applies versions), "follow" (a `patchstore follow` does, and the '
        f"server is asked), or the URL at which a `patchstore follow` listens, not {via!r:.100}"
    )


class _Served(PublishCallback):
    """What both kinds of trainers have in common: a server that serves versions."""

    _VIA: str
    """If the caller does not say it."""

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        via: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        headers: Mapping[str, str] | None = None,
        serve_as: str = "policy",
        **options: Any,
    ) -> None:
        """Prepare; nothing is opened until the trainer is made.

        Args:
            store: an open store, or the URL or path of one; servers must find it under the same URL.
            via: "apply": this process applies each version to TRL's server. "follow": a `patchstore follow`
                does, and TRL's server is asked for its version. The URL at which a `patchstore follow`
                listens: that is asked, and all its servers are waited for.
            storage_options: what TRL's server needs to open the store; for "apply".
            timeout_s: how long to wait for a version, from its commit on.
            headers: are sent with patchstore's requests to TRL's server or the `follow`, for a gateway in
                front of it; see `VllmServer`. TRL's own requests do not have them.
            serve_as: the name under which servers serve an adapter, which is published with
                `adapter="default"`. Each generation asks for its version by name, such as `policy@12`.
            options: those of `PublishCallback`, and further ones of `Publisher`.

        Raises:
            UsageError: an argument is impossible.
        """
        super().__init__(store, **options)
        self._serve_as = None if options.get("adapter") is None else serve_as
        self._via = _checked_via(self._VIA if via is None else via)
        self._timeout_s = seconds("timeout_s", timeout_s)
        self._storage_options, self._headers = storage_options, checked_headers(headers)
        self._server: VllmServer | AdapterServer | None = None
        self._reconciler: Reconciler | None = None
        self._desired: Manifest | None = None
        self._is_adapted = False
        """Whether the model has adapters of PEFT."""

    def _connect(self, url: str) -> None:
        """Take the server of the trainer, on the process that generates."""
        self._disconnect()
        if self._serve_as is not None:
            self._server = AdapterServer(
                url, self._serve_as, timeout_s=self._timeout_s, headers=self._headers
            )
            return
        self._server = VllmServer(url, timeout_s=self._timeout_s, headers=self._headers)
        if self._via in {"apply", "follow"}:
            try:
                self._server.check_backend()
            except ServerUnavailable as exc:
                if not self._is_adapted:
                    raise
                raise ServerUnavailable(
                    f"{exc}; or, to have a server with --enable-lora load the adapter of this model alone, "
                    f'give {type(self).__name__} adapter="default"'
                ) from exc

    def _disconnect(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = self._reconciler = None

    def _bring(self, publication: Publication) -> None:
        """Return once the server serves a publication."""
        assert self._server is not None
        began = time.monotonic()
        manifest = publication.result()
        if self._via == "apply":
            self._apply(self._server, manifest)
        else:
            is_asked = self._via == "follow"
            wait_until(
                manifest.version,
                servers=self._server.url if is_asked else (),
                follow=None if is_asked else self._via,
                run_id=manifest.run_id,
                timeout_s=self._timeout_s,
                headers=self._headers,
                adapter=self._serve_as if is_asked else None,
            )
        # The commit is waited for too.
        self._measured.add_wait(time.monotonic() - began)

    def _apply(self, server: VllmServer | AdapterServer, manifest: Manifest) -> None:
        assert self._store is not None
        began = time.monotonic()
        if self._reconciler is None or self._reconciler.store is not self._store:
            if isinstance(server, AdapterServer):
                server = self._server = AdapterServer(
                    *(server.url, server.adapter, self._store),
                    run_id=manifest.run_id,
                    timeout_s=self._timeout_s,
                    headers=self._headers,
                )
            self._reconciler = Reconciler(
                self._store,
                server,
                Settings(storage_options=self._storage_options or {}),
                desired=lambda: self._desired,
            )
        self._desired = manifest
        num_failed = 0
        while True:
            done = self._reconciler.step()
            if done.outcome != "failed" and done.version == manifest.version:
                return
            error = done.error if done.outcome == "failed" else None
            if error is not None and (isinstance(error, NoSuchRoute) or not isinstance(error, _MAY_PASS)):
                num_failed += 1
                if num_failed == _NUM_TRIES:
                    raise error
            if time.monotonic() - began > self._timeout_s:
                raise WaitTimeout(
                    f"{server.url} does not serve version {manifest.version} after {self._timeout_s:g} s; "
                    f"the last step: {done}"
                ) from error
            if error is not None:
                time.sleep(self._reconciler.interval_s)


class ServerSync(_Served):
    """Weight sync of `GRPOTrainer`, and TRL's other trainers with `vllm_mode="server"`, through a store.

    Pass it to the trainer, on every rank: `GRPOTrainer(..., callbacks=[ServerSync("s3://bucket/run")])`. TRL
    then opens no NCCL group. Before it generates with new weights, each rank publishes its part of what
    changed, and the process that generates waits until TRL's server serves that version. So training stays
    on-policy. When training ends, the last weights are published too, though nothing waits for the server.

    As `PublishCallback` otherwise: names, adapters of PEFT, ranks, figures in the log, resumption. By default
    this process applies each version (`via="apply"`).

    With `adapter="default"` a version is the adapter alone. `vllm serve --enable-lora` serves it beside its
    base, and each generation asks for its version by name.
    """

    _VIA = "apply"
    _state: Any = None
    _is_attached = False

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Wait for TRL to make its client, which follows this in the trainer's constructor."""
        if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "server":
            use_vllm, mode = getattr(args, "use_vllm", None), getattr(args, "vllm_mode", None)
            raise UsageError(
                'ServerSync is for trainers of TRL with use_vllm=True and vllm_mode="server"; this one has '
                f"use_vllm={use_vllm}, vllm_mode={mode!r}. PublishCallback publishes the weights of any "
                "trainer, and AsyncSync is for AsyncGRPOTrainer"
            )
        self._state, self._is_adapted = state, hasattr(model, "peft_config")
        _ask_first()
        _EXPECTED[model] = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run, and publish the weights with which training begins."""
        if not self._is_attached:
            raise UsageError(
                f"the trainer with {type(args).__name__} made no client of vLLM's server that is known here; "
                "pass ServerSync in callbacks= of the trainer's constructor, not to add_callback"
            )
        self._state = state
        super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave it to the next generation to publish."""

    def _attach(self, generation: Any, connect: Callable[[], None]) -> None:
        """Make the client of TRL's server, and replace its weight sync."""
        client = vllm_generation.VLLMClient
        sync = self

        class Client(client):  # type: ignore[misc, valid-type]
            """TRL's client, without a communicator."""

            def init_communicator(self, device: Any = 0) -> None:
                sync._connect(self.base_url)

        vllm_generation.VLLMClient = Client
        try:
            connect()
        finally:
            vllm_generation.VLLMClient = client
        generation.sync_weights = partial(self._sync, generation)
        self._is_attached = True

    def _sync(self, generation: Any) -> None:
        """Publish the weights as they are now, and have the server serve them."""
        is_training = self._publisher is not None
        if not is_training:
            # As in `trainer.evaluate()` before or after the training.
            self._open(generation.model, generation.processing_class)
        publication = self._publish(self._state.global_step)
        if generation.accelerator.is_main_process:
            self._bring(publication)
            if self._serve_as is not None:
                # A server that does not have exactly this version says so, and answers with no other one.
                generation.vllm_client.model = f"{self._serve_as}@{publication.result().version}"
        if not is_training:
            self._close()


_EXPECTED: "weakref.WeakKeyDictionary[torch.nn.Module, ServerSync]" = weakref.WeakKeyDictionary()
"""Models of trainers that are being made, whose generation is to be synced here."""


@cache
def _ask_first() -> None:
    """Have TRL's generations ask here whose they are, before they make a client; once in a process."""
    kind = vllm_generation.VLLMGeneration
    original = getattr(kind, "_init_vllm", None)
    if original is None or not hasattr(kind, "sync_weights") or not hasattr(vllm_generation, "VLLMClient"):
        raise UsageError(
            "this release of TRL makes its clients of vLLM in another way; 1.16 is known to work"
        )

    @wraps(original)
    def init_vllm(self: Any) -> None:
        sync = _EXPECTED.pop(self.model, None) if self.mode == "server" else None
        if sync is None:
            original(self)
        else:
            sync._attach(self, partial(original, self))

    kind._init_vllm = init_vllm


class AsyncSync(_Served):
    """Weight sync of TRL's `AsyncGRPOTrainer` through a store: a `WeightTransferProtocol`, and a callback.

    Pass the same object twice, on every rank:
    `AsyncGRPOTrainer(..., weight_transfer=sync, callbacks=[sync])`. Each rank publishes its part of what
    changed every `weight_sync_steps` steps, and training goes on: nothing is paused, gathered or merged into
    the trainer's weights. Before the first rollouts the trainer waits until the server serves its weights. By
    default a `patchstore follow` applies versions (`via="follow"`).
    """

    _VIA = "follow"
    _is_first = True
    _url = ""

    def __init__(self, store: Store | str | os.PathLike[str], *, wait: bool = False, **options: Any) -> None:
        """Prepare; nothing is opened until training begins.

        Args:
            store: as `ServerSync` takes it.
            wait: whether the trainer waits for every version until it is served, so that TRL's count of
                versions, by which it drops stale samples, never runs ahead of the server.
            options: as `ServerSync` takes them. With `via="apply"` the trainer waits for every version,
                because it applies it, and with `adapter=`, because requests name the version.

        Raises:
            UsageError: an argument is impossible.
        """
        super().__init__(store, **options)
        self._waits = wait or self._via == "apply" or self._serve_as is not None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Take the trainer's settings."""
        if not hasattr(args, "weight_sync_steps") or not hasattr(args, "vllm_server_base_url"):
            raise UsageError(
                f"AsyncSync is for AsyncGRPOTrainer of TRL, not for a trainer with {type(args).__name__}; "
                "ServerSync is for GRPOTrainer, and PublishCallback for any"
            )
        self.every, self._url = args.weight_sync_steps, args.vllm_server_base_url
        self._is_adapted = hasattr(model, "peft_config")
        _leave_weights()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run, and publish the weights with which training begins."""
        super().on_train_begin(args, state, control, **kwargs)
        self._is_first = True

    def init_weight_transfer(self) -> None:
        """Connect to the server."""
        if self._publisher is None:
            raise UsageError(
                "pass the AsyncSync of the trainer's weight_transfer= in its callbacks= too, on every rank"
            )
        self._connect(self._url)

    def pause(self) -> None:
        """Do nothing: the server pauses by itself, and only while it writes."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Wait until the server serves the newest publication, the first time or where that was asked for.

        Args:
            iterator: is passed through, because other ranks may gather in it. TRL's own weights are not used.

        Raises:
            UsageError: the rollouts of such a trainer ask for the base, and not for the adapter.
        """
        for _ in iterator:
            pass
        if self._serve_as is not None:
            raise UsageError(
                "of TRL's asynchronous trainers only AsyncGRPOTrainer has requests that name a version of an "
                "adapter: leave adapter= out to publish merged weights"
            )
        self._bring_newest()

    def _bring_newest(self) -> None:
        assert self._last is not None
        if self._is_first or self._waits:
            self._bring(self._last)

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Close the connection to the server. The run was closed when training ended."""
        self._disconnect()


@cache
def _leave_weights() -> None:
    """Have asynchronous trainers with an `AsyncSync` neither gather nor merge; once in a process."""
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer

    original = getattr(AsyncGRPOTrainer, "_sync_weight_merged", None)
    if original is None:
        raise UsageError(
            "this release of TRL syncs asynchronous trainers in another way; 1.16 is known to work"
        )

    @wraps(original)
    def sync_weight_merged(self: Any, t0: float) -> tuple[float, float, float]:
        sync = next((each for each in self.callback_handler.callbacks if isinstance(each, AsyncSync)), None)
        if sync is None:
            return original(self, t0)  # type: ignore[no-any-return]
        if sync._is_first:
            # A callback behind this one may have changed the weights when training began.
            sync._publish(self.state.global_step)
        if self.accelerator.is_main_process:
            sync._bring_newest()
            if sync._serve_as is None:
                self.model_version += 1
            else:
                # Requests name it.
                assert sync._last is not None
                self.model_version = sync._last.result().version
                _name_versions(self.rollout_worker, sync._serve_as)
            if self.rollout_worker:
                self.rollout_worker.update_model_version(self.model_version)
        sync._is_first = False
        return t0, t0, time.time()

    AsyncGRPOTrainer._sync_weight_merged = sync_weight_merged


def _name_versions(worker: Any, adapter: str) -> None:
    """Have TRL's worker ask for an adapter's versions by their names. Another worker does that itself."""
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

    if not isinstance(worker, AsyncRolloutWorker) or isinstance(worker._loop_cls, partial):
        return
    if not hasattr(worker._loop_cls, "_request_model"):
        raise UsageError(
            "this release of TRL names the model of a request in another way; 1.16 is known to work"
        )
    worker._loop_cls = partial(_rollouts, worker._loop_cls)
    worker._loop_kwargs["lora_name"] = adapter


def _rollouts(kind: Any, **options: Any) -> Any:
    """Make TRL's loop of rollouts. It runs in a process of its own, which imports this function."""

    class Rollouts(kind):  # type: ignore[misc]
        """Asks for the version that the trainer said last, such as `policy@12`."""

        @property
        def _request_model(self) -> str:
            return f"{self.lora_name}@{self.model_version}"

    return Rollouts(**options)

"""The trainer's side of the backend `delta`: an engine of vLLM's `WeightTransferTrainerFactory`.

Importing this module registers the engine, and needs vLLM 0.28 or newer. A trainer that does not use the
factory needs none of it, nor vLLM: `patchstore.Publisher` does the same.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from patchstore import Publication, Publisher, open_store
from patchstore.errors import UsageError
from patchstore.support.arguments import whole_number

BACKEND = "delta"


@dataclass
class DeltaTrainerInitInfo(TrainerInitInfo):
    """What the engine needs on each trainer rank; the same on all of them, but for `rank`."""

    backend: ClassVar[str] = BACKEND

    store: str
    """URL of the store, which the trainer and all servers reach. A path must be the same on all hosts."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """How the trainer and the servers open it: see `patchstore.open_store`. They are sent to the servers."""
    publisher: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `patchstore.Publisher`, such as `files`, `resume`, `dtype` and `anchor_every`."""


class DeltaTrainerWeightTransferEngine(TrainerWeightTransferEngine[DeltaTrainerInitInfo]):
    """Publishes versions from every trainer rank, and has servers apply them.

    Each rank publishes what the source has there. `last` is the newest publication. With a client, rank 0
    then brings the servers to that version; without one, `patchstore follow` does, and the trainer does not
    wait for it.
    """

    init_info_cls = DeltaTrainerInitInfo

    def __init__(
        self, publisher: Publisher, closing: ExitStack, told: Mapping[str, Any], **given: Any
    ) -> None:
        """Take over an open publisher, what closes it, and how servers open the store."""
        super().__init__(**given)
        self.last: Publication | None = None
        self._publisher, self._closing, self._told = publisher, closing, told
        self._next_step = 0
        self._is_opened = False

    @classmethod
    def trainer_init(cls, init_info: DeltaTrainerInitInfo, *, client: Any = None, source: Any = None) -> Self:
        """Create a run in the store, or continue one (`publisher={"resume": "auto"}`), on every rank.

        Args:
            client: None; a `VLLMWeightSyncClient` of vLLM; or `patchstore.follow.vllm_server.VllmServer`,
                which downloads before it pauses, and resets the prefix cache. Servers are first called by
                `send_weights`.
            source: a `WeightSource`, or anything else that `Publisher` takes.

        Raises:
            UsageError: an argument is impossible.
            PatchstoreError: see `Publisher`.
        """
        if source is None:
            raise UsageError(
                "the backend delta needs source=, such as ModuleSource(model): it compares the weights itself"
            )
        if client is not None and not _has_methods(client):
            raise UsageError(
                "client must have the methods of vLLM's VLLMWeightSyncClient, be a VllmServer, or be None, "
                f"not {client!r}"
            )
        rank = whole_number("rank", init_info.rank, least=0)
        arguments = dict(init_info.publisher)
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            if rank != distributed.get_rank():
                raise UsageError(
                    f"rank is {rank}, but torch.distributed.get_rank() is {distributed.get_rank()}: ranks of "
                    "a WeightSource are those of the default process group"
                )
            if distributed.get_world_size() > 1:
                arguments.setdefault("group", distributed.group.WORLD)
        elif rank:
            raise UsageError(f"rank is {rank}, which needs torch.distributed.init_process_group first")
        options = dict(init_info.storage_options)
        with ExitStack() as closing:
            store = open_store(init_info.store, **options)
            closing.callback(store.close)
            publisher = closing.enter_context(Publisher(store, source, **arguments))
            told = {"store": store.url} | ({"storage_options": options} if options else {})
            given = {"client": client, "source": source, "is_sender": init_info.is_sender}
            return cls(publisher, closing.pop_all(), told, **given)

    def send_weights(self, step: int | None = None) -> None:
        """Publish what changed as the next version, on every rank.

        With a client this waits until the version is stored, and rank 0 until the servers serve it. Without
        one it returns once the weights were compared; the next call raises what failed.

        Args:
            step: the trainer's count, kept with the version; None to count calls from 0.

        Raises:
            PatchstoreError: see `Publisher.publish_patch`; nothing is sent to servers then.
            Whatever the client raises: the version is stored, and servers may serve an older one. The next
                call brings them to the version of its own.
        """
        step = self._next_step if step is None else step
        self.last = self._publisher.publish_once(step)
        self._next_step = step + 1
        if self.client is None:
            return
        version = self.last.result().version
        if self.is_sender:
            self._bring_to(version)

    def _bring_to(self, version: int) -> None:
        client: Any = self.client
        with _noted(f"version {version} is stored at {self._told['store']}, but not every server serves it"):
            if hasattr(client, "apply"):
                if client.status().run_id != self._publisher.run_id:
                    client.init_weight_transfer(**self._told)
                client.apply(version)
                return
            if not self._is_opened:
                client.init_weight_transfer_engine(dict(self._told))
            # Until this has succeeded: a server that was started again has no open store.
            self._is_opened = False
            client.start_weight_update()
            client.update_weights({"version": version})
            client.finish_weight_update(str(version))
            self._is_opened = True

    def shutdown(self) -> None:
        """Wait until everything is stored, and close the publisher. Calling it again changes nothing.

        Raises:
            PublishFailed: something could not be stored, and that was not raised yet.
        """
        self._closing.close()


@contextmanager
def _noted(state: str) -> Iterator[None]:
    """Add to an error what the state is, and what a server said of its reason."""
    try:
        yield
    except Exception as exc:
        said = getattr(getattr(exc, "response", None), "text", "")
        exc.add_note(state + (f"; the server says: {said[:2000]}" if said else ""))
        raise


def _has_methods(client: Any) -> bool:
    ours = ("apply", "init_weight_transfer", "status")
    theirs = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
    return any(all(callable(getattr(client, name, None)) for name in names) for names in (ours, theirs))


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, DeltaTrainerWeightTransferEngine)

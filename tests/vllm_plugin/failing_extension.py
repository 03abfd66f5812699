"""The extension under test, and ways to make its updates fail where a real machine would."""

import errno
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from halves import half_of
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from patchstore.bucket.records import Schema
from patchstore.errors import LoadFailed
from patchstore.read import download
from patchstore.stores.folder import FolderStore
from vllm_plugin import DeltaWorkerExtension
from vllm_plugin.live.weights import Piece, StagedWrite


class FailingExtension(DeltaWorkerExtension):
    """Adds methods that break things; changes nothing else."""

    def delta_fail(self, rank: int) -> None:
        """Raise in one rank only."""
        if rank == self.rank:
            raise LoadFailed("made to fail by the test")

    def delta_answer_late(self, seconds: float) -> None:
        """Answer after this time, so that a caller's own time is over before."""
        time.sleep(seconds)

    def delta_spoil_adapter(self, lora_int_id: int) -> None:
        """Change one number of an adapter where this worker computes with it."""
        held = self.get_model().lora_manager
        slot = held.lora_index_to_id.index(lora_int_id)
        held.modules["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[0][slot].view(-1)[:1] += 1

    def delta_fail_writes(self, num_failures: int, rank: int | None = None) -> None:
        """Let the next writes of changes fail after half of them.

        Args:
            num_failures: 1 fails the commit of a version, 2 its undoing too.
            rank: the only rank to fail in; None for all.
        """
        if rank not in (None, self.rank):
            return
        live = self.weight_transfer_engine.live
        scatter = live.scatter
        left = num_failures

        def failing(change: StagedWrite) -> None:
            nonlocal left
            if left == 0:
                del live.scatter
                return scatter(change)
            left -= 1
            scatter(half_of(change))
            raise LoadFailed("made to fail by the test")

        live.scatter = failing

    def delta_fail_anchors(self, after: int) -> None:
        """Let the next load of an anchor fail when `after` pieces are written, by whichever loader."""
        live = self.weight_transfer_engine.live
        models = live.models
        write, load = live.write, models.load

        def restore() -> None:
            del live.write, models.load

        def failing_write(pieces: Sequence[Piece]) -> None:
            write(pieces[:after])
            restore()
            raise LoadFailed("made to fail by the test")

        def failing_load(schema: Schema, tensors: dict[str, Any]) -> None:
            load(schema, dict(list(tensors.items())[:after]))
            restore()
            raise LoadFailed("made to fail by the test")

        live.write, models.load = failing_write, failing_load

    def delta_fail_loads(self) -> None:
        """Let the next call of vLLM's loader fail when it has had half of the tensors."""
        model = self.model_runner.get_model()
        load = model.load_weights

        def failing(weights: Any) -> None:
            del model.load_weights
            every = list(weights)
            load(every[: len(every) // 2])
            raise LoadFailed("made to fail by the test")

        model.load_weights = failing

    def delta_write_behind(self, name: str, rank: int = 0) -> None:
        """Change one element of a parameter, as something that is not the engine might."""
        if rank != self.rank:
            return
        parameter = dict(self.model_runner.get_model().named_parameters())[name]
        parameter.data.view(-1)[:1].neg_()

    def delta_lose_weights(self) -> None:
        """Leave nothing of the weights, as sleep at level 2 does on a GPU."""
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))

    def delta_move(self, name: str) -> None:
        """Give a parameter other memory with the same contents."""
        parameter = dict(self.model_runner.get_model().named_parameters())[name]
        parameter.data = parameter.data.clone()

    def delta_addresses(self) -> dict[str, int]:
        """Where each parameter lies."""
        return {n: p.data_ptr() for n, p in self.model_runner.get_model().named_parameters()}

    def delta_fill_disk(self) -> None:
        """Let the next download find the disk full, after a part of it.

        Until then folders count as those of another host.
        """
        chunks, is_on_this_host = download.chunks, FolderStore.is_on_this_host

        def failing(*args: Any) -> Any:
            download.chunks, FolderStore.is_on_this_host = chunks, is_on_this_host
            yield next(chunks(*args))[:100]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        download.chunks, FolderStore.is_on_this_host = failing, lambda store, key: False

    def delta_die_while_staging(self, rank: int, victim: str) -> None:
        """Kill this `worker` when it next stages, once it has fetched; or its engine `core`."""
        if rank != self.rank:
            return
        # On a GPU one rank is in the process of the engine core.
        process = os.getppid() if victim == "core" else os.getpid()
        live = self.weight_transfer_engine.live
        stage: Callable[..., StagedWrite] = live.stage_deltas

        def dying(*args: Any, **kwargs: Any) -> StagedWrite:
            stage(*args, **kwargs)
            os.kill(process, signal.SIGKILL)
            raise AssertionError

        live.stage_deltas = dying

    def delta_hold_staging(self, until: str) -> None:
        """Let the next staging wait until a file exists."""
        live = self.weight_transfer_engine.live
        stage: Callable[..., StagedWrite] = live.stage_deltas

        def waiting(*args: Any, **kwargs: Any) -> StagedWrite:
            del live.stage_deltas
            while not Path(until).exists():
                time.sleep(0.01)
            return stage(*args, **kwargs)

        live.stage_deltas = waiting


class OneEngineExtension(FailingExtension):
    """Adds a way to break one data-parallel engine and not the other."""

    def delta_in_engine(self, index: int, method: str, args: list[Any]) -> None:
        """Call a method in the engine of this number alone."""
        if self.vllm_config.parallel_config.data_parallel_index == index:
            getattr(self, method)(*args)


class SharingExtension(DeltaWorkerExtension):
    """Moves a parameter to shared memory when the model was loaded, before the engine is made."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        create = WeightTransferEngineFactory.create_engine

        def sharing(config: Any, vllm_config: Any, device: Any, model: Any) -> Any:
            model.get_parameter("model.norm.weight").share_memory_()
            return create(config, vllm_config, device, model)

        WeightTransferEngineFactory.create_engine = sharing
        return super().__new__(cls, *args, **kwargs)

"""One rank of the `delta` engine, as vLLM sees it: what arrives, and how a failure is raised.

A step runs in every rank. If it fails in any rank, it fails in all of them.

vLLM checks the order of calls and keeps a flag that an update is open. It clears the flag only in a
rank that raised, while here only the last rank may raise (see `ranks`), so the flag is cleared
here in all of them: after any failure the update is closed, and the caller starts a new one.
"""

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from patchstore.errors import UsageError
from vllm_plugin.ranks import Failure, RanksFailed, describe, gather, is_last
from vllm_plugin.replies import LOADED
from vllm_plugin.serving import groups

T = TypeVar("T")

# vLLM configures only loggers below its own name.
logger = init_logger("vllm.patchstore")

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def remember(worker: object) -> None:
    """Keep a worker, so that the engine that is made in it finds it. Does not keep it alive."""
    _workers.add(worker)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `/init_weight_transfer_engine` was given, unchecked: see `init_transfer_engine`."""

    given: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `/update_weights` was given, unchecked: see `update_weights`."""

    given: Mapping[str, Any]


class RankEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One rank of an engine whose steps fail in all ranks or in none."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.last_error: Failure | None = None
        """Of the last call that failed; None after one that succeeded."""
        self.update_open = False
        """Whether an update was started, and neither finished nor failed."""

    @property
    def rank(self) -> int:
        return int(self.parallel_config.rank)

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        # Checking here would raise in every rank at once.
        return InitInfo(given=init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(given=update_dict)

    @staticmethod
    def trainer_send_weights(*_: object, **__: object) -> NoReturn:
        """Refuse: vLLM 0.26 asks engines for this, but here trainers publish to a store instead."""
        raise UsageError("the delta backend receives from a store; use patchstore.Publisher in the trainer")

    def _worker(self) -> Any | None:
        mine = (worker for worker in _workers if getattr(worker, "weight_transfer_engine", None) is self)
        return next(mine, None)

    def _check_replies(self) -> None:
        """Refuse to serve from several processes whose replies vLLM could take for answers to other calls."""
        is_multiproc = self.parallel_config.distributed_executor_backend == "mp"
        if is_multiproc and self.parallel_config.world_size > 1 and LOADED not in os.environ:
            raise UsageError(
                "vLLM did not load patchstore's plugin, which keeps the replies of several workers in step: "
                "install patchstore into vLLM's environment (pip install patchstore), and if VLLM_PLUGINS is "
                "set, add patchstore to it"
            )

    def _together(self, step: Callable[[], T]) -> list[T]:
        """Run a step that waits for no other rank, and return the results of all.

        Raises:
            RanksFailed: in all ranks, if it failed in any.
        """
        result, failure = None, None
        try:
            result = step()
        except Exception as exc:
            logger.exception("rank %d failed", self.rank)
            failure = Failure.of(self.rank, exc)
        self.last_error = failure
        every = self._gather((result, failure))
        if failures := [failure for _, failure in every if failure is not None]:
            raise RanksFailed(failures)
        return [result for result, _ in every]  # type: ignore[misc]

    def _gather(self, value: T) -> list[T]:
        """Return the values of all ranks, the same list in each of them."""
        return gather(groups(), value)

    def _fail(self, failures: list[Failure]) -> None:
        """Close the update, and raise in the last rank only.

        In the others this returns, and so must the caller.
        """
        self.last_error = failures[-1]
        self.update_open = False
        self.reset_weight_update_target()
        if is_last(groups()):
            raise RuntimeError(describe(failures))

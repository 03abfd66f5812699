"""The `delta` weight transfer engine: vLLM's interface for engines, served in every rank.

    fetch      `prefetch`: the way to the version, its payloads and digest sums (`Run.reach`, `_fetch`)
    translate  `prefetch`: what they say, as bits of this rank's memory, beside what is there (`_translate`)
    verify     `update_weights`: what all ranks would change leads to the version (`_stage_alike`)
    write      `finish_weight_update`: in place, and read back; a failure is undone (`_apply`, `roll_back`)
    accept     `finish_weight_update`: the version is held from here on (`accept`)

The first two are `Updater.stage`, on a thread of its own while the server answers requests. `update_weights`
does what `prefetch` did not; `delta_prove` calls it too. vLLM generates nothing during the others.

A step runs in every rank. If it fails in any rank, it fails in all of them.

vLLM checks the order of calls and keeps a flag that an update is open. It clears the flag only in a
rank that raised, while here it may be that only the last rank raises (see `ranks`), so the flag is cleared
here in all of them: after any failure the update is closed, and the caller starts a new one.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from patchstore.bucket.lineage import Without
from patchstore.bucket.records import Ends
from patchstore.errors import CorruptObject, HalfApplied, StateMismatch, StoreUnavailable, UsageError
from patchstore.kernels import are_usable
from patchstore.signing.required import Floor
from patchstore.stores import layout
from patchstore.support.arguments import version_number, whole_number
from vllm_plugin import boot
from vllm_plugin.core import CACHES_KEY, ENGINE_KEY, NOT_LOADED
from vllm_plugin.live.derived import Derived
from vllm_plugin.live.models import ServedModels
from vllm_plugin.live.rank_weights import Staged
from vllm_plugin.live.update import Updater
from vllm_plugin.live.weights import LiveWeights
from vllm_plugin.map.mapping import SliceSums, StagedSums
from vllm_plugin.opening import Opening, checkpoint_folder
from vllm_plugin.permission import keywords, required_keys
from vllm_plugin.plugin import is_kept
from vllm_plugin.ranks import Failure, Ranks, RanksFailed, RanksLost
from vllm_plugin.serving import Serving, groups, is_read_in_order
from vllm_plugin.waiting import can_ring, ring

T = TypeVar("T")

# vLLM configures only loggers below its own name.
logger = init_logger("vllm.patchstore")

WORKERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Of this process, so that the engine that is made in one finds it."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `/init_weight_transfer_engine` was given, unchecked: see `init_transfer_engine`."""

    given: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `/update_weights` was given, unchecked: see `update_weights`."""

    given: Mapping[str, Any]


_INIT_TYPES = {"store": str, "storage_options": dict, "scratch": str, "cache_bytes": int, "partial": bool}
_UPDATE_TYPES = {"version": int, "switch": str, "allow_rollback": bool}

_MOST_WAYS = 6
"""Ways that are tried to a version: the ranks agree on one, and damaged shortcuts are left out."""


class _Report(NamedTuple):
    """What a rank says of the update that it staged."""

    way: tuple[str, frozenset[Ends]]
    """The plan, and the shortcuts in it."""
    without: Without
    changes: StagedSums


class DeltaWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Follows a store in one rank. Methods that vLLM calls fail in all ranks or in none."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.ranks = Ranks(self.rank, groups, is_read_in_order=is_read_in_order(vllm_config))
        self.last_error: Failure | None = None
        """Of the last call that failed; None after one that succeeded."""
        self.update_open = False
        """Whether an update was started, and neither finished nor failed."""
        self.serving = Serving(vllm_config, model)
        self.serving.check_layout([model])
        self.required = required_keys()
        """Of this server, as it was started; None if it takes unsigned versions."""
        self.floor = Floor()
        """Where keys are required: the newest version that was served since the start, of any store."""
        self.live = self._live([model])
        self.updater: Updater | None = None
        """None before the first `init_transfer_engine`."""
        self._opening: Opening | None = None
        """A store that `open_ahead` began to open."""
        self.is_open = False
        """Whether the updater's store can be used."""
        self._checkpoint, self._booted = checkpoint_folder(vllm_config), boot.version_of(vllm_config)
        self._is_as_started = True
        """Whether nothing was loaded since the start, so that the folder still says what is served."""
        self._sleep_level: int | None = None
        """None while awake."""
        self.switch: str | None = None
        """A driver's mark; see `DeltaWorkerExtension.delta_switch`."""

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

    @property
    def is_asleep(self) -> bool:
        return self._sleep_level is not None

    @property
    def draft(self) -> str | None:
        worker = self._worker()
        return None if worker is None else self.serving.draft_source(worker)

    @property
    def form(self) -> str | None:
        """See `Serving.form`; `calculated` where vLLM quantized what it loaded."""
        return "calculated" if self.serving.is_calculated else self.serving.form

    def fingerprint(self) -> dict[str, str]:
        """See `ServedModels.fingerprint`. Needs no open store."""
        worker = self._worker()
        if self.updater is None and worker is not None:
            self.live = self._live(self.serving.models(worker))
        return self.live.models.fingerprint()

    def _live(self, models: Sequence[torch.nn.Module]) -> LiveWeights:
        serving = self.serving
        # Reloading calls the hooks by itself.
        derived = Derived(models, serving.refresh, hooks=not serving.is_calculated)
        served = ServedModels(
            models,
            serving.load,
            derived,
            fits=serving.check_fits,
            load_traced=serving.load_traced if serving.is_loaded_quantized else None,
            is_calculated=serving.is_calculated,
        )
        # Kernels need Triton and a device that it compiles for; plain torch does the same anywhere.
        if not are_usable(served.device):
            return LiveWeights(served)
        from vllm_plugin.gpu.weights import DeviceWeights

        return DeviceWeights(served)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open a store: map the model's weights to the run's, and find out which version is served.

        Opening again, also another store, keeps the weights and finds their version anew.

        `init_info` has `store` (a URL), and optionally `storage_options`; `scratch`, a folder of this user
        alone on a local disk, in which the ranks and servers of a host share what they fetch; `cache_bytes`,
        how much of it stays there unused; `partial`, whether each rank reads only its own part of coded
        deltas instead. If any rank fails, all are as before, or say that they are half-applied; an open
        update is closed.
        """
        opening = self._opening
        if opening is None or opening.given != init_info.given:
            self._drop_opening()
            opening = self._begin(init_info.given)
        self._opening = None
        opening.advance()
        try:
            if opening.failures:
                raise RanksFailed(opening.failures)
            adopted = self._together(lambda: self._adopt(opening))
            updater, live = opening.updater, opening.live
            assert updater is not None and live is not None
            if not all(adopted):
                updater.forget()
        except RanksFailed as failed:
            opening.close()
            if any(each.kind == HalfApplied.kind for each in failed.failures):
                self._mark_half_applied(opening)
            self._fail(failed.failures)
            return
        except BaseException:
            opening.close()
            self._mark_half_applied(opening)
            raise
        updater.half_applied = self.updater is not None and self.updater.half_applied and updater.held is None
        self.shutdown()
        self.updater, self.live, self.is_open = updater, live, True
        held = updater.held
        if self.required is not None and held is not None:
            self.floor.raise_to(held)
        logger.info(
            "following run %s at %s, holding %s",
            updater.run.header.run_id,
            updater.run.store.url,
            "no version of it" if held is None else f"version {held.version}",
        )
        if updater.weights.map.widened_apart:
            logger.warning(
                "this model keeps %d tensors in more bits than the run stores, so the trainer's steps may be "
                "lost in them: %s. Publish these as they are in the model's checkpoint: give Publisher its "
                'folder as files=, or dtype={"NAME": "float32"}',
                len(updater.weights.map.wider),
                updater.weights.map.widened_apart,
            )
        if self.serving.is_calculated:
            logger.warning(
                "vLLM quantizes whole layers anew for each version; a run that is published with "
                "Publisher(..., quantization=) is written in place, by a server of its checkpoint"
            )

    def _mark_half_applied(self, opening: Opening) -> None:
        """Have the status say that what is served is no version: what was loaded to be compared may be there
        still.
        """
        updater = self.updater
        if updater is None:
            assert opening.updater is not None and opening.live is not None
            # Closed, as its map may be wrong; of a store that is opened again the map is proved again.
            self.updater = updater = opening.updater
            self.live = opening.live
        updater.mark_half_applied()

    def _adopt(self, opening: Opening) -> bool:
        self._check_quiet()
        if self.updater is not None:
            # Weights are loaded to prove the map, or some of them.
            self.updater.abandon()
        assert opening.updater is not None
        return opening.updater.adopt(opening.contents)

    def _begin(self, given: Mapping[str, Any]) -> Opening:
        folder, likely = (self._checkpoint, self._booted) if self._is_as_started else (None, None)
        prepare = partial(self._models_live, given)
        return Opening(given, self._together, prepare, folder, self.required, likely)

    def _models_live(self, given: Mapping[str, Any]) -> LiveWeights:
        """Check that a store can be opened here, as was asked, and return the weights that will follow it."""
        _keywords("init_info", given, _INIT_TYPES, required={"store"})
        worker = self._worker()
        if worker is None:
            raise UsageError("start vllm with --worker-extension-cls vllm_plugin.DeltaWorkerExtension")
        self._check_quiet()
        # The engine core may be another process, and not do its part.
        if self.ranks.is_read_in_order and not is_kept():
            raise UsageError(NOT_LOADED)
        models = self.serving.models(worker)
        self.serving.check_layout(models)
        return self._live(models)

    def _check_quiet(self) -> None:
        self._check_awake()
        if self.update_open:
            raise UsageError("an update is open, and closed now; open the store again")

    def open_ahead(self, given: Mapping[str, Any]) -> bool:
        """Begin to open a store while generation goes on, or go on with it; returns without waiting.

        Another store that was being opened is dropped, and so is this one when the weights change. True once
        `init_transfer_engine` is due: it will not wait, or say what is wrong.
        """
        if self._opening is None or self._opening.given != given:
            self._drop_opening()
            self._opening = self._begin(given)
        return self._opening.advance(lambda is_done: all(self.ranks.gather(is_done)))

    def _drop_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.close()

    def prefetch(self, version: int, run_id: str | None = None) -> bool:
        """Begin to stage a version while generation goes on; True once `update_weights` is due."""
        version = version_number(version)
        updater = self.updater
        if updater is None or not self.is_open or self.is_asleep:
            return True
        is_served = updater.held is not None and updater.held.version == version
        is_other = updater.run.header.run_id != run_id or self.update_open or updater.staged is not None
        if run_id is not None and (is_served or is_other):
            return False
        return updater.prefetch(version)

    def rings(self, version: int, bell: str) -> bool:
        """Whether a bell will be rung when `prefetch` has ended; not if another version comes first."""
        updater = self.updater
        return updater is not None and can_ring(bell) and updater.on_fetched(version, partial(ring, bell))

    def start_weight_update(self) -> None:
        """Begin an update. The weights stay as they are until `finish_weight_update`."""
        self.update_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version: fetch and prove it while the live weights stay as they are.

        `update_info` has `version`, a number; optionally `switch`, a mark to keep from here on, as by
        `DeltaWorkerExtension.delta_switch`; and `allow_rollback`: without it a server that requires
        signatures goes to no older version than it served. If any rank fails, nothing is staged and the
        update is closed.
        """
        try:
            self.ranks.check()
            self._stage_alike(update_info)
            self.switch = update_info.get("switch", self.switch)
        except RanksFailed as failed:
            failures = failed.failures
            # What is coded against other weights than these may also make no sense at all.
            if any(each.kind in {StateMismatch.kind, CorruptObject.kind} for each in failures):
                failures = self._blame(failures)
            if self.updater is not None:
                self.updater.drop()
                self.updater.around.forget()
            self._fail(failures)

    def _stage_alike(self, given: Mapping[str, Any]) -> None:
        """Stage a version in all ranks, over the same way, and prove it; go round wrong shortcuts."""
        for _ in range(_MOST_WAYS):
            told = self._together(lambda: self._stage(given))
            updater = self._opened()
            assert updater.staged is not None
            over = updater.staged.plan.over
            if any(each.way != told[0].way for each in told):
                # A rank went round damage that the others did not meet.
                updater.around.join(each.without for each in told)
                updater.drop()
                continue
            changes = [each.changes for each in told]
            try:
                self._together(partial(updater.verify, changes))
            except RanksFailed as failed:
                if not over or any(each.kind != StateMismatch.kind for each in failed.failures):
                    raise
                updater.around.suspect(over)
                updater.drop()
            else:
                return
        message = "the ranks find no way that leads all of them to this version, so try again"
        raise RanksFailed([Failure(rank=self.rank, kind=StoreUnavailable.kind, message=message)])

    def _stage(self, given: Mapping[str, Any]) -> _Report:
        known = _keywords("update_info", given, _UPDATE_TYPES, required={"version"})
        version = version_number(known["version"])
        if not self.update_open:
            raise UsageError("start_weight_update must be called before update_weights")
        self._check_awake()
        updater = self._opened()
        updater.stage(version)
        staged = updater.staged
        assert staged is not None
        if self.required is not None and not known.get("allow_rollback", False):
            self.floor.check(staged.manifest)
        way = str(staged.plan), staged.plan.over
        return _Report(way, updater.around.without, updater.weights.changes(staged))

    def _blame(self, failures: list[Failure]) -> list[Failure]:
        """Find out whether what was staged is wrong, or the weights that it would have changed."""
        updater = self._opened()
        if updater.held is None:
            return failures
        try:
            slice_sums, version = self._together(updater.weights.slice_sums), updater.held.version
            self._together(lambda: updater.weights.check_served(slice_sums, version))
        except RanksFailed as failed:
            if any(each.kind == StateMismatch.kind for each in failed.failures):
                updater.mark_half_applied()
            return failed.failures
        return failures

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.update_weights(dict(update_info.given))

    def drop_update(self) -> None:
        self.update_open = False
        self.reset_weight_update_target()
        if self.updater is not None:
            self.updater.drop()

    def finish_weight_update(self) -> None:
        """Load the staged version into the live weights of all ranks, or of none, and close the update.

        If any rank fails, all have the version they had, or say that they are half-applied.
        """
        staged = None if self.updater is None else self.updater.staged
        # The shortcuts that it was made from: the same in all ranks.
        over = frozenset[Ends]() if staged is None else staged.plan.over
        try:
            self._together(self._apply)
            updater = self._opened()
            if staged is not None and staged.plan.anchor is not None:
                # Only the weights as written can verify what starts from an anchor.
                slice_sums = self._together(updater.weights.slice_sums)
                self._together(partial(self._verify_written, staged, slice_sums))
            updater.accept()
        except RanksFailed as failed:
            failures = failed.failures
            if self.updater is not None:
                undo = self.updater
                try:
                    self._together(undo.roll_back)
                except RanksFailed as worse:
                    failures = list(dict.fromkeys(failures + worse.failures))
                    # In all ranks, also where the undo succeeded: they must never differ.
                    if staged is not None:
                        undo.mark_half_applied()
                        if isinstance(worse, RanksLost):
                            failures.append(self._unknown())
                if any(each.kind == StateMismatch.kind for each in failures):
                    failures = self._without(over, self._blame(failures))
            self._fail(failures)
            return
        except BaseException:
            # An interrupt may have come between any two writes.
            if self.updater is not None:
                self.updater.mark_half_applied()
            raise
        self.update_open = False
        assert updater.held is not None
        if self.required is not None:
            self.floor.raise_to(updater.held)
        logger.info("serving version %d: %s", updater.held.version, _spent(updater.timings))

    def _verify_written(self, staged: Staged, slice_sums: Sequence[SliceSums]) -> None:
        updater, began = self._opened(), time.monotonic()
        updater.weights.verify_written(staged, slice_sums)
        updater.timings["verify"] = time.monotonic() - began

    def _without(self, over: frozenset[Ends], failures: list[Failure]) -> list[Failure]:
        """Leave some shortcuts out from the next update on, and say so."""
        if not over:
            return failures
        suspects = self._opened().around.suspect(over)
        names = " and ".join(layout.shortcut_key(each.version, each.parent) for each in suspects)
        also = f". It was made from {names}: update again, which goes round"
        return [replace(each, message=f"{each.message}{also}") for each in failures]

    def _unknown(self) -> Failure:
        return Failure(
            rank=self.rank,
            kind=HalfApplied.kind,
            message="what the other ranks wrote is unknown here, so the weights may be of two versions",
        )

    def _apply(self) -> None:
        self._check_awake()
        updater = self._opened()
        self._drop_opening()
        if updater.staged is not None:
            self._is_as_started = False
        updater.apply()

    def sleeping(self, level: int | None) -> None:
        """Hear that the weights' memory is about to be given away, or is back (None). Level 2 loses the
        weights, so that the next update starts from an anchor.
        """
        opening, self._opening = self._opening, None
        if opening is not None:
            # What it reads would not be there any more.
            opening.leave()
        if level is not None and self.updater is not None:
            self.updater.abandon()
            self.updater.drop()
            if level > 1:
                self.updater.forget()
        if level is not None and level > 1:
            self._is_as_started = False
        self._sleep_level = level

    def reloaded(self) -> None:
        """Hear that vLLM loaded weights by itself. It is unknown which version they are, if any."""
        self._is_as_started = False
        self._drop_opening()
        if self.updater is not None:
            self.updater.abandon()
            self.updater.forget()

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise UsageError("the server sleeps; wake it up, with its weights, before it is updated")

    def sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """See `DeltaWorkerExtension.delta_sums`."""
        first = whole_number("first", first, least=0)
        num_elements = whole_number("num_elements", num_elements, least=0)
        updater = self.updater
        if updater is None or self.is_asleep:
            nothing: dict[str, Any] = {"sums": {}, "computed": [], "unverified": []}
            return {"serving": None, "num_applied": 0, "next": None} | nothing
        found = updater.weights.sums(first, num_elements)
        return {"serving": updater.version, "num_applied": updater.num_applied} | found

    def shutdown(self) -> None:
        """Close the store, and an open update. The weights and their version stay; opening again finds it."""
        self._drop_opening()
        self.update_open = False
        if self.updater is not None and self.is_open:
            self.updater.close()
        self.is_open = False

    def _opened(self) -> Updater:
        if self.updater is None or not self.is_open:
            raise UsageError("no store is open; call init_weight_transfer_engine with one first")
        return self.updater

    # Steps of all ranks.

    def _worker(self) -> Any | None:
        mine = (worker for worker in WORKERS if getattr(worker, "weight_transfer_engine", None) is self)
        return next(mine, None)

    def _together(self, step: Callable[[], T]) -> list[T]:
        """Run a step that waits for no other rank, and return the results of all; it fails in all or none."""
        result, failure = None, None
        try:
            result = step()
        except Exception as exc:
            logger.exception("rank %d failed", self.rank)
            failure = Failure.of(self.rank, exc)
        self.last_error = failure
        every = self.ranks.gather((result, failure))
        if failures := [failure for _, failure in every if failure is not None]:
            raise RanksFailed(failures)
        return [result for result, _ in every]  # type: ignore[misc]

    def _fail(self, failures: list[Failure]) -> None:
        """Close the update, and raise as `Ranks.fail`: where that returns, the caller must too."""
        self.last_error = failures[-1]
        self.update_open = False
        self.reset_weight_update_target()
        self.ranks.fail(failures)


def _spent(timings: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds:.3f} s" for part, seconds in timings.items())


def _keywords(what: str, given: object, types: Mapping[str, type], required: set[str]) -> Mapping[str, Any]:
    # What the engine core would have taken, if it did its part.
    if isinstance(given, Mapping) and given.keys() & {CACHES_KEY, ENGINE_KEY}:
        raise UsageError(NOT_LOADED)
    return keywords(what, given, types, required)

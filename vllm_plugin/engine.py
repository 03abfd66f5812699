"""The `delta` weight transfer engine: vLLM's interface for engines, served in every rank.

`rank_engine` has the steps of several ranks, and the failures.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.logger import init_logger

from patchstore.errors import CorruptObject, HalfApplied, StateMismatch, UsageError
from patchstore.format.dtypes import alike
from patchstore.kernels import are_usable
from patchstore.signing.floor import Floor
from vllm_plugin.arguments import keywords
from vllm_plugin.mapping import StagedSums
from vllm_plugin.opening import Opening, checkpoint_folder
from vllm_plugin.permission import required_keys
from vllm_plugin.post_load import Derived
from vllm_plugin.prefixes import NOT_LOADED, UPDATE_KEY
from vllm_plugin.rank_engine import InitInfo, RankEngine, UpdateInfo
from vllm_plugin.ranks import Failure, RanksFailed
from vllm_plugin.serving import Serving
from vllm_plugin.update import Updater
from vllm_plugin.weights import LiveWeights

# vLLM configures only loggers below its own name.
logger = init_logger("vllm.patchstore")


class DeltaWeightTransferEngine(RankEngine):
    """Follows a store in one rank. Methods that vLLM calls fail in all ranks or in none."""

    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        """Take over a model that has just been loaded.

        Raises:
            UsageError: its weights do not have the layout in which they are loaded, or the keys that the
                server was started to require cannot be read.
        """
        super().__init__(config, vllm_config, device, model)
        self._serving = Serving(vllm_config, model)
        self._serving.check_layout([model])
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
        self._checkpoint = checkpoint_folder(vllm_config)
        self._is_as_started = True
        """Whether nothing was loaded since the start, so that the folder still says what is served."""
        self._sleep_level: int | None = None
        """None while awake."""
        self.switch: str | None = None
        """A driver's mark; see `DeltaWorkerExtension.delta_switch`."""

    @property
    def is_asleep(self) -> bool:
        """Whether the weights' memory was given away; see vLLM's sleep mode."""
        return self._sleep_level is not None

    @property
    def draft(self) -> str | None:
        """See `Serving.draft_source`."""
        worker = self._worker()
        return None if worker is None else self._serving.draft_source(worker)

    @property
    def form(self) -> str | None:
        """See `Serving.form`; `calculated` where vLLM quantised what it loaded."""
        return "calculated" if self._serving.is_calculated else self._serving.form

    def fingerprint(self) -> dict[str, str]:
        """See `LiveWeights.fingerprint`. Needs no open store."""
        worker = self._worker()
        if self.updater is None and worker is not None:
            self.live = self._live(self._serving.models(worker))
        return self.live.fingerprint()

    def _live(self, models: Sequence[torch.nn.Module]) -> LiveWeights:
        serving = self._serving
        # Reloading calls the hooks by itself.
        derived = Derived(models, serving.refresh, hooks=not serving.is_calculated)
        return _kind_for(models)(
            models,
            serving.load,
            derived,
            fits=serving.check_fits,
            load_traced=serving.load_traced if serving.is_loaded_quantised else None,
            is_calculated=serving.is_calculated,
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open a store: map the model's weights to the run's, and find out which version is served.

        Opening again, also another store, keeps the weights and finds their version anew.

        Args:
            init_info: `store` (a URL), and optionally `storage_options`; `scratch`, a folder of this user
                alone on a local disk, in which the ranks and servers of a host share what they fetch;
                `cache_bytes`, how much of it stays there unused; `partial`, whether each rank reads only its
                own part of coded deltas instead.

        Raises:
            RuntimeError: any rank could not; all are as before, or say that they are half-applied, and an
                update that was open is closed. Begins with the error's `[kind]`.
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
            if self.updater is not None and any(each.kind == HalfApplied.kind for each in failed.failures):
                self.updater.mark_half_applied()
            self._fail(failed.failures)
            return
        updater.half_applied = self.updater is not None and self.updater.half_applied and updater.held is None
        self.shutdown()
        self.updater, self.live, self.is_open = updater, live, True
        held = updater.held
        if self.required is not None and held is not None:
            self.floor.raise_to(held)
        logger.info(
            "following run %s at %s, holding %s",
            updater.header.run_id,
            updater.store.url,
            "no version of it" if held is None else f"version {held.version}",
        )
        if updater.map.is_widened_apart:
            logger.warning(
                "this model keeps %d tensors in more bits than the run stores, so the trainer's steps may be "
                "lost in them: %s. Publish these as they are in the model's checkpoint: give Publisher its "
                'folder as files=, or dtype={"NAME": "float32"}',
                len(updater.map.wider),
                alike(updater.map.wider),
            )
        if self._serving.is_calculated:
            logger.warning(
                "vLLM quantises whole layers anew for each version; a run that is published with "
                "Publisher(..., quantization=) is written in place, by a server of its checkpoint"
            )

    def _adopt(self, opening: Opening) -> bool:
        self._check_quiet()
        if self.updater is not None:
            # Weights are loaded to prove some of them.
            self.updater.abandon()
        return opening.adopt()

    def _begin(self, given: Mapping[str, Any]) -> Opening:
        folder = self._checkpoint if self._is_as_started else None
        return Opening(given, self._together, self._models_live, folder, self.required)

    def _models_live(self) -> LiveWeights:
        """Check that a store can be opened here, and return the weights that will follow it."""
        worker = self._worker()
        if worker is None:
            raise UsageError("start vllm with --worker-extension-cls vllm_plugin.DeltaWorkerExtension")
        self._check_quiet()
        self._check_replies()
        models = self._serving.models(worker)
        self._serving.check_layout(models)
        return self._live(models)

    def _check_quiet(self) -> None:
        self._check_awake()
        if self.update_open:
            raise UsageError("an update is open, and closed now; open the store again")

    def open_ahead(self, given: Mapping[str, Any]) -> bool:
        """Begin to open a store while generation goes on, or go on with it; returns without waiting.

        Another store that was being opened is dropped, and so is this one when the weights change.

        Returns:
            Whether `init_transfer_engine` is due: it will not wait, or say what is wrong.
        """
        if self._opening is None or self._opening.given != given:
            self._drop_opening()
            self._opening = self._begin(given)
        return self._opening.advance(lambda is_done: all(self._gather(is_done)))

    def _drop_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.close()

    def prefetch(self, version: int, run_id: str | None = None) -> bool:
        """Begin to stage a version while generation goes on; see `Updater.prefetch`.

        Args:
            run_id: as of `DeltaWorkerExtension.delta_prefetch`.

        Returns:
            Whether `update_weights` is due: it need not fetch, or it will say what is wrong.
        """
        updater = self.updater
        if updater is None or not self._can_stage():
            return True
        is_served = updater.held is not None and updater.held.version == version
        is_other = updater.header.run_id != run_id or self.update_open or updater.staged is not None
        if run_id is not None and (is_served or is_other):
            return False
        return updater.prefetch(version)

    def start_weight_update(self) -> None:
        """Begin an update. The weights stay as they are until `finish_weight_update`."""
        self.update_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version: fetch and prove it while the live weights stay as they are.

        Args:
            update_info: `version`, a number; optionally `switch`, a mark to keep from here on, as by
                `DeltaWorkerExtension.delta_switch`; and `allow_rollback`: without it a server that requires
                signatures goes to no older version than it served. The engine core takes `new_prefixes` out
                of it; see `vllm_plugin.prefixes`.

        Raises:
            RuntimeError: any rank could not; nothing is staged in any and the update is closed.
                Begins with the error's `[kind]`.
        """
        try:
            changes = self._together(lambda: self._stage(update_info))
            self._together(lambda: self._opened().verify(changes))
            self.switch = update_info.get("switch", self.switch)
        except RanksFailed as failed:
            failures = failed.failures
            # What is coded against other weights than these may also make no sense at all.
            if any(each.kind in {StateMismatch.kind, CorruptObject.kind} for each in failures):
                failures = self._blame(failures)
            if self.updater is not None:
                self.updater.drop()
            self._fail(failures)

    def _stage(self, given: Mapping[str, Any]) -> StagedSums:
        if UPDATE_KEY in given:
            # The engine core would have taken it.
            raise UsageError(NOT_LOADED)
        types = {"version": int, "switch": str, "allow_rollback": bool}
        known = keywords("update_info", given, types, required={"version"})
        if not self.update_open:
            raise UsageError("start_weight_update must be called before update_weights")
        self._check_awake()
        updater = self._opened()
        updater.stage(known["version"])
        if self.required is not None and not known.get("allow_rollback", False):
            assert updater.staged is not None
            self.floor.check(updater.staged.manifest)
        return updater.changes()

    def _blame(self, failures: list[Failure]) -> list[Failure]:
        """Find out whether what was staged is wrong, or the weights that it would have changed."""
        updater = self._opened()
        if updater.held is None:
            return failures
        try:
            slice_sums = self._together(updater.slice_sums)
            self._together(lambda: updater.check_served(slice_sums))
        except RanksFailed as failed:
            if any(each.kind == StateMismatch.kind for each in failed.failures):
                updater.mark_half_applied()
            return failed.failures
        return failures

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.update_weights(dict(update_info.given))

    def finish_weight_update(self) -> None:
        """Load the staged version into the live weights of all ranks, or of none.

        Raises:
            RuntimeError: any rank could not; all have the version they had, or say that they are
                half-applied, and the update is closed. Begins with the error's `[kind]`.
        """
        try:
            self._together(self._apply)
            updater = self._opened()
            if updater.replaces_all:
                slice_sums = self._together(updater.slice_sums)
                self._together(lambda: updater.verify_written(slice_sums))
        except RanksFailed as failed:
            failures = failed.failures
            if self.updater is not None:
                undo = self.updater
                try:
                    self._together(undo.roll_back)
                except RanksFailed as worse:
                    # In all ranks, also where the undo succeeded: they must never differ.
                    undo.mark_half_applied()
                    failures = failures + worse.failures
                if any(each.kind == StateMismatch.kind for each in failures):
                    failures = self._blame(failures)
            self._fail(failures)
            return
        except BaseException:
            # An interrupt may have come between any two writes.
            if self.updater is not None:
                self.updater.mark_half_applied()
            raise
        updater.accept()
        self.update_open = False
        assert updater.held is not None
        if self.required is not None:
            self.floor.raise_to(updater.held)
        logger.info("serving version %d: %s", updater.held.version, _spent(updater.timings))

    def _apply(self) -> None:
        self._check_awake()
        updater = self._opened()
        self._drop_opening()
        if updater.staged is not None:
            self._is_as_started = False
        updater.apply()

    def sleeping(self, level: int | None) -> None:
        """Hear that the weights' memory is about to be given away, or is back.

        Args:
            level: 2 loses the weights, so that the next update starts from an anchor; None when awake again.
        """
        self._drop_opening()
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
        """See `DeltaWorkerExtension.delta_sums`. Never raises: other ranks would be misunderstood."""
        updater = self.updater
        if updater is None or self.is_asleep:
            nothing: dict[str, Any] = {"sums": {}, "computed": [], "unverified": []}
            return {"serving": None, "num_applied": 0, "next": None} | nothing
        return updater.sums(first, num_elements)

    def _can_stage(self) -> bool:
        return self.is_open and not self.is_asleep

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


def _kind_for(models: Sequence[torch.nn.Module]) -> type[LiveWeights]:
    """Kernels need Triton and a device that it compiles for; plain torch does the same anywhere."""
    if not are_usable(next(models[0].parameters()).device):
        return LiveWeights
    from vllm_plugin.weights_gpu import DeviceWeights

    return DeviceWeights


def _spent(timings: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds:.3f} s" for part, seconds in timings.items())

"""The `delta` weight transfer engine: every name and signature of vLLM that this package relies on.

vLLM checks the order of calls and keeps a flag that an update is open. It clears the flag only in a
rank that raised, while here only the last rank may raise (see `agreement`), so the flag is cleared
here in all of them: after any failure the update is closed, and the caller starts a new one.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.logger import init_logger
from vllm.platforms import current_platform

from patchstore.errors import SchemaMismatch, UsageError
from patchstore.model import Schema
from patchstore.stores import open_store
from vllm_plugin.agreement import Failure, describe, gather, is_last
from vllm_plugin.live import LiveWeights
from vllm_plugin.origin import read_folder
from vllm_plugin.update import Updater, open_updater

# vLLM configures only loggers below its own name.
logger = init_logger("vllm.patchstore")

BACKEND = "delta"

_workers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "delta"}'` known. Calling it again changes nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, DeltaWeightTransferEngine)


def adopt(worker: object) -> None:
    """Prepare a worker that is about to be constructed, and remember it for its engine."""
    _workers.add(worker)
    if current_platform.is_cpu():
        _keep_load_layout()


def _keep_load_layout() -> None:
    """Keep Linear weights on the CPU as they were loaded.

    By default vLLM packs them for oneDNN, or for AMX, and leaves an empty parameter, into which
    nothing can be loaded again. Unpacked is also the layout that GPUs have.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_, **__: False


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What `/init_weight_transfer_engine` was given, unchecked: see `init_transfer_engine`."""

    given: Mapping[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What `/update_weights` was given, unchecked: see `update_weights`."""

    given: Mapping[str, Any]


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
        """Take over a model that has just been loaded.

        Raises:
            UsageError: its weights do not have the layout in which they are loaded.
        """
        super().__init__(config, vllm_config, device, model)
        _check_layout(vllm_config, model)
        self.live = LiveWeights(model)
        self.updater: Updater | None = None
        """None before the first `init_transfer_engine`."""
        self.is_open = False
        """Whether the updater's store can be used."""
        self.last_error: Failure | None = None
        """Of the last call that failed; None after one that succeeded."""
        self._loaded = False
        """Whether anything was loaded since the start, so that the folder says nothing any more."""
        self.switch: str | None = None
        """A driver's mark; see `DeltaWorkerExtension.delta_switch`."""

    @property
    def rank(self) -> int:
        return int(self.parallel_config.rank)

    @property
    def update_open(self) -> bool:
        """Whether vLLM counts an update as started."""
        worker = self._worker()
        return bool(worker is not None and worker._weight_update_active)

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo:
        # Checking here would raise in every rank at once.
        return InitInfo(given=init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:
        return UpdateInfo(given=update_dict)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open a store. Opening again, also another one, keeps the weights and finds their version anew.

        Args:
            init_info: `store` (a URL) and optionally `storage_options`.

        Raises:
            RuntimeError: any rank could not; all are as before. Begins with the error's `[kind]`.
        """
        opened: list[Updater] = []
        failures = self._attempt(lambda: opened.append(self._open(init_info.given)))
        if failures:
            for updater in opened:
                updater.close()
            self._fail(failures)
            return
        self.shutdown()
        self.updater, self.is_open = opened[0], True
        held = self.updater.held
        logger.info(
            "following run %s at %s, holding %s",
            self.updater.run_id,
            self.updater.store.url,
            "no version of it" if held is None else f"version {held.version}",
        )

    def _open(self, given: Mapping[str, Any]) -> Updater:
        known = _keywords("init_info", given, {"store": str, "storage_options": dict}, required={"store"})
        if self._worker() is None:
            raise UsageError("start vllm with --worker-extension-cls vllm_plugin.DeltaWorkerExtension")
        if self.update_open:
            raise UsageError("an update is open; finish it before opening a store")
        store = open_store(known["store"], **known.get("storage_options", {}))
        try:
            updater = open_updater(store, self.live, self._served)
        except BaseException:
            store.close()
            raise
        updater.torn = self.updater is not None and self.updater.torn
        return updater

    def _served(self, schema: Schema) -> dict[str, torch.Tensor]:
        """Return the checkpoint tensors that are served now, or none where nobody knows them."""
        known = {} if self.updater is None else self.updater.copy()
        if known or self._loaded:
            return known
        folder = Path(self.model_config.model)
        if (
            self.vllm_config.load_config.load_format not in {"auto", "hf", "safetensors"}
            or not folder.is_dir()
        ):
            return {}
        return read_folder(folder, schema)

    def prefetch(self, version: int) -> bool:
        """Begin to stage a version while generation goes on; see `Updater.prefetch`.

        Returns:
            Whether `update_weights` is due: it need not fetch, or it will say what is wrong.
        """
        return self.updater is None or not self.is_open or self.updater.prefetch(version)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the weights stay as they are until `finish_weight_update`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage a version: fetch and prove it while the live weights stay as they are.

        Args:
            update_info: `version`, a number.

        Raises:
            RuntimeError: any rank could not; nothing is staged in any and the update is closed.
                Begins with the error's `[kind]`.
        """
        failures = self._attempt(lambda: self._stage(update_info))
        if failures:
            if self.updater is not None:
                self.updater.drop()
            self._fail(failures)

    def _stage(self, given: Mapping[str, Any]) -> None:
        known = _keywords("update_info", given, {"version": int}, required={"version"})
        self._opened().stage(known["version"])

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self.update_weights(dict(update_info.given))

    def finish_weight_update(self) -> None:
        """Load the staged version into the live weights of all ranks, or of none.

        Raises:
            RuntimeError: any rank could not; all have the version they had, or say that they are
                torn, and the update is closed. Begins with the error's `[kind]`.
        """
        unread: list[set[str]] = []
        failures = self._attempt(lambda: unread.append(self._load()))
        if not failures and (ignored := set.intersection(*gather(self._groups(), unread[0]))):
            message = (
                f"the model's loader ignores {len(ignored)} tensors of this version, such as "
                f"{min(ignored)!r}: the server would not serve what was published"
            )
            failures = [Failure(rank=self.rank, kind=SchemaMismatch.kind, message=message)]
        if failures:
            if self.updater is not None:
                failures += self._attempt(self._roll_back)
            self._fail(failures)
            return
        updater = self._opened()
        updater.accept()
        assert updater.held is not None
        logger.info("serving version %d: %s", updater.held.version, _spent(updater.timings))

    def _load(self) -> set[str]:
        self._loaded = True
        with set_current_vllm_config(self.vllm_config):
            unread = self._opened().commit()
        self._wait_for_device()
        return unread

    def _roll_back(self) -> None:
        assert self.updater is not None
        with set_current_vllm_config(self.vllm_config):
            self.updater.roll_back()
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """Let copies end, or raise what went wrong in them, while it can still be undone."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Close the store. The weights and their version stay; initialising again goes on from them."""
        if self.updater is not None and self.is_open:
            self.updater.close()
        self.is_open = False

    @staticmethod
    def trainer_send_weights(*_: object, **__: object) -> NoReturn:
        """Refuse: vLLM 0.26 asks engines for this, but here trainers publish to a store instead."""
        raise UsageError("the delta backend receives from a store; use patchstore.Publisher in the trainer")

    def _opened(self) -> Updater:
        if self.updater is None or not self.is_open:
            raise UsageError("no store is open; call init_weight_transfer_engine with one first")
        return self.updater

    def _worker(self) -> Any | None:
        mine = (worker for worker in _workers if getattr(worker, "weight_transfer_engine", None) is self)
        return next(mine, None)

    def _groups(self) -> list[dist.ProcessGroup]:
        """CPU groups that span this engine's ranks, and no other data-parallel engine's."""
        found = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
        return [group.cpu_group for group in found if group.world_size > 1]

    def _attempt(self, step: Callable[[], object]) -> list[Failure]:
        """Run a step and return the failures of all ranks."""
        failure = None
        try:
            step()
        except Exception as exc:
            logger.exception("rank %d failed", self.rank)
            failure = Failure.of(self.rank, exc)
        self.last_error = failure
        return [each for each in gather(self._groups(), failure) if each is not None]

    def _fail(self, failures: list[Failure]) -> None:
        """Close the update, and raise in the last rank only.

        In the others this returns, and so must the caller.
        """
        self.last_error = failures[-1]
        worker = self._worker()
        if worker is not None:
            worker._weight_update_active = False
        self.reset_weight_update_target()
        if is_last(self._groups()):
            raise RuntimeError(describe(failures))


def _check_layout(vllm_config: VllmConfig, model: torch.nn.Module) -> None:
    """Refuse a model whose weights were transformed after loading: they cannot be loaded into again.

    Raises:
        UsageError: with the reason, or a list of parameters.
    """
    if (quantization := vllm_config.model_config.quantization) is not None:
        raise UsageError(f"the delta backend cannot update weights quantised as {quantization!r}; serve bf16")
    if vllm_config.model_config.use_mla:
        raise UsageError("the delta backend cannot update multi-head latent attention (MLA) yet")
    if getattr(current_platform, "is_zen_cpu", bool)():
        raise UsageError(
            "the delta backend needs Linear weights as loaded, but this platform packs them for ZenDNN"
        )
    for name, module in model.named_modules():
        backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
        if backend is not None and "TRITON" not in backend.name:
            raise UsageError(
                f"the delta backend needs experts as loaded, but {name!r} uses {backend.name}, which "
                "rearranges them: choose --moe-backend triton"
            )
    if packed := [name for name, parameter in model.named_parameters() if parameter.numel() == 0]:
        raise UsageError(
            f"the delta backend needs weights as loaded, but {len(packed)} were packed, such as {packed[0]!r}"
        )


def _keywords(what: str, given: object, types: Mapping[str, type], required: set[str]) -> Mapping[str, Any]:
    """Return keyword arguments, after checking their names and types.

    Raises:
        UsageError: with the known names.
    """
    known = ", ".join(
        f"{name!r} ({kind.__name__}{'' if name in required else ', optional'})"
        for name, kind in types.items()
    )
    if not isinstance(given, Mapping):
        raise UsageError(f"{what} must be an object with {known}, not {given!r}")
    if unknown := given.keys() - types.keys():
        raise UsageError(f"{what} has unknown keys {sorted(unknown)}; known are {known}")
    if missing := required - given.keys():
        raise UsageError(f"{what} lacks {sorted(missing)}; known are {known}")
    for name, value in given.items():
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise UsageError(f"{what} has {name} = {value!r}; known are {known}")
    return given


def _spent(timings: Mapping[str, float]) -> str:
    return ", ".join(f"{part} {seconds:.3f} s" for part, seconds in timings.items())

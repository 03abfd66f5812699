"""A checkpoint engine for verl: trainer ranks publish their shards, and rollout workers read the store.

Set `actor_rollout_ref.rollout.checkpoint_engine` to

    backend: delta_sharded
    custom_backend_module: patchstore.integrations.verl
    engine_kwargs: {delta_sharded: {store: s3://bucket/my-run}}

Importing this module puts the engine in the place of verl's own `delta_sharded`: under that name alone verl
hands over its training engine, which has the shards. What rollout workers read is handed on in verl's own
format, so verl's receivers inside of vLLM and SGLang write it.

With `publisher: {adapter: default}` a version is PEFT's adapter. Rollout workers hand it to the servers as
verl itself does where trainer and server share a process: so one method of verl's rollout workers asks here.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.checkpoint_engine.delta_sync.encode import DeltaParam, checksum

from patchstore.apply.replica import Replica, Staged
from patchstore.bucket.records import Manifest, Plan, Schema
from patchstore.errors import PublishFailed, SchemaMismatch, UsageError
from patchstore.publish.options import seconds
from patchstore.publish.publisher import Publisher
from patchstore.publish.sources import LocalPart
from patchstore.publish.sources.pieces import local_shape
from patchstore.read.download import chunks
from patchstore.read.host_cache import HostCache
from patchstore.read.run import Run
from patchstore.stores import layout, open_store
from patchstore.tensors.bits import TensorPatch
from patchstore.tensors.columns import patches

BACKEND = "delta_sharded"
_ENGINES = "verl.workers.engine."
_DIRECT = {"fsdp", "torchtitan"}
"""verl's engines whose shards are parts of a checkpoint's tensors, unless they say how to convert them.
Megatron's have names and shapes of their own, and do not say so."""

_MERGE = "actor_rollout_ref.model.lora.merge"
_OPTION = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{BACKEND}.publisher.adapter"

_MAX_ENTRY = 64 << 20
"""Elements of one entry of a flush: verl's receivers take 8 bytes for each, and more, while they decode."""

Flush = list[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[untyped-decorator, unused-ignore]
class PatchstoreCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One trainer rank's, or one rollout worker's, end of the weight sync through a store.

    A rollout worker keeps a copy of the served weights in host memory, against which each version is proved.
    """

    wire_format = "delta_flush"

    def __init__(
        self,
        bucket_size: int,
        *,
        store: str = "",
        is_master: bool | None = None,
        storage_options: Mapping[str, Any] | None = None,
        publisher: Mapping[str, Any] | None = None,
        scratch: str | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        """Prepare; nothing is opened until the first sync.

        Args:
            bucket_size: bytes that a rollout worker hands to verl's receiver at a time.
            store: URL of the store, which all trainer ranks and rollout workers reach.
            is_master: whether this is trainer rank 0; None in rollout workers. verl passes these two.
            storage_options: how it is opened: see `patchstore.open_store`.
            publisher: arguments of `Publisher`, such as `anchor_every`; `resume` is "auto" if not given. With
                `adapter` rollout workers have their servers load the adapter.
            scratch: a folder of this user alone on a local disk, in which the rollout workers of a host share
                what they download; None if each downloads alone.
            timeout_s: how long rollout workers wait for a version.

        Raises:
            UsageError: there is no store.
        """
        if not store:
            raise UsageError(
                f"set checkpoint_engine.engine_kwargs.{BACKEND}.store to the URL of a store, such as "
                "s3://bucket/my-run"
            )
        self._url, self._options = store, dict(storage_options or {})
        self._arguments = {"resume": "auto", **dict(publisher or {})}
        self.is_adapter = self._arguments.get("adapter") is not None
        """Whether versions are those of an adapter."""
        self._bucket_bytes, self._is_master = bucket_size, bool(is_master)
        self._scratch, self._timeout_s = scratch, seconds("timeout_s", timeout_s)
        self._board: TCPStore | None = None
        """Where trainer rank 0 says which version a sync led to."""
        self._round = 0
        self._meeting: Mapping[str, Any] = {}
        self._engine: Any = None
        self._is_gathered = False
        self._publisher: Publisher | None = None
        self._publishing = ExitStack()
        """Ends the publisher, and its store."""
        self._replica: Replica | None = None

    def prepare(self) -> dict[str, Any]:
        """Begin a sync. Trainer rank 0 returns where the others find it."""
        if not self._is_master:
            return {}
        host = _own_address()
        if self._board is None:
            self._board = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        else:
            self._board.delete_key(str(self._round))
        self._round += 1
        return {"host": host, "port": self._board.port, "round": self._round}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give all workers what trainer rank 0 returned from `prepare`."""
        found = next((each for each in metadata[:actor_wg_world_size] if each), None)
        if found is None:
            raise UsageError(
                "no trainer rank was made with is_master=True: make one of them so, as it numbers versions"
            )
        return {"meeting": [found] * actor_wg_world_size}, {"meeting": [found] * rollout_world_size}

    def init_process_group(self, meeting: Mapping[str, Any]) -> None:
        """Take note of where trainer rank 0 is; there is no group of processes."""
        self._meeting = meeting

    def finalize(self) -> None:
        """Keep everything: the next sync needs it."""

    def close(self) -> None:
        """End the publisher, or what a rollout worker reads with; the next sync opens the store anew.

        verl does not call this: a job that just ends has its publisher closed by Python's end.

        Raises:
            PublishFailed, VersionConflict: see `Publisher.close`.
        """
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.store.close()
        self._publisher = None
        self._publishing.close()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish what changed as the next version, on every trainer rank, and name it to rollout workers.

        Args:
            weights: verl's training engine.
            global_steps: kept as the version's step; None to count syncs.

        Returns:
            On rank 0, figures for verl's log; empty on the others.

        Raises:
            PatchstoreError: see `Publisher`. Rollout workers then raise `PublishFailed`, and keep what they
                serve.
        """
        said: dict[str, Any] = {}
        try:
            count = int(self._meeting.get("round", 0))
            manifest = self._publish(weights, count if global_steps is None else global_steps)
            said = {"version": manifest.version}
        except BaseException as exc:
            said = {"error": f"{type(exc).__name__}: {exc}"}
            raise
        finally:
            if self._board is not None:
                self._board.set(str(self._round), json.dumps(said))
        return self._figures(manifest) if self._is_master else {}

    def _publish(self, engine: Any, step: int) -> Manifest:
        if self._publisher is None:
            if not hasattr(engine, "get_per_tensor_param_shard"):
                raise UsageError(
                    f"verl hands over its training engine under the name {BACKEND} alone; set "
                    f"checkpoint_engine.backend to it, not to another name of this class (got {engine!r:.80})"
                )
            self._engine = engine
            source = _with_adapter(engine) if self.is_adapter else self._items
            self._is_gathered = not self.is_adapter and self._needs_gather()
            is_one_of_several = dist.is_initialized() and dist.get_world_size() > 1
            with ExitStack() as begun:
                store = open_store(self._url, **self._options)
                begun.callback(store.close)
                self._publisher = Publisher(
                    store,
                    source,
                    group=dist.group.WORLD if is_one_of_several else None,
                    **self._arguments,
                )
                begun.callback(self._publisher.close)
                self._publishing = begun.pop_all()
        return self._publisher.publish_once(step).result()

    def _needs_gather(self) -> bool:
        """Whether the engine's shards are no boxes of a checkpoint's tensors; the same on all ranks."""
        modules = [cls.__module__ for cls in type(self._engine).__mro__]
        named = [name.removeprefix(_ENGINES) for name in modules if name.startswith(_ENGINES)]
        if not named or named[0].partition(".")[0] not in _DIRECT:
            return True
        try:
            exported, _ = self._engine.get_per_tensor_param_shard()
            found = [(name, spec) for name, _, spec in exported]
        except NotImplementedError:
            return True
        return any(
            spec.to_hf_chunk is not None or spec.hf_slots is not None or _is_adapted(name)
            for name, spec in found
        )

    def _items(self) -> Iterator[tuple[str, Any]]:
        """Yield what this rank has; a pass."""
        if not self._is_gathered:
            exported, _ = self._engine.get_per_tensor_param_shard()
            for name, local, spec in exported:
                yield name, _placed(local, spec)
            return
        exported, adapter = self._engine.get_per_tensor_param()
        if adapter is not None:
            raise UsageError(
                f"verl keeps the adapter beside the base: set {_OPTION}=default to publish the adapter, or "
                f"{_MERGE}=True to publish merged weights"
            )
        yield from exported

    def _figures(self, manifest: Manifest) -> dict[str, float]:
        found = {"checkpoint_engine/version": float(manifest.version)}
        payloads = [*(manifest.delta.payloads if manifest.delta else ())]
        payloads += manifest.anchor.payloads if manifest.anchor else ()
        found["checkpoint_engine/payload_mbytes"] = sum(each.size for each in payloads) / 2**20
        if manifest.delta is not None:
            found["checkpoint_engine/changed_elems"] = float(manifest.delta.num_changed)
            assert self._publisher is not None, "it has published this version"
            found["checkpoint_engine/changed_ratio"] = manifest.delta.share_changed(self._publisher.schema)
        return found

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[Flush, bool]]:
        """Yield the version that the trainer published, as verl's receivers take it.

        verl's adapter for SGLang wants a plain generator, so this blocks. The version is downloaded and
        proved before the first yield. If it changes nothing, nothing is yielded. If the caller stops early,
        the next sync hands over the whole model.

        Yields:
            Named tensors of one flush, and whether it is the last.

        Raises:
            PublishFailed: the trainer could not publish, or named no version in time.
            PatchstoreError: see `Replica.stage`. Nothing was yielded.
            UsageError: the run is one of an adapter, for which `receive_adapter` is there.
        """
        if self.is_adapter:
            # A server would take it for weights of its base.
            raise UsageError("this release of verl updates servers in another way; 0.9.1 is known to work")
        version = self._told()
        replica = self._replica
        if replica is None:
            replica = self._open()
        # Until all of it was taken: after half of it, it is not known what a server has.
        self._replica = None
        try:
            staged = replica.stage(version)
            changed = _entries(staged, replica)
            if is_whole := _has_nan(staged, replica.header.schema):
                replica.apply(staged)
                changed = _all_entries(replica)
            device = _device()
            waiting: Flush | None = None
            for flush in _flushes(changed, self._bucket_bytes, device):
                if waiting is not None:
                    yield waiting, False
                waiting = flush
            if waiting is not None:
                yield waiting, True
            if not is_whole:
                replica.apply(staged)
            self._replica = replica
        finally:
            if self._replica is None:
                replica.store.close()

    def receive_adapter(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the version of an adapter that the trainer published: tensors on the CPU, and its config.

        The tensors are those of this engine, which the next call writes into.

        Raises:
            PublishFailed: the trainer could not publish, or named no version in time.
            PatchstoreError: see `Replica.update`.
        """
        version = self._told()
        replica, self._replica = self._replica or self._open(), None
        try:
            replica.update(version)
            run = Run(replica.store, replica.header)

            def config(way: Plan) -> Any:
                assert way.anchor is not None and way.anchor.anchor is not None
                files = {each.key.rpartition("/")[2]: each for each in way.anchor.anchor.files}
                return json.loads(b"".join(chunks(run.store, files[layout.ADAPTER_CONFIG])))

            found = dict(replica.tensors), run.reach(version, config)
            self._replica = replica
        finally:
            if self._replica is None:
                replica.store.close()
        return found

    def _told(self) -> int:
        """Wait until trainer rank 0 names a version."""
        where = self._meeting
        said: dict[str, Any] = {}
        try:
            board = TCPStore(
                where["host"],
                where["port"],
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout_s),
            )
            said = json.loads(board.get(str(where["round"])))
        except (RuntimeError, ValueError) as exc:
            raise PublishFailed(
                f"trainer rank 0 at {where['host']}:{where['port']} named no version within "
                f"{self._timeout_s:g} s: {exc}"
            ) from exc
        if "error" in said:
            raise PublishFailed(f"the trainer could not publish: {said['error']}")
        return int(said["version"])

    def _open(self) -> Replica:
        cache = None if self._scratch is None else HostCache(Path(self._scratch))
        store = open_store(self._url, **self._options)
        try:
            return Replica(store, {}, cache=cache)
        except BaseException:
            with suppress(Exception):
                store.close()
            raise


_update_weights = CheckpointEngineWorker.update_weights


@wraps(_update_weights)
async def _update(worker: Any, global_steps: int | None = None) -> None:
    """Have a rollout worker's server load the version of an adapter; all else is verl's."""
    engine = worker.checkpoint_engine
    if not isinstance(engine, PatchstoreCheckpointEngine) or not engine.is_adapter:
        await _update_weights(worker, global_steps=global_steps)
        return
    if "dummy" in worker.rollout_config.load_format:
        raise UsageError(
            "the servers began with random weights, and an adapter does not bring the base: set "
            "actor_rollout_ref.rollout.load_format=auto"
        )
    tensors, config = engine.receive_adapter()
    await worker.server_adapter.update_weights(
        iter(tensors.items()), global_steps=global_steps, peft_config=config, base_sync_done=True
    )


CheckpointEngineWorker.update_weights = _update


def _with_adapter(engine: Any) -> torch.nn.Module:
    """Return the model of verl's engine whose adapter is published."""
    model = getattr(engine, "module", None)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{type(engine).__name__} of verl has no PEFT model, as its engine for FSDP has: publish merged "
            f"weights ({_MERGE}=True), without {_OPTION}"
        )
    if isinstance(model, FullyShardedDataParallel):
        raise UsageError(
            "adapters are published of models that FSDP2 shards: set actor_rollout_ref.actor.strategy=fsdp2"
        )
    if engine.model_config.lora.get("merge", False):
        raise UsageError(
            f"with {_MERGE}=True verl starts servers that load no adapters: leave it out, or {_OPTION}"
        )
    return model


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]") if ray.is_initialized() else "127.0.0.1"


def _device() -> torch.device:
    """Return where verl's receivers expect tensors."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type)


def _is_adapted(name: str) -> bool:
    return "base_layer" in name.split(".") or ".lora_" in name


def _placed(local: torch.Tensor, spec: Any) -> Any:
    """Return the elements of a shard, contiguous, with the place that verl's `ShardSpec` gives them."""
    shape = tuple(spec.full_shape)
    if isinstance(spec.place, int):
        return LocalPart(local, shape, offset=spec.place)
    if spec.place is not None:
        return LocalPart(
            local.view(tuple(spec.place.local_shape)), shape, start=tuple(spec.place.global_offset)
        )
    if spec.mesh is None:
        return local.view(shape)
    return DTensor.from_local(
        local.view(local_shape(shape, spec.mesh, spec.placements)),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


# What a version changes, in the format of verl's receivers inside of vLLM and SGLang.


class _Entry(NamedTuple):
    """Elements of one tensor."""

    name: str
    shape: tuple[int, ...]
    indices: torch.Tensor | None
    """Positions in the flattened tensor; None for all of it."""
    values: torch.Tensor


def _has_nan(staged: Staged, schema: Schema) -> bool:
    """Whether NaN is among changed elements, which verl's receivers take for elements that did not change."""
    values = (patch.values for patch in _patches(staged, schema))
    return any(each.is_floating_point() and bool(each.isnan().any()) for each in values)


def _patches(staged: Staged, schema: Schema) -> Iterator[TensorPatch]:
    """Yield the elements that an update writes."""
    for group in sorted(staged.changes, key=lambda group: schema.tensors[group.numbers[0]].dtype):
        yield from patches(group, schema)


def _flushes(wanted: Iterator[_Entry], most_bytes: int, device: torch.device) -> Iterator[Flush]:
    """Yield entries in verl's format: of one dtype each, and of about `most_bytes`."""
    held: list[_Entry] = []
    num_bytes = 0
    for entry in wanted:
        if held and (num_bytes >= most_bytes or held[0].values.dtype != entry.values.dtype):
            yield _flush(held, device)
            held, num_bytes = [], 0
        held.append(entry)
        num_bytes += entry.values.nbytes + (0 if entry.indices is None else 4 * len(entry.indices))
    if held:
        yield _flush(held, device)


def _all_entries(replica: Replica) -> Iterator[_Entry]:
    """Yield all tensors as they are."""
    for spec in sorted(replica.header.schema.tensors, key=lambda spec: (spec.dtype, spec.name)):
        yield _Entry(spec.name, spec.shape, None, replica.tensors[spec.name].reshape(-1))


def _entries(staged: Staged, replica: Replica) -> Iterator[_Entry]:
    """Yield what an update writes."""
    schema = replica.header.schema
    specs = schema.by_name()
    for name in sorted(staged.full, key=lambda name: (specs[name].dtype, name)):
        yield _Entry(name, specs[name].shape, None, staged.full[name].reshape(-1))
    for patch in _patches(staged, schema):
        spec = specs[patch.name]
        if spec.num_elements >= 1 << 31:
            raise SchemaMismatch(f"{spec} has more elements than verl's receivers can address, 2**31 - 1")
        for first in range(0, len(patch.indices), _MAX_ENTRY):
            some = slice(first, first + _MAX_ENTRY)
            yield _Entry(spec.name, spec.shape, patch.indices[some].to(torch.int32), patch.values[some])


def _flush(entries: list[_Entry], device: torch.device) -> Flush:
    is_dense = entries[0].indices is None
    params = []
    end = 0
    for entry in entries:
        start, end = end, end + len(entry.values)
        params.append(
            DeltaParam(
                name=entry.name,
                dtype=str(entry.values.dtype).removeprefix("torch."),
                shape=list(entry.shape),
                pos_start=0 if is_dense else 4 * start,
                pos_end=0 if is_dense else 4 * end,
                pos_width=4,
                val_start=start,
                val_end=end,
            )
        )
    values = torch.cat([entry.values for entry in entries]).to(device)
    listed = [entry.indices for entry in entries if entry.indices is not None]
    positions = torch.cat(listed).view(torch.uint8) if listed else torch.empty(0, dtype=torch.uint8)
    positions = positions.to(device)
    told = {
        "encoding": "dense" if is_dense else "indices",
        "verify": False,
        "params": [vars(param) for param in params],
        "checksum": int(checksum(positions, values)),
    }
    spec = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8).to(device)
    found = [("__delta_spec__", spec), ("__values__", values)]
    return found if is_dense else [found[0], ("__positions__", positions), found[1]]

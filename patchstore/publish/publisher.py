"""Publish a training run's weights: each call makes one version of exactly what changed.

Changes are found by comparing bits with a snapshot of what was published last, never inferred from
the optimiser, so any number of steps may lie between two calls. The training loop waits for that
comparison; `pipeline` does the rest on threads.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Literal, Self

import torch

from patchstore.bucket import history, notes, schema_text
from patchstore.bucket.lineage import Every
from patchstore.bucket.manifest_json import MAX_INTEGER
from patchstore.bucket.records import Adapter, Schema, StoreHeader, TensorSpec
from patchstore.errors import PublishFailed, UsageError, VersionConflict
from patchstore.publish import at_exit, ranks
from patchstore.publish import snapshot as snapshots
from patchstore.publish.base_checkpoint import BaseCheckpoint, check_fits
from patchstore.publish.compactor import Compaction, CompactorProcess, job_of
from patchstore.publish.open import Agreed, Settings, agree, open_run
from patchstore.publish.options import (
    Resume,
    anchor_interval,
    check_encoding,
    check_process,
    chosen_encoding,
    encoding_of_rollups,
    is_distributed,
    on_one_rank,
    seconds,
    signer_name,
    threads_start,
)
from patchstore.publish.pipeline import Pipeline, Publication
from patchstore.publish.report import Report, metrics_of
from patchstore.publish.sources import Source
from patchstore.publish.sources.adapter import AdapterSource, PeftAdapter
from patchstore.publish.sources.dtypes import Asked, DtypeLike
from patchstore.publish.sources.weights import ServedSource
from patchstore.quantization import check_config, quantization_of
from patchstore.signing import Signer
from patchstore.stores import opened
from patchstore.stores.base import Store
from patchstore.support.arguments import whole_number
from patchstore.support.threads import Worker
from patchstore.support.tracing import Stages

__all__ = ["Publication", "Publisher", "Source"]

logger = logging.getLogger(__name__)

_NEVER = 2**53
"""Publications from one anchor to the next where none is wanted."""


class Publisher:
    """The one writer of a run. Use from one thread; close it, or use it as a context manager.

    A publisher that is not closed keeps its threads and its snapshot until the interpreter ends. It is
    closed then. If something cannot be stored at that point, stderr says what, and the process exits with
    status 1; after an uncaught exception the status stays that of the exception.

    Memory: a snapshot of the served weights, where `snapshot` says; the payloads of at most `max_pending`
    publications in host memory (pinned, where a GPU encoded them); a few parts of 8 MiB in transfer. On a GPU
    also a buffer for the changes: 18 bytes per changed word of 8 bytes, at first for one word in 64 (3.5 % of
    the weights); and while they are encoded the payload, and for `context` 22 bytes per change and 110 per
    tile of at most 65,536 elements. The next call waits until the changes are encoded; on the CPU `context`
    takes a second for 70 million elements. An anchor is uploaded from the snapshot itself, so the second call
    after an anchor waits until it is stored.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        source: Source,
        *,
        adapter: str | PeftAdapter | None = None,
        dtype: DtypeLike | Mapping[str, DtypeLike] = "auto",
        encoding: str = "auto",
        anchor_every: int | Literal["auto"] | None = 64,
        compact: bool = False,
        files: str | os.PathLike[str] | None = None,
        resume: bool | int | Literal["anchor", "auto"] = False,
        max_pending: int = 2,
        max_shard_bytes: int = 5_000_000_000,
        snapshot: snapshots.Place = "device",
        group: "torch.distributed.ProcessGroup | None" = None,
        rank_timeout_s: float = 600.0,
        signer: Signer | None = None,
        quantization: str | None = None,
        metrics: object = None,
    ) -> None:
        """Create a run, or claim an existing one with `resume`.

        If the source has tensors that are sharded over several ranks (DTensors, or partitions of DeepSpeed's
        ZeRO-3), each of these ranks opens a publisher with the same arguments, and makes the same calls.
        Otherwise one rank does so alone, or several with `group`.

        Args:
            store: an open store, or the URL or path of one, which is opened and closed with the publisher.
                `open_store(url, timeout_s=...)` says how long a request may take.
            source: the model, or its tensors by name, or a function that yields names and tensors anew in
                each pass: two to open the publisher, one in each publication. Values may be `LocalPart`. A
                model of transformers is published under the names that its `save_pretrained` writes.
                Names, shapes, parts and tied tensors must stay the same; there may be other tensor objects
                under the names at each call. The prefixes of torch.compile, DistributedDataParallel and
                activation checkpointing are removed from names; adapters of PEFT are merged, and layers that
                a library has quantized are dequantized. `mapped` publishes under other names.
            adapter: publish this adapter of a PEFT model instead of whole weights: its tensors, as PEFT names
                and saves them, and its config in every full version, which is a PEFT folder. A name, or a
                `PeftAdapter`, which can say more of the base. Of a mapping with PEFT's names, `files` is a
                folder with the config.
            dtype: the dtype in which weights are compared and served, such as torch.bfloat16 or "bfloat16".
                "auto" is bfloat16 for whole weights, and for an adapter each tensor's own. Some tensors keep
                another one. These are: weights that the checkpoint in `files`
                has in another dtype than most of its elements; without such a checkpoint, those that a model
                of transformers keeps in float32; and in a source whose elements are mostly of 16 bits, those
                that are wider. A mapping of patterns of names to dtypes goes before all of that, such as
                {"*.gate.weight": "float32"}; * stands for any characters. None: every tensor in its own.
            encoding: how changes are stored. "raw": positions, 6 bytes per change in bf16. "gap": distances
                between positions, 4 bytes. "context": encoded against the parent, whose tensors a reader
                needs, about 0.9 bytes. "auto": "context" where kernels encode it; on the CPU, where it takes
                longer, "context" for tensors of which "gap" would take more than a quarter of their bytes,
                and "gap" for the others. With "auto" an anchor takes the place of a delta that is larger.
            anchor_every: publications from one anchor to the next; the versions in between store
                changes only. "auto": an anchor when the deltas since the last one have its size. None: only
                what no delta can reach, or no smaller one, is an anchor, such as version 0;
                `patchstore compact` can add others.
            compact: another process on this host adds the anchors that `anchor_every` asks for, and rollups
                for readers that are far behind. So no call waits for the upload of a periodic anchor. The
                process reads from the store what it needs, and ends with the publisher. Its failures are
                warnings, and in `compaction`. The store must be one that another process can open.
            files: a checkpoint folder whose config and tokenizer files go into every anchor. Its config must
                fit the source: the same sizes, ties that are there, quantized as the tensors are. If it has
                weights, they must have the source's names and shapes, and they say in which dtype each
                tensor is served; see `dtype`.
            resume: False for a new run. True to continue from the newest version that has exactly these
                weights; a number to continue from that version, which must have them. "anchor" to continue
                after the newest version with any weights, by publishing all of them. "auto" begins a run if
                there is none; otherwise it is True if a version has these weights, and "anchor" if not.
            max_pending: publications under way before `publish_patch` waits.
            max_shard_bytes: the most bytes of each of an anchor's files. A smaller model has about eight, of
                1 GB or more, which are moved at once.
            snapshot: where to keep the last published weights for comparison. "device": beside the weights,
                compared at the speed of their memory. "host": in host memory, pinned where kernels compare;
                takes no memory of the device, and a comparison takes a little longer than copying the
                snapshot over the bus.
            group: the ranks that publish together, each of them with a publisher of its own: a process group
                of torch.distributed. Each publishes what it has; of tensors that several have, one of them is
                chosen. If not given, these are the ranks of the mesh of sharded tensors; with ZeRO-3, all.
            rank_timeout_s: how long to wait for another rank, to open the publisher and in each publication.
            signer: signs each version before it exists, such as `patchstore.signing.KeySigner`. Costs one
                small upload per version. Ranks that publish together give the same signer. With it, `resume`
                builds only on versions that it has signed.
            quantization: None to publish weights as they are. "fp8-block": weights of linear layers as E4M3
                codes with a scale per block of 128 x 128, as checkpoints of DeepSeek-V3 and Qwen3 in FP8
                are. "fp8-channel": with a scale per row, as compressed-tensors writes them. Servers then
                serve FP8 and compute nothing. A version's anchor is an ordinary checkpoint in FP8. `files`
                says which layers are quantized, if it is the folder of such a checkpoint; otherwise all are
                but embeddings, heads, norms and routers.
            metrics: takes the figures of each version that is committed: a function of the step and of
                numbers by name; TensorBoard's `SummaryWriter`; a run of W&B, whose next row they are added
                to; or `mlflow`, whose run is active now. It is called in the order of versions, on a thread
                that publications do not wait for, but `close` does. What it raises is a warning, once. Of
                several ranks only the one that commits calls it. docs/observability.md has the names.

        Raises:
            RunExists: the store has a run and `resume` is False.
            IsReplica: the store is a replica, which `patchstore replicate` alone writes to.
            ResumeMismatch: no version that is kept, and that the signer has signed if there is one, has these
                weights; or the one named is not such a version.
            VersionRetired: the version to resume from is retired.
            SchemaMismatch: a tensor cannot be stored, has numbers that `dtype` cannot hold, or the run was
                created with other tensors.
            UnsupportedStore: the store cannot create exclusively.
            StoreUnavailable: the store does not answer.
            RankFailed: another rank of the group failed, or did not open a publisher in time.
            UsageError: an argument is impossible, or differs among ranks; `dtype` would round the scales of
                weights that are quantized already; memory for the snapshot is short, or the system starts no
                more threads; no run was created.
            VersionConflict: another publisher claimed the run at the same time.
        """
        chosen_adapter = PeftAdapter.of(adapter)
        if chosen_adapter is not None and quantization is not None:
            raise UsageError("adapters are published as they are: leave quantization= out, or adapter=")
        self._asked = Asked.of(dtype, None if chosen_adapter else torch.bfloat16)
        every = anchor_interval(anchor_every, compact=compact)
        # The process beside this one makes them.
        self._anchor_every: Every = _NEVER if every is None or compact else every
        self._max_pending = whole_number("max_pending", max_pending, least=1)
        snapshots.check_place(snapshot)
        check_encoding(encoding)
        self._base = base = BaseCheckpoint(files)
        if not is_distributed():
            # Among ranks, the one that commits reads them: the others may lack the folder.
            base.files(of_adapter=chosen_adapter is not None)
        chosen = None
        if quantization is not None:
            # Each rank rounds its own part, so each needs the rule.
            chosen = quantization_of(quantization, base.files(), base.specs, base.unread)
        settings = Settings(
            dtype=str(self._asked),
            encoding=encoding,
            anchor_every=self._anchor_every if every is None else every,
            max_pending=self._max_pending,
            compact=compact,
            resume=Resume.of(resume),
            max_shard_bytes=whole_number("max_shard_bytes", max_shard_bytes, least=1),
            rank_timeout_s=seconds("rank_timeout_s", rank_timeout_s),
            signer=signer_name(signer),
            quantization=None if chosen is None else chosen.described(),
            adapter=None if chosen_adapter is None else str(chosen_adapter),
        )
        self._metrics = metrics_of(metrics)
        self._signer = signer
        self._quantization = chosen
        self._adapter = None if chosen_adapter is None else AdapterSource(source, chosen_adapter)
        at_exit.check_still_running()
        self._process = os.getpid()
        self._closed = False
        self._once: int | None = None
        """The step of the last call of `publish_once`."""
        self._compactor: CompactorProcess | None = None
        self._amax: ranks.BlockAmax | None = None
        """What ranks share to round weights to FP8, if they do."""
        self._closing = ExitStack()
        with self._closing:
            self._store = self._closing.enter_context(opened(store))
            job = None
            if compact:
                assert every is not None
                job = job_of(self._store, every)
            with _gradients_as_they_are(), _out_of_inference(), threads_start():
                is_leader = self._open(self._adapter or source, settings, snapshot, group)
            if job is not None and is_leader:
                self._compactor = CompactorProcess(job, encoding_of_rollups(self._encoding))
                self._closing.callback(self._compactor.stop)
                self._compactor.start()
            at_exit.expect(self)
            # Opened: from here on `close` ends what was begun.
            self._closing = self._closing.pop_all()

    def _open(
        self,
        source: Source,
        settings: Settings,
        snapshot: snapshots.Place,
        group: "torch.distributed.ProcessGroup | None",
    ) -> bool:
        """Open the run, and return whether this process commits."""
        failure: Exception | None = None
        begun: StoreHeader | None = None
        try:
            # A read first: if the store does not answer, it fails at once; the probe would try repeatedly.
            notes.check_writable(self._store)
            begun = history.read_header(self._store)
        except Exception as exc:  # noqa: BLE001 -- raised below, when other ranks can hear of it
            failure = exc
        stored = () if begun is None else begun.schema.by_name()
        self._source = given = ServedSource(source, self._asked.default, stored, self._quantization)
        try:
            # Also after a failure: it tells which ranks must hear of that.
            given.read()
        except Exception as exc:  # noqa: BLE001 -- as above
            failure = failure or exc
        self._channel = channel = ranks.connect(group, given.ranks, settings.rank_timeout_s)
        self._closing.callback(channel.leave)

        def check_schema(schema: Schema) -> tuple[Mapping[str, bytes], Adapter | None]:
            self._asked.check_used(schema)
            if self._adapter is not None:
                files = self._adapter.files(self._base.files(of_adapter=True))
                return files, self._adapter.described(files)
            found = self._base.files()
            check_fits(found, given.given, schema, self._base, given.untied)
            if self._quantization is not None:
                return self._quantization.complete(found, schema), None
            check_config(found, schema)
            return found, None

        with on_one_rank() if channel.is_alone else nullcontext():
            agreed = agree(
                *(channel, self._store, begun, given, failure),
                asked=self._asked,
                check_schema=check_schema,
                base=self._base,
                settings=settings,
            )
            return self._start(agreed, begun, settings, snapshot)

    def _start(
        self,
        agreed: Agreed,
        begun: StoreHeader | None,
        settings: Settings,
        snapshot: snapshots.Place,
    ) -> bool:
        parts = agreed.share.parts
        self._source.choose(parts)
        if self._quantization is not None:
            self._amax = ranks.BlockAmax(self._channel.twin("maxima"))
            self._closing.callback(self._amax.leave)
            self._source.share(self._amax.exchange)
        specs = [TensorSpec(name=part.key, dtype=part.spec.dtype, shape=part.size) for part in parts]
        current = self._source.first()
        workers: list[Worker] = []

        def prepare() -> snapshots.Snapshot:
            self._snapshot = _snapshot(current, specs, snapshot)
            # Before anything is written: without its threads a publisher could not go on.
            names = ("check", "state", "upload", "encode", "report")
            workers.extend(self._started(f"patchstore-{name}") for name in names)
            return self._snapshot

        run = open_run(
            *(self._channel, self._store, begun, agreed),
            prepare=prepare,
            workers=workers,
            base=self._base,
            settings=settings,
            signer=self._signer,
        )
        self._encoding = chosen_encoding(
            settings.encoding, has_kernels=self._snapshot.has_kernels, of_adapter=self._adapter is not None
        )
        self.run_id = run.header.run_id
        self.schema = run.header.schema
        """The tensors of the run."""
        self._pipeline = Pipeline(
            *(run.header.schema, agreed.table, self._snapshot),
            self._encoding,
            run.committer,
            (workers[3], workers[2]),
            is_stored=run.is_stored,
            anchor_every=self._anchor_every,
            since_anchor=run.since_anchor,
            claimed=run.claimed,
            max_pending=self._max_pending,
            report=Report(self._metrics, run.header.schema, workers[4]) if self._channel.leads else None,
        )
        if self._channel.leads:
            self._say_dtypes(run.header.schema)
        return self._channel.leads

    def _say_dtypes(self, schema: Schema) -> None:
        """Log in which dtypes tensors are served, and who says so of those that have not the usual one."""
        if not logger.isEnabledFor(logging.INFO):
            return
        reasons: dict[str, list[str]] = {}
        for name, choice in self._source.choices.items():
            if choice.why:
                reasons.setdefault(choice.why, []).append(name)
        because = "".join(f"; {why} says so of {schema_text.alike(names)}" for why, names in reasons.items())
        logger.info("serving %s%s", schema_text.of_schema(schema), because)

    def _started(self, name: str) -> Worker:
        worker = Worker(name)
        self._closing.callback(worker.stop)
        return worker

    def publish_patch(self, step: int, *, if_changed: bool = False) -> Publication:
        """Publish what changed since the last call as the next version.

        Returns when the weights have been compared. They may be changed again then. The version exists when
        `result` of the returned publication returns.

        Args:
            step: the trainer's count, from -(2**53 - 1) to 2**53 - 1, because JSON keeps these exactly.
            if_changed: commit nothing where no bit differs, on any rank, from the version that this publisher
                committed last, or by which it resumed the run. `result` of the returned publication has that
                version's manifest then. A periodic anchor that is due waits for a change, too. All ranks give
                the same.

        Raises:
            PublishFailed: an earlier publication was not stored, and that was not raised yet. If this process
                publishes alone, this call published nothing, and the next one publishes the whole model. Of
                several ranks each has handed over this call's publication, because one rank may hear of the
                failure a call later than another.
            VersionConflict: another publisher has this run; this publisher can publish nothing any more.
            RunLost: the store no longer holds this run; nothing can be published any more.
            SchemaMismatch: names, shapes, dtypes or ties of the source have changed, or a number that changed
                is beyond the range of the dtype in which it is served. This call published nothing; once
                they are back, the next one goes on.
            UsageError: the step is not an integer, the publisher is closed, or this is a fork of the process
                that opened it. This call published nothing.
        """
        step = whole_number("step", step, least=-MAX_INTEGER, most=MAX_INTEGER)
        if self._closed:
            raise UsageError("this publisher is closed")
        check_process("publisher", self._process)
        if self._pipeline.conflict is not None:
            raise self._pipeline.conflict
        earlier = self._unreported()
        if earlier is not None and self._channel.is_alone:
            raise earlier
        stages = Stages()
        stages.begin("source")
        with _gradients_as_they_are(), _out_of_inference():
            try:
                if self._amax is not None:
                    self._amax.begin()
                current = self._source.current()
                found = self._pipeline.publish(step, current, stages, if_changed=if_changed)
            except Exception as exc:
                if self._amax is not None:
                    self._amax.abandon(exc)
                if not self._channel.is_alone:
                    self._pipeline.abandon(step, exc)
                raise
        if earlier is not None:
            # All ranks make the same calls, although one may hear of a failure before another.
            raise earlier
        return found

    def publish_once(self, step: int) -> Publication:
        """Publish a step as `publish_patch` does, unless its weights have a version already.

        That is so where no bit differs from the version by which this publisher resumed the run, at its first
        call, or from the one of the same step. It is for trainers that publish at moments which others
        choose. Raises as `publish_patch`.
        """
        may_have_version = self._once in {None, step}
        self._once = step
        return self.publish_patch(step, if_changed=may_have_version)

    @property
    def version(self) -> int | None:
        """The newest version that this publisher committed, also the one by which it resumed the run.

        None before the first. A call of `publish_patch` counts when its `result` is there.
        """
        newest = self._pipeline.newest
        return None if newest is None else newest.version

    @property
    def step(self) -> int | None:
        """The step of that version."""
        newest = self._pipeline.newest
        return None if newest is None else newest.step

    def __repr__(self) -> str:
        at = "no version yet" if self.version is None else f"version {self.version} (step {self.step})"
        under_way = len(self._pipeline.under_way())
        return (
            f"<Publisher of run {self.run_id} in {self._store.url}: {at}"
            f"{f', {under_way} under way' if under_way else ''}{', closed' if self._closed else ''}>"
        )

    @property
    def compaction(self) -> Compaction | None:
        """What the process beside this publisher has done; None without one, and on ranks without it."""
        return None if self._compactor is None else self._compactor.done

    def close(self) -> None:
        """Wait until everything published is committed or has failed, and end the threads.

        In a fork of the process that opened the publisher this does nothing.

        Raises:
            PublishFailed, VersionConflict: a publication failed, and that was not raised yet.
        """
        if os.getpid() != self._process:
            return
        self._closed = True
        self._pipeline.stop()
        self._closing.close()
        at_exit.forget(self)
        if (error := self._unreported()) is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except (PublishFailed, VersionConflict):
            if error is None:
                raise
            logger.exception("a publication failed too, while the trainer was failing")

    def _close_at_exit(self) -> str | None:
        """Close a publisher that was left open; raise nothing, but return a message if steps were lost."""
        unstored = self._unstored()
        try:
            self.close()
        except Exception as exc:  # noqa: BLE001 -- the process reports it, and exits with 1
            return self._loss(unstored, exc)
        return None

    def _lost(self, reason: object) -> str:
        """Return a message about the publications that are not stored, for `at_exit`."""
        return self._loss(self._unstored(), reason)

    def _unstored(self) -> list[Publication]:
        """Return the publications that are under way, or whose failure was not raised."""
        failed = [each for each in tuple(self._pipeline.failed) if not each.reported]
        return [*failed, *(each for each in self._pipeline.under_way() if each not in failed)]

    def _loss(self, unstored: list[Publication], reason: object) -> str:
        lost = [each.step for each in unstored if each._task is None or each._task.is_lost()]
        return (
            f"the process ended without Publisher.close(), and of {self._store.url} "
            f"step{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} could not be stored: {reason}. "
            'Restart with resume="auto", which publishes whatever weights the trainer has then'
        )

    def _unreported(self) -> BaseException | None:
        """Return why earlier publications were not stored, unless that was raised. The caller raises it."""
        failed = self._pipeline.failed
        unreported = [each for each in tuple(failed) if each.done() and not each.reported]
        while failed and failed[0].reported:
            failed.popleft()
        for publication in unreported:
            publication.reported = True
        if not unreported:
            return None
        # The later ones failed because the first did.
        assert unreported[0]._task is not None and unreported[0]._task.error is not None
        return unreported[0]._task.error


def _out_of_inference() -> AbstractContextManager[object]:
    """The snapshot outlives the caller's inference mode, so it must not be made of inference tensors."""
    # Not entered where it changes nothing: an interrupt while it is left would change the trainer's mode.
    return torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()


def _gradients_as_they_are() -> torch.set_grad_enabled:
    """Restore this thread's gradient mode also where an interrupt keeps torch.no_grad() from doing so."""
    return torch.set_grad_enabled(torch.is_grad_enabled())


def _snapshot(
    current: snapshots.Tensors, specs: Sequence[TensorSpec], place: snapshots.Place
) -> snapshots.Snapshot:
    """Copy tensors as they are served, or raise UsageError where memory is short."""
    devices = set(snapshots.devices_of(current).values())
    if not snapshots.have_kernels(devices):
        return snapshots.PlainSnapshot(current, specs, place)
    # Imports Triton.
    from patchstore.publish.snapshot_gpu import DeviceSnapshot

    return DeviceSnapshot(current, specs, place, devices.pop())

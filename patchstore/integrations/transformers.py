"""Publish the weights of a `Trainer` of transformers, and of every trainer that derives from it, as TRL's."""

import copy
import inspect
import logging
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from patchstore.bucket.records import Schema
from patchstore.errors import PatchstoreError, UsageError
from patchstore.publish.compactor import Compaction
from patchstore.publish.options import is_distributed
from patchstore.publish.publisher import Publication, Publisher
from patchstore.publish.report import BYTES, VERSION, figures
from patchstore.publish.sources.computed import is_coded
from patchstore.publish.sources.dtypes import Asked
from patchstore.publish.sources.layouts import of_transformers
from patchstore.stores import opened
from patchstore.stores.base import Store
from patchstore.support.arguments import whole_number

logger = logging.getLogger(__name__)

_DECIDED = {"self", "store", "source", "group", "files", "resume"}
"""Arguments of `Publisher` that the callback gives itself, or has under the same name."""
_OPTIONS = inspect.signature(Publisher.__init__).parameters.keys() - _DECIDED


class PublishCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes a trainer's weights: when training begins, behind steps, and when it ends.

    Pass it to the trainer on every rank: `Trainer(..., callbacks=[PublishCallback("s3://bucket/run")])`. A
    trainer of one process publishes alone. With several ranks each publishes its part, also with DDP, FSDP2,
    tensor parallelism and ZeRO; nothing is gathered. A version's `step` is the trainer's `global_step`.
    Adapters of PEFT are merged into copies, or with `adapter="default"` published as they are; quantized
    layers are dequantized. Tensors have the names that `save_pretrained` writes.

    The trainer waits for the comparison of the weights, not for the store. It gets in its log, with the loss,
    the figures of what was committed since the last time: the newest version, the sum of the bytes, and means
    of the others. Names are those of `Publisher(metrics=)`. A class that waits for servers adds
    `perf/weight_sync/serve_s`. In the log, this callback is asked before all others, so reporters get them.

    If something is not stored, the next step, log or end of training raises `PublishFailed`, and the trainer
    stops. After `train()` has returned, every version is committed.

    A step's version has the weights with which `on_step_end` finds the model. The last version has those that
    the model has when `train()` returns, which `save_model` would write. So at the end of training this
    callback is asked after all others, wherever it is in their list: one of them may put averaged weights, or
    those of the best checkpoint, in place. Optimisers whose `eval()` puts other weights in place, such as
    those of schedulefree, have their training weights in each step's version, and in the last one what the
    last step or evaluation left.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        every: int = 1,
        files: str | os.PathLike[str] | None = None,
        resume: bool | int | Literal["anchor", "auto"] = "auto",
        **options: Any,
    ) -> None:
        """Prepare; nothing is opened until training begins.

        Args:
            store: an open store, or the URL or path of one.
            every: steps from one publication to the next. The first and the last weights of each `train()`
                are published in any case. A run that is resumed has the first ones in the version by which it
                is: that changes nothing, and keeps older publishers out.
            files: a checkpoint folder whose config and tokenizer go into every full checkpoint; None for the
                trainer's own.
            resume: as `Publisher` takes it. By default a run begins, or goes on: from the version that has
                the weights with which training begins, or, if none has them, with a full checkpoint.
            options: further ones of `Publisher`, such as `anchor_every` and `snapshot`.

        Raises:
            UsageError: an argument is impossible.
        """
        if unknown := sorted(options.keys() - _OPTIONS):
            raise UsageError(
                f"{type(self).__name__} has no option {', '.join(unknown)}; of Publisher's it takes "
                f"{', '.join(sorted(_OPTIONS))}"
            )
        if not isinstance(store, Store | str | os.PathLike):
            raise UsageError(
                "a store is given by its URL, by a path, or as open_store returns it, not by "
                f"{type(store).__name__}"
            )
        self.every = whole_number("every", every, least=1)
        self._given_store, self._files, self._resume, self._options = store, files, resume, options
        self._closing = ExitStack()
        self._publisher: Publisher | None = None
        self._store: Store | None = None
        self._last: Publication | None = None
        self._measured = _Measured()
        _ask_in_order()

    @property
    def run_id(self) -> str | None:
        """The run that is published; None while no publisher is open."""
        return None if self._publisher is None else self._publisher.run_id

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the run, and publish the weights with which training begins, unless resumed with them."""
        self._abandon()
        self._open(kwargs["model"], kwargs.get("processing_class"))
        self._publish(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish each step that is due, and the last one."""
        if state.global_step % self.every == 0 or control.should_training_stop:
            self._publish(state.global_step)

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was committed since the last log."""
        if logs is None:
            return
        if "train_runtime" in logs:
            # The summary of the training, after its last step.
            self._measured.wait()
        self._log(state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the last weights, unless the last version has them, and wait until all is stored."""
        if self._publisher is None:
            return
        self._publish(state.global_step)
        self._close()
        self._log(state, {})

    def _open(self, model: torch.nn.Module, processing_class: Any) -> None:
        with ExitStack() as opening:
            self._store = opening.enter_context(opened(self._given_store))
            group = torch.distributed.group.WORLD if is_distributed() else None
            with _files(self._files, model, processing_class, self._options) as files:
                self._publisher = Publisher(
                    self._store,
                    model,
                    files=files,
                    resume=self._resume,
                    group=group,
                    **self._options,
                )
            self._measured.schema = self._publisher.schema
            self._closing = opening.pop_all()

    def _publish(self, step: int) -> Publication:
        """Publish a step, unless a version has its weights already."""
        assert self._publisher is not None, "opened when training begins"
        self._last = self._publisher.publish_once(step)
        self._measured.add(self._last)
        return self._last

    def _close(self) -> None:
        """Wait until everything is stored, and close what is open."""
        publisher, self._publisher, self._last = self._publisher, None, None
        with self._closing:
            if publisher is not None:
                publisher.close()
        self._store = None

    def _abandon(self) -> None:
        """Close what an earlier `train()` left open, as it failed."""
        if self._publisher is None:
            return
        try:
            self._close()
        except PatchstoreError:
            logger.exception("a publication of an earlier train() failed")
        self._measured = _Measured()

    def _log(self, state: Any, logs: dict[str, Any]) -> None:
        compaction = None if self._publisher is None else self._publisher.compaction
        # TRL's asynchronous trainer measures its own wait under one of these names.
        found = {name: value for name, value in self._measured.take(compaction).items() if name not in logs}
        logs.update(found)
        if not found:
            return
        newest = state.log_history[-1] if state.log_history else {}
        if newest.get("step") != state.global_step or not found.keys().isdisjoint(newest):
            state.log_history.append({"step": state.global_step})
        # The trainer made its copy before it asked us.
        state.log_history[-1].update(found)


class _Measured:
    """Publications under way, and what was committed since it was last taken. Use from one thread."""

    def __init__(self) -> None:
        self.schema: Schema | None = None
        """Of the run that is published."""
        self._pending: deque[Publication] = deque()
        self._committed: list[dict[str, float]] = []
        """Figures of each version."""
        self._served_s: list[float] = []

    def add(self, publication: Publication) -> None:
        """Take note of a publication, which the trainer waited for while it was compared."""
        self._pending.append(publication)

    def add_wait(self, seconds: float) -> None:
        """Take note that the trainer waited for servers."""
        self._served_s.append(seconds)

    def wait(self) -> None:
        """Wait until everything is committed."""
        while self._pending:
            self._end(self._pending.popleft())

    def take(self, compaction: Compaction | None = None) -> dict[str, float]:
        """Return the figures of what was committed since the last call, as `PublishCallback` logs them; empty
        if nothing was. With a process beside the publisher also how many anchors it has added, and how often
        it failed.
        """
        while self._pending and self._pending[0].done():
            self._end(self._pending.popleft())
        committed, self._committed = self._committed, []
        served_s, self._served_s = self._served_s, []
        found = {
            name: fmean(each[name] for each in committed if name in each)
            for name in dict.fromkeys(name for each in committed for name in each)
        }
        if committed:
            found[VERSION], found[BYTES] = committed[-1][VERSION], sum(each[BYTES] for each in committed)
            if compaction is not None:
                found["weight_sync/anchors_beside"] = compaction.num_anchors
                found["weight_sync/failures_beside"] = compaction.num_failures
        if served_s:
            found["perf/weight_sync/serve_s"] = fmean(served_s)
        return found

    def _end(self, publication: Publication) -> None:
        manifest = publication.result()
        if not publication.is_unchanged:
            assert self.schema is not None
            self._committed.append(figures(publication, manifest, self.schema))


@cache
def _ask_in_order() -> None:
    """Have trainers ask publishing callbacks last when training ends, as the trainer asks no callback after
    that; and first when something is logged, before what reports it. Once in a process.

    A callback is not told of the others.
    """
    for name, place in (("on_train_end", 1), ("on_log", -1)):
        setattr(CallbackHandler, name, _in_order(getattr(CallbackHandler, name), place))


def _in_order(original: Callable[..., Any], place: int) -> Callable[..., Any]:
    @wraps(original)
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A copy: callbacks of the caller may take themselves off the list.
        ordered = copy.copy(self)
        ordered.callbacks = sorted(
            self.callbacks, key=lambda each: place if isinstance(each, PublishCallback) else 0
        )
        return original(ordered, *args, **kwargs)

    return ask


@contextmanager
def _files(
    given: str | os.PathLike[str] | None, model: Any, processing_class: Any, options: Mapping[str, Any]
) -> Iterator[str | os.PathLike[str] | None]:
    """Yield the folder of files for full checkpoints; None on ranks that do not read it."""
    within = of_transformers(model)
    inner = model if within is None else within
    config: Any = getattr(inner, "config", None)
    is_first = not is_distributed() or torch.distributed.get_rank() == 0
    is_adapter = options.get("adapter") is not None
    if given is not None or not is_first or is_adapter or not hasattr(config, "save_pretrained"):
        yield given
        return
    config = copy.deepcopy(config)
    config.dtype = Asked.of(options.get("dtype", torch.bfloat16)).usual or config.dtype
    if hasattr(config, "quantization_config") and any(map(is_coded, inner.modules())):
        # Published are the weights that these layers compute with.
        del config.quantization_config
    if not getattr(config, "architectures", None):
        config.architectures = [_class_name(inner)]
    with tempfile.TemporaryDirectory(prefix="patchstore-") as folder:
        parts: tuple[Any, ...] = (config, getattr(inner, "generation_config", None), processing_class)
        for part in parts:
            if hasattr(part, "save_pretrained"):
                try:
                    part.save_pretrained(folder)
                except (OSError, TypeError, ValueError) as exc:
                    raise UsageError(
                        f"{type(part).__name__} cannot be saved for full checkpoints ({exc}); give files=, a "
                        "folder with the config and the tokenizer"
                    ) from exc
        yield Path(folder)


def _class_name(model: torch.nn.Module) -> str:
    """Return the name of a model's class, without those that FSDP2 derives from it."""
    for each in type(model).__mro__:
        if not each.__name__.startswith("FSDP"):
            return each.__name__
    return type(model).__name__

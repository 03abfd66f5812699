"""What a publisher says of each version that it has committed: figures for charts, and a trace."""

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from patchstore.bucket.records import Manifest, Schema
from patchstore.errors import UsageError
from patchstore.publish.options import is_distributed
from patchstore.support import tracing
from patchstore.support.threads import Task, Worker

if TYPE_CHECKING:
    from patchstore.publish.pipeline import Publication

logger = logging.getLogger(__name__)

Metrics = Callable[[int, dict[str, float]], object]
"""Takes the trainer's step and what is to be charted, by name."""

VERSION, BYTES = "weight_sync/version", "weight_sync/bytes"


def figures(publication: "Publication", manifest: Manifest, schema: Schema) -> dict[str, float]:
    """Return the figures of a version, by the names of charts. Seconds begin with the call to publish it."""
    found = {
        VERSION: float(manifest.version),
        BYTES: float(manifest.num_bytes),
        "perf/weight_sync_s": publication.publish_s or 0.0,
        "perf/weight_sync/blocked_s": publication.waited_s,
    }
    if manifest.delta is not None:
        found["weight_sync/share_changed"] = manifest.delta.share_changed(schema)
    stages = publication.stages.seconds()
    return found | {f"perf/weight_sync/{stage}_s": seconds for stage, seconds in stages.items()}


class Report:
    """Reports what the process that commits has committed, on a thread that no publication waits for."""

    def __init__(self, metrics: Metrics | None, schema: Schema, thread: Worker) -> None:
        self._metrics, self._schema, self._thread = metrics, schema, thread
        self._has_failed = False

    def committed(self, publication: "Publication", manifest: Manifest) -> None:
        """Report a version, soon. A failure is a warning, the first time."""
        self._thread.hand_over(Task(partial(self._report, publication, manifest)))

    def _report(self, publication: "Publication", manifest: Manifest) -> None:
        for tell in (self._trace, self._chart):
            try:
                tell(publication, manifest)
            except Exception as exc:
                level = logging.DEBUG if self._has_failed else logging.WARNING
                self._has_failed = True
                logger.log(
                    level,
                    "version %d is committed, but its figures, or its trace, were not taken: %s: %s; this is "
                    "said once",
                    *(manifest.version, type(exc).__name__, exc),
                    exc_info=exc,
                )

    def _trace(self, publication: "Publication", manifest: Manifest) -> None:
        about: tracing.Attributes = {
            "patchstore.step": manifest.step,
            "patchstore.kind": manifest.kind,
            "patchstore.bytes": manifest.num_bytes,
        }
        tracing.record_root(publication.stages, manifest.run_id, manifest.version, about)

    def _chart(self, publication: "Publication", manifest: Manifest) -> None:
        if self._metrics is not None:
            self._metrics(manifest.step, figures(publication, manifest, self._schema))


def metrics_of(given: Any) -> Metrics | None:
    """Return the function that takes figures: what was given, or what gives them to a library's object.

    Raises:
        UsageError: it is neither; or it is MLflow, has no active run, and this process publishes alone.
    """
    if given is None or callable(given):
        return given  # type: ignore[no-any-return]
    add, log_metrics, log = (getattr(given, name, None) for name in ("add_scalar", "log_metrics", "log"))
    if callable(add):
        return partial(_each, add)
    if callable(log_metrics):
        run = _run_of(getattr(given, "active_run", None))
        return lambda step, values: log_metrics(values, step=step, **run())
    if callable(log) and _takes_commit(log):
        # A row of a step that the trainer has left is dropped, so it goes into the row that is not sent yet.
        return lambda step, values: log(values | {"weight_sync/step": step}, commit=False)
    raise UsageError(
        "metrics must be a function of a step and of numbers by name, TensorBoard's SummaryWriter, a run of "
        f"W&B, or mlflow, not a {type(given).__name__}"
    )


def _each(add: Callable[..., object], step: int, values: dict[str, float]) -> None:
    for name, value in values.items():
        add(name, value, step)


def _takes_commit(log: Callable[..., object]) -> bool:
    try:
        return "commit" in inspect.signature(log).parameters
    except ValueError:
        # Of a function in C, such as `math.log`.
        return False


def _run_of(active: Callable[[], Any] | None) -> Callable[[], dict[str, Any]]:
    """Return what names the run of MLflow that is active now, on this thread; each thread has its own."""
    if not callable(active):
        return dict
    found = active()

    def name() -> dict[str, Any]:
        if found is None:
            raise UsageError("metrics= is MLflow, which had no active run: call mlflow.start_run() before")
        return {"run_id": found.info.run_id}

    # Of several ranks one alone may have a run, and which of them commits is not known yet.
    if not is_distributed():
        name()
    return name

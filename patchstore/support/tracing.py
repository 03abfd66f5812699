"""When each stage of a piece of work began and ended, and OpenTelemetry's spans of that.

Each version has one trace. The trace's id, and that of its root span, follow from the run and the version's
number. So a trainer, a follower and the servers that it calls meet there, though the store has no word of it.

Nothing is recorded unless the process has a `TracerProvider` of OpenTelemetry's SDK.
"""

import copy
import hashlib
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

_NAME = "patchstore"
_SDK = "opentelemetry.sdk.trace"
_ROOT = "publish"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

Attributes = dict[str, str | int | float]


class Stages:
    """When the stages of one piece of work began and ended: one after the other, on any threads."""

    def __init__(self) -> None:
        """Begin the work; no stage yet."""
        # Of the monotonic clock, so that no stage is shorter because someone sets the time.
        self._since_1970_ns = time.time_ns() - time.monotonic_ns()
        self._stages: list[tuple[str, int, int | None]] = []
        self.began_ns = self._now_ns()
        """In nanoseconds since 1970, as all times here."""

    def begin(self, name: str) -> None:
        """Begin a stage, which ends the one before."""
        self.end()
        self._stages.append((name, self._now_ns(), None))

    def end(self) -> None:
        """End the stage that has not ended, if there is one."""
        if self._stages and self._stages[-1][2] is None:
            name, began_ns, _ = self._stages[-1]
            self._stages[-1] = name, began_ns, self._now_ns()

    @property
    def ended(self) -> list[tuple[str, int, int]]:
        """Name, begin and end of the stages that have ended."""
        return [(name, began, ended) for name, began, ended in self._stages if ended is not None]

    def seconds(self) -> dict[str, float]:
        """How long each stage took that has ended."""
        return {name: (ended_ns - began_ns) / 1e9 for name, began_ns, ended_ns in self.ended}

    def so_far_s(self) -> float:
        """Seconds since the work began."""
        return (self._now_ns() - self.began_ns) / 1e9

    def _now_ns(self) -> int:
        return self._since_1970_ns + time.monotonic_ns()


def record_root(stages: Stages, run_id: str, version: int, attributes: Attributes) -> None:
    """Record the root span of a version's trace, with a span for each stage. It ends with the last stage."""
    if (provider := _provider()) is None:
        return
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.trace import set_span_in_context

    trace_id, span_id = _ids(run_id, version)

    class Given(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            return trace_id

        def generate_span_id(self) -> int:
            return span_id

        def is_trace_id_random(self) -> bool:
            return False

    tracer = provider.get_tracer(_NAME)
    # A copy, as the provider returns the same tracer each time.
    first = copy.copy(tracer)
    first.id_generator = Given()  # type: ignore[attr-defined]
    about = _about(run_id, version) | attributes
    root = first.start_span(_ROOT, Context(), start_time=stages.began_ns, attributes=about)
    within = set_span_in_context(root, Context())
    for name, began_ns, ended_ns in stages.ended:
        tracer.start_span(name, within, start_time=began_ns).end(ended_ns)
    root.end(stages.ended[-1][2] if stages.ended else None)


@contextmanager
def in_trace_of(
    run_id: str, version: int, name: str, stages: Stages, attributes: Attributes
) -> Iterator[None]:
    """Record a span in a version's trace, which begins as `stages` did and has a span for each of them. What
    is recorded in the block, by this thread, lies within it. An error that leaves the block is the span's.
    """
    if (provider := _provider()) is None:
        yield
        return
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.sampling import Decision
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    trace_id, span_id = _ids(run_id, version)
    tracer = provider.get_tracer(_NAME)
    # As the trainer decides, if its sampler is alike: by the trace's id.
    decision = provider.sampler.should_sample(None, trace_id, _ROOT).decision
    flags = TraceFlags(TraceFlags.SAMPLED if decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT)
    root = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags))
    with tracer.start_as_current_span(
        name,
        set_span_in_context(root, Context()),
        start_time=stages.began_ns,
        attributes=_about(run_id, version) | attributes,
    ):
        for stage, began_ns, ended_ns in stages.ended:
            tracer.start_span(stage, start_time=began_ns).end(ended_ns)
        yield


@contextmanager
def span(name: str) -> Iterator[None]:
    """Record a span within the one that this thread is in; none outside of any."""
    provider = _provider()
    if provider is None or not _is_within():
        yield
        return
    with provider.get_tracer(_NAME).start_as_current_span(name):
        yield


def headers() -> dict[str, str]:
    """Return the headers of an HTTP request, `traceparent` of W3C, by which its server joins the trace."""
    found: dict[str, str] = {}
    if _provider() is not None and _is_within():
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(found)
    return found


def export() -> None:
    """Have a command export its spans if the environment says where to (`OTEL_EXPORTER_OTLP_ENDPOINT`).

    Not if it does already, as under `opentelemetry-instrument`. The SDK reads its other variables.
    """
    if not any(os.environ.get(name) for name in _ENDPOINTS) or _provider() is not None:
        return
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    exporter = f"opentelemetry.exporter.otlp.proto.{protocol.partition('/')[0]}.trace_exporter"
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        send = import_module(exporter).OTLPSpanExporter()
    except ImportError as exc:
        logger.warning(
            "no spans are exported: %s; install opentelemetry-sdk and opentelemetry-exporter-otlp-proto-%s",
            *(exc, protocol.partition("/")[0]),
        )
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", _NAME)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(send))
    trace.set_tracer_provider(provider)


def _provider() -> "TracerProvider | None":
    # Without the SDK there is no provider, and to import the API of that takes time.
    if (sdk := sys.modules.get(_SDK)) is None:
        return None
    from opentelemetry import trace

    found = trace.get_tracer_provider()
    return found if isinstance(found, sdk.TracerProvider) else None


def _is_within() -> bool:
    from opentelemetry import trace

    return trace.get_current_span().get_span_context().is_valid


def _ids(run_id: str, version: int) -> tuple[int, int]:
    """The ids of a version's trace and its root span, as docs/observability.md says."""
    found = hashlib.sha256(f"{_NAME}/{run_id}/{version}".encode()).digest()
    return int.from_bytes(found[:16]), int.from_bytes(found[16:24])


def _about(run_id: str, version: int) -> Attributes:
    return {"patchstore.run": run_id, "patchstore.version": version}

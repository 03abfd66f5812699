"""Spans that this process records."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

Spans = Callable[[], list[ReadableSpan]]


def trace_id(run_id: str, version: int) -> int:
    """As docs/observability.md says it."""
    return int(hashlib.sha256(f"patchstore/{run_id}/{version}".encode()).hexdigest()[:32], 16)


@contextmanager
def recording(sampler: Sampler | None = None) -> Iterator[Spans]:
    """Have this process record spans inside of the block."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
        yield lambda: list(exporter.get_finished_spans())


def named(found: list[ReadableSpan], name: str) -> ReadableSpan:
    (one,) = (each for each in found if each.name == name)
    return one


def within(found: list[ReadableSpan], outer: ReadableSpan) -> list[str]:
    """The names of its process's spans in another, in the order in which they began; all lie inside of it."""
    parents = ((each, each.parent) for each in found)
    inner = [each for each, parent in parents if parent is not None and not parent.is_remote]
    inner = [each for each in inner if each.parent.span_id == outer.context.span_id]
    assert all(outer.start_time <= each.start_time <= each.end_time <= outer.end_time for each in inner)
    return [each.name for each in sorted(inner, key=lambda each: each.start_time)]

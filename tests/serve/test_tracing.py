"""One trace a version: the trainer, the follower and the servers that it calls meet in it."""

import os
import queue
import subprocess
import sys

import pytest
import torch

pytest.importorskip("opentelemetry.sdk.trace", reason="OpenTelemetry is not installed; vLLM brings it")

from fleet_thread import running
from follow_process import Following
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import StatusCode

from patchstore import Publisher
from patchstore.errors import LoadFailed
from patchstore.stores.folder import FolderStore
from patchstore.stores.memory import MemoryStore
from patchstore.support.tracing import Stages, in_trace_of, record_root, span
from tests.support import http_server
from tests.support.http_server import Answer, Request, passed_on
from tests.support.spans import named, recording, trace_id, within
from tests.support.vllm_stub import StubServer


def publish(store: object, num_versions: int) -> str:
    """Publish versions, and return the run."""
    weights = {"weight": torch.zeros(64)}
    with Publisher(store, weights) as publisher:
        for step in range(num_versions):
            weights["weight"][step] += 1
            publisher.publish_patch(step).result()
        return publisher.run_id


def test_a_version_has_one_trace_from_its_publication_to_the_servers_answer(tmp_path, stub) -> None:
    store, asked = FolderStore(tmp_path / "bucket"), []

    def gateway(request: Request) -> Answer:
        asked.append((request.path, request.headers.get("traceparent")))
        return passed_on(request, stub.url)

    with recording() as spans, http_server.serving(gateway) as url:
        stub.run_id = run_id = publish(store, 2)
        with running(store, [url]) as fleet:
            fleet.until(lambda: fleet.applied(url, 1))
        found = [each for each in spans() if each.context.trace_id == trace_id(run_id, 1)]
    root, update = named(found, "publish"), named(found, "update")
    assert root.parent is None
    assert update.parent is not None and update.parent.is_remote
    assert update.parent.span_id == root.context.span_id
    assert within(found, root) == ["source", "wait", "compare", "encode", "upload", "commit"]
    assert within(found, update) == ["notice", "stage", "prove", "pause", "write", "resume"]
    assert root.attributes == {
        "patchstore.run": run_id,
        "patchstore.version": 1,
        "patchstore.step": 1,
        "patchstore.kind": "delta",
        "patchstore.bytes": root.attributes["patchstore.bytes"],
    }
    assert update.attributes["patchstore.server"] == url
    write = named(found, "write").context
    assert ("/finish_weight_update", f"00-{write.trace_id:032x}-{write.span_id:016x}-01") in asked
    # Questions outside of an update are no part of any trace.
    assert ("/server_info", None) in asked


def test_each_version_has_a_trace_of_its_own() -> None:
    with recording() as spans:
        run_id = publish(MemoryStore(), 3)
        roots = [each for each in spans() if each.name == "publish"]
    assert [each.context.trace_id for each in roots] == [trace_id(run_id, version) for version in range(3)]


def test_a_failed_update_is_an_error_in_the_trace_of_its_version(store, stub: StubServer) -> None:
    stub.failures["/finish_weight_update"] = [f"[{LoadFailed.kind}] no room"]
    with recording() as spans, running(store, [stub.url]) as fleet:
        fleet.until(lambda: fleet.applied(stub.url, 0))
        first, second = [each for each in spans() if each.name == "update"]
    assert first.context.trace_id == second.context.trace_id == trace_id("run", 0)
    assert first.status.status_code is StatusCode.ERROR and "no room" in first.status.description
    assert second.status.status_code is not StatusCode.ERROR


def test_processes_with_the_same_sampler_record_the_same_versions() -> None:
    half = ParentBased(TraceIdRatioBased(0.5))
    with recording(half) as trainer:
        for version in range(50):
            record_root(Stages(), "run", version, {})
    with recording(half) as follower:
        for version in range(50):
            with in_trace_of("run", version, "update", Stages(), {}), span("write"):
                pass
    published, updated = (
        [each.attributes["patchstore.version"] for each in spans() if each.attributes]
        for spans in (trainer, follower)
    )
    assert published == updated
    assert 10 < len(published) < 40


def test_without_a_provider_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, torch, patchstore.follow.service\n"
        "from patchstore import Publisher\n"
        "from patchstore.stores.memory import MemoryStore\n"
        "from patchstore.support import tracing\n"
        "with Publisher(MemoryStore(), {'weight': torch.ones(4)}) as publisher:\n"
        "    publisher.publish_patch(0).result()\n"
        "with tracing.in_trace_of('run', 0, 'update', tracing.Stages(), {}), tracing.span('write'):\n"
        "    assert tracing.headers() == {}\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_command_exports_where_the_environment_says(tmp_path, stub, monkeypatch) -> None:
    received: queue.SimpleQueue[ExportTraceServiceRequest] = queue.SimpleQueue()

    def collect(request: Request) -> Answer:
        assert request.path == "/v1/traces"
        received.put(ExportTraceServiceRequest.FromString(request.body.read()))
        return Answer()

    stub.run_id = run_id = publish(FolderStore(tmp_path / "bucket"), 1)
    with http_server.serving(collect) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        following = Following(tmp_path / "bucket", "--server", stub.url, "--json")
        found = received.get(timeout=60)
        assert following.end()[0] == 0
    (resource,) = found.resource_spans
    about = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert about["service.name"] == os.environ.get("OTEL_SERVICE_NAME", "patchstore")
    ids = {each.trace_id for scope in resource.scope_spans for each in scope.spans}
    assert ids == {trace_id(run_id, 0).to_bytes(16)}

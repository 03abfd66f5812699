"""The route of an SGLang server that loads weights from a folder, without the model.

Fields and their types are those of SGLang 0.5.23 (`UpdateWeightFromDiskReqInput`); so are the answers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.support import http_server
from tests.support.http_server import Answer, Request, json_answer

ROUTE = "/update_weights_from_disk"

_FIELDS: dict[str, tuple[type, ...]] = {
    "rid": (str, type(None)),
    "http_worker_ipc": (str, type(None)),
    "model_path": (str,),
    "load_format": (str, type(None)),
    "abort_all_requests": (bool,),
    "weight_version": (str, type(None)),
    "is_async": (bool,),
    "torch_empty_cache": (bool,),
    "keep_pause": (bool,),
    "recapture_cuda_graph": (bool,),
    "token_step": (int,),
    "flush_cache": (bool,),
    "manifest": (dict, type(None)),
}
"""What the request may have; `model_path` it must have."""


class SglangStub:
    """Loads a folder where a function says how, and remembers what it was asked."""

    def __init__(self, load: Callable[[str], object] = str) -> None:
        """`load` takes a folder; what it raises is a failed update."""
        self.load = load
        self.requests: list[dict[str, Any]] = []
        """Bodies that had the right fields."""
        self.weight_version = "default"
        """As `/get_weight_version` would answer."""
        self.url = ""

    def answer(self, request: Request) -> Answer:
        if (request.method, request.path) != ("POST", ROUTE):
            return json_answer({"detail": "Not Found"}, 404)
        try:
            body = request.json()
        except ValueError:
            return json_answer({"detail": "JSON decode error"}, 422)
        if not isinstance(body, dict) or "model_path" not in body:
            return json_answer({"detail": "Object missing required field `model_path`"}, 422)
        for name, value in body.items():
            if name in _FIELDS and not isinstance(value, _FIELDS[name]):
                return json_answer({"detail": f"wrong type at `$.{name}`"}, 422)
        self.requests.append(body)
        try:
            self.load(body["model_path"])
        except Exception as exc:  # noqa: BLE001 -- as SGLang does
            message = f"Failed to update weights: {exc}.\nRolling back to original weights."
            return json_answer({"success": False, "message": message, "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
            message += f" Weight version updated to {self.weight_version}."
        return json_answer({"success": True, "message": message, "num_paused_requests": 0})


@contextmanager
def serving(stub: SglangStub) -> Iterator[SglangStub]:
    """Answer requests until the block ends."""
    with http_server.serving(stub.answer, protocol="HTTP/1.0") as stub.url:
        yield stub

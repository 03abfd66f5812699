"""The route of an SGLang server that loads weights from a folder, without the model.

Fields and their types are those of SGLang 0.5.23 (`UpdateWeightFromDiskReqInput`); so are the answers.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    def answer(self, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
        if path != ROUTE:
            return 404, {"detail": "Not Found"}
        try:
            body = json.loads(data)
        except ValueError:
            return 422, {"detail": "JSON decode error"}
        if not isinstance(body, dict) or "model_path" not in body:
            return 422, {"detail": "Object missing required field `model_path`"}
        for name, value in body.items():
            if name in _FIELDS and not isinstance(value, _FIELDS[name]):
                return 422, {"detail": f"wrong type at `$.{name}`"}
        self.requests.append(body)
        try:
            self.load(body["model_path"])
        except Exception as exc:  # noqa: BLE001 -- as SGLang does
            message = f"Failed to update weights: {exc}.\nRolling back to original weights."
            return 400, {"success": False, "message": message, "num_paused_requests": 0}
        message = "Succeeded to update model weights."
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
            message += f" Weight version updated to {self.weight_version}."
        return 200, {"success": True, "message": message, "num_paused_requests": 0}


@contextmanager
def serving(stub: SglangStub) -> Iterator[SglangStub]:
    """Answer requests until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, answer = stub.answer(
                self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0))
            )
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

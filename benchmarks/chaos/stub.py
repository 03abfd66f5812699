"""A stand-in for `vllm serve` that starts in seconds: the tests' stub of its routes, with real weights.

A real `Replica` fetches, proves and writes the weights. They are lost when the process ends.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch

from patchstore import PatchstoreError, Replica, open_store
from patchstore.apply.replica import Staged
from patchstore.bucket import digests
from patchstore.tensors import state_digest
from patchstore.tensors.bits import raw_bytes
from tests.support.vllm_stub import Engine, StubServer


class WeightServer(StubServer):
    """One engine of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._replica: Replica | None = None
        self._staged: Staged | None = None
        self._num_applied = 0

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        # vLLM's engine runs one call after the other too, also those of clients that were killed.
        with self._lock:
            return super().answer(path, query, body)

    def do(self, path: str, body: dict[str, Any], engine: Engine) -> None:
        try:
            self._do(path, body, engine)
        except PatchstoreError as exc:
            engine.update_open = False
            raise ValueError(f"[{exc.kind}] {exc}") from exc
        super().do(path, body, engine)

    def _do(self, path: str, body: dict[str, Any], engine: Engine) -> None:
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self._replica = Replica(open_store(info["store"], **info.get("storage_options", {})), {})
            self.run_id = self._replica.header.run_id
        elif path == "/update_weights" and engine.update_open:
            assert self._replica is not None
            self._staged = self._replica.stage(body["update_info"]["version"])
        elif path == "/finish_weight_update":
            assert self._replica is not None and self._staged is not None
            self._replica.apply(self._staged)
            self._staged = None
            self._num_applied += 1

    def status(self, rank: int, engine: Engine) -> dict[str, Any]:
        manifest = self._replica.manifest if self._replica else None
        state = manifest.state.total if manifest else None
        return {**super().status(rank, engine), "state_digest": state}

    def collective(self, method: str, args: list[Any], engine: Engine) -> list[Any]:
        weights = self._replica.tensors if self._replica else {}
        if method == "delta_fingerprint":
            return [{name: digests.digest(raw_bytes(tensor)) for name, tensor in weights.items()}]
        if method == "delta_sums":
            sums = {
                name: [[_whole(tensor), state_digest.of_tensor(tensor).hex()]]
                for name, tensor in weights.items()
            }
            rest: dict[str, Any] = {"next": None, "computed": [], "unverified": []}
            return [{"serving": engine.held, "num_applied": self._num_applied, "sums": sums, **rest}]
        return super().collective(method, args, engine)


def _whole(tensor: torch.Tensor) -> list[int]:
    """Return the slice that is all of a tensor: its start, length and stride."""
    return [0, tensor.numel(), 1]


def _handler(server: WeightServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            url = urlsplit(self.path)
            try:
                found = server.answer(url.path, dict(parse_qsl(url.query)), json.loads(data or b"{}"))
                status, body = 200, json.dumps(found).encode()
            except ValueError as exc:
                # vLLM's message for an error of a worker.
                said = f"Worker failed with error '{exc}', please check the stack trace above"
                status, body = 500, json.dumps({"error": {"message": said}}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _handle  # noqa: N815 - the names that http.server calls

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    (port,) = sys.argv[1:]
    with ThreadingHTTPServer(("127.0.0.1", int(port)), _handler(WeightServer())) as http:
        http.serve_forever()


if __name__ == "__main__":
    main()

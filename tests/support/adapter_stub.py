"""The routes by which a vLLM server with patchstore's plugin is given adapters, without the model."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

from patchstore.bucket import history
from patchstore.errors import PatchstoreError
from patchstore.stores.base import Store
from tests.support import http_server
from tests.support.http_server import Answer, Request, json_answer

MODELS, LOAD, UNLOAD = "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Refused(Exception):
    """An answer with an error in it, as vLLM words them."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class AdapterStub:
    """Holds adapters by name, and fails where it is told to."""

    def __init__(self, store: Store) -> None:
        """`store` is what is found at any URL."""
        self.store = store
        self.calls: list[str] = []
        """What was done: `load policy@1`, `choose policy@1`, `unload policy@1`."""
        self.failures: dict[str, list[Refused]] = {}
        """Per path: what its next calls are refused with."""
        self.blocks: dict[str, threading.Event] = {}
        """Per path: calls wait until this is set."""
        self.entered: dict[str, threading.Event] = {}
        self.on_call: Callable[[str], None] | None = None
        """Told of each path, before anything else."""
        self.down = False
        self.loses_answers = False
        """What changes something is done, and not answered."""
        self.is_vllm = self.has_plugin = self.has_lora = self.may_update = True
        """It is vLLM; has patchstore installed; was started with `--enable-lora`; and with
        `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`."""
        self.statics: dict[str, str] = {}
        """Adapters of `--lora-modules`: name -> folder."""
        self.used: set[str] = set()
        """Adapters that running requests use."""
        self.is_dev = True
        """It was started with `VLLM_SERVER_DEV_MODE=1`."""
        self.differing: list[list[str]] = [[]]
        """Per rank: modules that compute with other bits than the folder has."""
        self.history: list[int] = []
        """The versions that came to be chosen, in order."""
        self.url = ""
        self.restart()

    def restart(self) -> None:
        """Forget all that a process forgets."""
        self.held: dict[str, str] = {}
        """Name -> folder, in the order in which they were loaded."""
        self.chosen: dict[str, str] = {}
        """Name of an adapter -> the name of its version."""

    def versions(self, adapter: str = "policy") -> list[int]:
        """The versions that it holds, ascending."""
        return sorted(int(name.partition("@")[2]) for name in self.held if name.startswith(f"{adapter}@"))

    def serving(self, adapter: str = "policy") -> int | None:
        name = self._answering(adapter)
        return None if name is None else int(name.partition("@")[2])

    def pull(self, name: str) -> None:
        """Do what a request for a version does."""
        self.held[name] = self._folder(name)

    def _answering(self, adapter: str) -> str | None:
        """The chosen version, or the newest that is held."""
        newest = max(self.versions(adapter), default=None)
        return self.chosen.get(adapter) or (None if newest is None else f"{adapter}@{newest}")

    def _folder(self, name: str) -> str:
        version = int(name.partition("@")[2])
        found, _ = history.read_stored(self.store, version)
        digest = history.stored_digest(self.store, version).removeprefix("blake3:")[:16]
        return str(PurePosixPath("/scratch/adapters", found.run_id, f"{version:08}-{digest}"))

    def models(self) -> dict[str, Any]:
        adapters = {name.partition("@")[0] for name in self.held}
        aliases = {adapter: self.held[self._answering(adapter) or ""] for adapter in adapters}
        cards = {"base": "/models/base"} | self.statics | self.held | aliases
        numbers = {folder: number for number, folder in enumerate(self.held.values(), 1)}
        data = [{"id": name, "root": root, "lora_int_id": numbers.get(root)} for name, root in cards.items()]
        return {"object": "list", "data": data}

    def compare(self, method: str, args: list[Any]) -> dict[str, Any]:
        """What its ranks answer to a collective call."""
        (number, folder), held = args, [*self.held.values()]
        assert method == "delta_adapter" and held[number - 1] == folder, (method, args)
        return {"results": [{"is_held": True, "num_bytes": 8, "differing": each} for each in self.differing]}

    def load(self, name: str, path: str, *, load_inplace: bool = False) -> str:
        if not self.has_lora:
            raise Refused(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
        source = re.fullmatch(r"patchstore:(?P<store>.+)@(?P<version>\d+)", path)
        if not self.has_plugin or source is None:
            raise Refused(404, f"Loading lora {name} failed: No adapter found for {path}")
        if (name in self.held or "@" not in name) and not load_inplace:
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        adapter = name.partition("@")[0]
        version = f"{adapter}@{source['version']}"
        assert name in {adapter, version} and source["store"] == self.store.url, (name, path)
        if version not in self.held:
            try:
                self.pull(version)
            except PatchstoreError as exc:
                raise Refused(404, f"[{exc.kind}] {exc}") from exc
        if name == adapter:
            self.chosen[adapter] = version
            self.history.append(int(source["version"]))
        self.calls.append(f"{'choose' if name == adapter else 'load'} {version}")
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, name: str) -> str:
        if name not in self.held:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        if name in self.used or name in self.chosen.values():
            raise Refused(409, f"{name} is in use")
        del self.held[name]
        self.calls.append(f"unload {name}")
        return f"Success: LoRA adapter '{name}' removed successfully."

    def answer(self, request: Request) -> Answer | None:
        path = request.path
        if self.on_call is not None:
            self.on_call(path)
        if path in self.blocks:
            self.entered[path].set()
            self.blocks[path].wait()
        if self.down:
            return None
        try:
            if self.failures.get(path):
                raise self.failures[path].pop(0)
            body = request.json() if request.method == "POST" else {}
            match request.method, path:
                case "GET", "/v1/models" if self.is_vllm:
                    return json_answer(self.models())
                case "POST", "/v1/load_lora_adapter" if self.may_update:
                    inplace = body.get("load_inplace", False)
                    said = self.load(body["lora_name"], body["lora_path"], load_inplace=inplace)
                case "POST", "/v1/unload_lora_adapter" if self.may_update:
                    said = self.unload(body["lora_name"])
                case "POST", "/collective_rpc" if self.is_dev:
                    return json_answer(self.compare(body["method"], body["args"]))
                case _:
                    return json_answer({"detail": "Not Found"}, 404)
        except Refused as exc:
            error = {"message": str(exc), "type": "Error", "param": None, "code": exc.status}
            return json_answer({"error": error}, exc.status)
        return None if self.loses_answers else Answer(body=said.encode())

    def block(self, path: str) -> threading.Event:
        """Have calls of a route wait for what is returned; `entered[path]` is set when one does."""
        self.entered[path] = threading.Event()
        self.blocks[path] = threading.Event()
        return self.blocks[path]


@contextmanager
def serving(stub: AdapterStub) -> Iterator[AdapterStub]:
    """Serve a stub on a free port."""
    with http_server.serving(stub.answer, protocol="HTTP/1.0") as stub.url:
        yield stub

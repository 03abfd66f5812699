"""The app of `docs/in-process.md`, at / with vLLM's routes of an update, at /bare without."""

import importlib.util
import sys
from types import ModuleType
from typing import Any

import uvicorn
from fastapi import FastAPI
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

from tests.support.pages import code_of

UPDATES, APP = code_of("docs/in-process.md", "An app of your own")
if importlib.util.find_spec("vllm.entrypoints.rl") is None:
    UPDATES = UPDATES.replace("vllm.entrypoints.rl.online", "vllm.entrypoints.serve.dev.rlhf")
SMALL = (
    "enforce_eager=True, max_model_len=256, block_size=32, kv_cache_memory_bytes=1 << 26, "
    "gpu_memory_utilization=0.1"
)
"""Arguments of an engine, for tests."""


def updates() -> ModuleType:
    """Make the page's module of that name, which its apps import."""
    module = sys.modules["updates"] = ModuleType("updates")
    exec(UPDATES, vars(module))
    return module


def add_health(app: FastAPI) -> FastAPI:
    """As the tests wait for."""

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    return app


def add_update(app: FastAPI) -> None:
    """Add a route that makes the calls of an update itself, in the store that is open."""

    @app.post("/update")
    async def update(wanted: dict[str, int]) -> dict[str, Any]:
        engine = app.state.engine_client
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info=wanted))
        await engine.pause_generation(mode="keep")
        await engine.finish_weight_update()
        await engine.resume_generation()
        return {}


def main(model: str, port: str) -> None:
    run = uvicorn.run

    def run_with_more(app: FastAPI, **_: object) -> None:
        add_health(app)
        add_update(app)
        app.mount("/bare", add_health(FastAPI()))
        run(app, host="127.0.0.1", port=int(port), log_level="warning")

    updates()
    uvicorn.run = run_with_more
    exec(APP.replace('"MODEL"', f'"{model}", {SMALL}'), {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])

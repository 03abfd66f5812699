"""A team's own app over `AsyncLLM`: at / as `docs/vllm.md` has it, at /bare without the routes of vLLM."""

import importlib.util
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.pages import code_of


def snippet() -> str:
    """The code of the page, for the vLLM that is installed."""
    (code,) = code_of("docs/vllm.md", "An app of your own")
    if importlib.util.find_spec("vllm.entrypoints.rl") is None:
        return code.replace("vllm.entrypoints.rl.online", "vllm.entrypoints.serve.dev.rlhf")
    return code


def team_app(engine: AsyncLLM) -> FastAPI:
    """The team's own routes."""
    app, numbers = FastAPI(), iter(range(1_000_000))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.post("/ask")
    async def ask(question: dict[str, list[int]]) -> dict[str, list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        prompt: Any = {"prompt_token_ids": question["prompt"]}
        async for output in engine.generate(prompt, greedy, f"request-{next(numbers)}"):
            tokens = list(output.outputs[0].token_ids)
        return {"tokens": tokens}

    @app.post("/update")
    async def update(wanted: dict[str, int]) -> dict[str, Any]:
        """By the methods of `AsyncLLM`, in the store that is open."""
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info=wanted))
        await engine.pause_generation(mode="keep")
        await engine.finish_weight_update()
        await engine.resume_generation()
        return {}

    return app


def main(model: str, port: str) -> None:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            enforce_eager=True,
            max_model_len=256,
            block_size=32,
            kv_cache_memory_bytes=67108864,
            gpu_memory_utilization=0.1,
            worker_extension_cls="vllm_plugin.DeltaWorkerExtension",
            weight_transfer_config={"backend": "delta"},
        )
    )
    app = team_app(engine)
    exec(snippet(), {"app": app, "engine": engine})
    app.mount("/bare", team_app(engine))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])

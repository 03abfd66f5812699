"""vLLM in this process: the code of `docs/in-process.md`, and calls that fail; or a fresh start."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from tests.support import tiny_qwen
from tests.support.pages import code_of

PROMPTS: list[Any] = [
    {"prompt_token_ids": [1 + (step * i) % (tiny_qwen.VOCABULARY - 1) for i in range(300)]}
    for step in (7, 11)
]


def tokens(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def refusal(call: Callable[..., object], *args: object) -> str | None:
    """Make a call, and return what it raised."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001  # Told to the test.
        return str(exc)
    return None


def beside_a_trainer(model: str, store: str) -> dict[str, Any]:
    """Run the script with a trainer, and ask its engine further."""
    _, code = code_of("docs/in-process.md", "LLM in one process")
    answers: list[list[list[int]]] = []
    random = torch.Generator().manual_seed(5)

    def train(module: torch.nn.Module, outputs: Sequence[Any]) -> None:
        answers.append(tokens(outputs))
        for parameter in module.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=random).to(parameter.dtype)

    names: dict[str, Any] = {"__name__": "__main__", "train": train, "prompts": PROMPTS}
    exec(code.replace("MODEL", model).replace("/tmp/my-run", store), names)
    llm, greedy = names["llm"], names["greedy"]
    answers.append(tokens(names["answers"]))

    def state() -> list[Any]:
        (rank,) = llm.collective_rpc("delta_status")
        return [rank["serving"], tokens(llm.generate(PROMPTS, greedy))]

    def update(version: int) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": {"version": version}})
        llm.finish_weight_update()

    def stage(info: dict[str, Any]) -> None:
        llm.start_weight_update()
        llm.update_weights({"update_info": info})

    refusals = [refusal(update, 77), refusal(llm.finish_weight_update)]
    refusals += [refusal(stage, {"version": -1}), refusal(stage, {"versions": 1})]
    refused = state()
    # Requests are under way here, and go on with the weights of another version.
    for number, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(f"under-way-{number}", prompt, greedy)
    llm.llm_engine.step()
    update(1)
    ended: list[Any] = []
    while llm.llm_engine.has_unfinished_requests():
        ended += [output for output in llm.llm_engine.step() if output.finished]
    return {
        "answers": answers,
        "refusals": refusals,
        "refused": refused,
        "under_way": [len(output.outputs[0].token_ids) for output in ended],
        "back": state(),
    }


def elsewhere(model: str, store: str) -> dict[str, Any]:
    """Run the script without a trainer, on versions from last to first."""
    answers: dict[int, list[list[int]]] = {}
    names: dict[str, Any] = {
        "__name__": "__main__",
        "versions": [3, 2, 1],
        "prompts": PROMPTS,
        "evaluate": lambda version, outputs: answers.update({version: tokens(outputs)}),
    }
    code, _ = code_of("docs/in-process.md", "LLM in one process")
    exec(code.replace("MODEL", model).replace("s3://bucket/my-run", store), names)
    return {"answers": answers}


def without_config(model: str) -> dict[str, Any]:
    """Start without the backend; say what calls are answered."""
    llm = LLM(model, worker_extension_cls="vllm_plugin.DeltaWorkerExtension")
    opened = refusal(llm.init_weight_transfer_engine, {"init_info": {"store": "/none"}})
    return {"opened": opened, "status": llm.collective_rpc("delta_status")}


def fresh(model: str) -> dict[str, Any]:
    return {"answers": tokens(LLM(model).generate(PROMPTS, SamplingParams(temperature=0)))}


def main(out: str, which: str, *arguments: str) -> None:
    Path(out).write_text(json.dumps(globals()[which](*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])

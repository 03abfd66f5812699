"""vLLM in this process: the example of `docs/vllm.md` as it stands, and more updates; or a fresh start."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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


def updated(model: str, store: str) -> dict[str, Any]:
    """Run the example, and ask its engine further."""
    (code,) = code_of("docs/vllm.md", "vLLM in the trainer's process")
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

    with pytest.raises(Exception, match="has no version") as caught:
        update(77)
    refused = state()
    update(1)
    return {"answers": answers, "refusal": str(caught.value), "refused": refused, "back": state()}


def fresh(model: str) -> dict[str, Any]:
    """Start from a checkpoint."""
    return {"answers": tokens(LLM(model).generate(PROMPTS, SamplingParams(temperature=0)))}


def main(out: str, model: str, *store: str) -> None:
    Path(out).write_text(json.dumps(updated(model, *store) if store else fresh(model)))


if __name__ == "__main__":
    main(*sys.argv[1:])

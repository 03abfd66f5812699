"""One rank of an engine that torchrun starts with `external_launcher`: each rank makes all calls of vLLM.

Writes what this rank was answered to `found-RANK.json`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tests.support import tiny_qwen
from tests.support.pages import code_of

RANK = int(os.environ["RANK"])
LAST = int(os.environ["WORLD_SIZE"]) - 1
PROMPT = [1 + (7 * i) % (tiny_qwen.VOCABULARY - 1) for i in range(40)]

# On CPUs vLLM gives the shared memory of all such jobs of a host one name, and a rank that ends at once
# leaves it behind. Without it ranks use torch.distributed.
CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


class Rank:
    """An engine, of which this process has one rank."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self.llm = LLM(
            model=model,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            max_model_len=128,
            block_size=32,
            kv_cache_memory_bytes=1 << 26,
            gpu_memory_utilization=0.1,
            seed=0,
            worker_extension_cls="failing_extension.FailingExtension",
            weight_transfer_config={"backend": "delta"},
            **options,
        )

    def open(self, store: str) -> None:
        self.llm.init_weight_transfer_engine({"init_info": {"store": store}})

    def stage(self, version: int) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights({"update_info": {"version": version}})

    def finish(self, version: int) -> None:
        self.llm.finish_weight_update(str(version))

    def apply(self, version: int) -> None:
        self.stage(version)
        self.finish(version)

    def call(self, method: str, *args: object) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def state(self, *, answers: bool = True) -> dict[str, Any]:
        status = self.call("delta_status")
        found = {key: status[key] for key in ("rank", "serving", "half_applied", "update_open")}
        found |= {"label": self.llm.get_weight_version(), "fingerprint": self.call("delta_fingerprint")}
        if answers:
            greedy = SamplingParams(temperature=0)
            (said,) = self.llm.generate([{"prompt_token_ids": PROMPT}], greedy, use_tqdm=False)
            found["answer"] = list(said.outputs[0].token_ids)
        return found


def refusal(call: Callable[..., None], *args: object) -> str | None:
    """Make a call, and return what it raised."""
    try:
        call(*args)
    except Exception as exc:  # noqa: BLE001  # Told to the test.
        return str(exc)
    return None


def follow(rank: Rank, store: str, *, answers: bool) -> dict[str, Any]:
    """Go through updates that succeed and that fail; at last the last rank leaves between two calls."""

    def state() -> dict[str, Any]:
        return rank.state(answers=answers)

    found: dict[str, Any] = {}
    rank.open(store)
    rank.apply(1)
    found["1"] = state()

    found["unknown"] = [refusal(rank.stage, 99), refusal(rank.finish, 99), state()]
    found["missing"] = [refusal(rank.open, store + "-that-is-missing"), state()]
    different = [{"serving": 1 if each < LAST else 7} for each in range(LAST + 1)]
    found["differs"] = refusal(rank.call, "delta_expect", "delta_status", [], different)

    rank.call("delta_fail_writes", 1, LAST)
    found["failed"] = [refusal(rank.apply, 2), state()]
    rank.apply(2)
    found["2"] = state()

    rank.stage(3)
    if RANK < LAST:
        # No answer: that would wait for the other rank too.
        found["left"] = [refusal(rank.finish, 3), rank.state(answers=False), refusal(rank.apply, 3)]
        found["left"] += [refusal(rank.open, store)]
    return found


def example(model: str, store: str) -> dict[str, Any]:
    """Run the code of `docs/in-process.md`; return each version's answer, and what is served last."""
    (code,) = code_of("docs/in-process.md", "Ranks that torchrun starts")
    answers: list[list[int]] = []

    def train(module: torch.nn.Module, outputs: Sequence[Any]) -> None:
        answers.append(list(outputs[0].outputs[0].token_ids))
        tokens = torch.tensor([PROMPT + answers[-1]]).roll(RANK)
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.1)
        module(input_ids=tokens, labels=tokens).loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    names: dict[str, Any] = {"train": train, "prompts": [{"prompt_token_ids": PROMPT}]}
    code = code.replace('"MODEL",\n', f'"{model}",\n    enforce_eager=True,\n').replace("MODEL", model)
    exec(code.replace("s3://bucket/my-run", store), names)
    answers.append(list(names["answers"][0].outputs[0].token_ids))
    (status,), (fingerprint,) = map(names["llm"].collective_rpc, ("delta_status", "delta_fingerprint"))
    return {"answers": answers, "serving": status["serving"], "fingerprint": fingerprint}


def main(folder: Path, model: str, store: str, options: dict[str, Any]) -> None:
    answers = options.get("pipeline_parallel_size", 1) == 1
    if not options:
        found = example(model, store)
    elif store:
        found = follow(Rank(model, options), store, answers=answers)
    else:
        found = Rank(model, options).state(answers=answers)
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))
    # At once, without a word to the other ranks.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))

"""What engines of tiny models, each started with other options, hold after updates, as one file.

Run as a program: engines are forks of a process that imports vLLM in a way of its own, see `engines` of the
conformance suite, which must be on the path.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from engines import Engine, answers, open_run, refusal, update
from programs import note
from safetensors.torch import load_file, save_file
from trainer import Trainer, replayed
from transformers import PretrainedConfig
from vllm import LLM

from patchstore.stores import open_store
from tests.support import tiny_qwen

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INT8 = {"quantization": "int8_per_channel_weight_only"}
LORA = {"enable_lora": True, "max_lora_rank": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and the options that its engine is started with."""

    base: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Callable[[Trainer], Any], ...] = (Trainer.step, Trainer.step)
    """What makes each version from the one before it."""
    answers: bool = False
    """Whether vLLM's CPU build can answer with these options, and not only load."""
    fresh: bool = True
    """Whether to start another engine from the last version."""

    def run(self, folder: Path) -> dict[str, Any]:
        """Bring an engine to each version in turn."""
        tensors = load_file(self.base / "model.safetensors")
        with closing(Trainer(folder / "store", tensors, dtype=None)) as trainer:
            trainer.publish()
            for step in self.steps:
                step(trainer)

        def follow(llm: LLM) -> dict[str, Any]:
            (fits,) = llm.collective_rpc("delta_fits", args=((folder / "store" / "store.json").read_text(),))
            found: dict[str, Any] = {"fits": fits}
            if refused := refusal(open_run, llm, folder / "store"):
                return found | {"refused": refused}
            found["serving"] = llm.collective_rpc("delta_status")[0]["serving"]
            for version in range(len(self.steps) + 1):
                found[str(version)] = {"refused": refusal(update, llm, version), **self._state(llm)}
            return found

        log = folder / "followed.log"
        found = self._engine(self.base, log).run(follow)
        lines = log.read_text(errors="replace").splitlines()
        found["warned"] = [line for line in lines if "in more bits than the run stores" in line]
        if self.fresh and "refused" not in found:
            out = folder / "replayed"
            with closing(open_store(folder / "store")) as store:
                replayed(store, len(self.steps), out, self.base)
            found["fresh"] = self._engine(out, folder / "fresh.log").run(self._state)
        return found

    def _engine(self, model: Path, log: Path) -> Engine:
        return Engine(model=model, arguments=self.options, log=log)

    def _state(self, llm: LLM) -> dict[str, Any]:
        # The first answer may convert buffers, so this comes first.
        said = answers(llm) if self.answers else None
        (status,), (fingerprint,) = (
            llm.collective_rpc("delta_status"),
            llm.collective_rpc("delta_fingerprint"),
        )
        return {
            "answers": said,
            "serving": status["serving"],
            "map": status["map"],
            "fingerprint": fingerprint,
        }


def change_head(trainer: Trainer) -> None:
    trainer.tensors[HEAD][:4] += 1
    trainer.publish()


def overflow(trainer: Trainer) -> None:
    """Let one number become too large for float16, and others too small."""
    trainer.tensors["model.norm.weight"][:3] = torch.tensor([1e38, -1e-30, 3e-7])
    trainer.publish()


def with_both(folder: Path) -> Path:
    """A checkpoint whose config says tied, and that has an output layer too, equal to the embedding."""
    tiny_qwen.save(tiny_qwen.build(tied=True), folder)
    tensors = load_file(folder / "model.safetensors")
    both = {**tensors, HEAD: tensors[EMBEDDING].clone()}
    save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rounded(folder: Path) -> Path:
    """A checkpoint that has routers' biases in bfloat16, which vLLM keeps in float32."""
    zoo.save(zoo.ARCHITECTURES["deepseek-v3"], folder)
    tensors = load_file(folder / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def zamba(folder: Path) -> Path:
    """A checkpoint of an architecture that vLLM always ties, whose config says that it is not."""
    known = zoo.ARCHITECTURES["zamba2"]

    def untied() -> PretrainedConfig:
        config = known.config()
        config.tie_word_embeddings = False
        return config

    return zoo.save(replace(known, config=untied), folder)


def main(folder: Path) -> None:
    plain = tiny_qwen.save(tiny_qwen.build(), folder / "plain")
    tied = with_both(folder / "tied")
    experts = zoo.save(zoo.ARCHITECTURES["mixtral"], folder / "experts")
    beside_experts = LORA | {"lora_target_modules": ["qkv_proj", "o_proj"]}
    changed_head: dict[str, Any] = {"base": tied, "steps": (Trainer.publish, change_head), "fresh": False}
    cases = {
        "float16": Case(
            base=plain, options={"dtype": "float16"}, steps=(Trainer.step, overflow), answers=True
        ),
        "float32": Case(
            base=plain, options={"dtype": "float32"}, steps=(Trainer.step, overflow), answers=True
        ),
        "rounded": Case(base=rounded(folder / "rounded"), answers=True),
        "tied": Case(**changed_head),
        "tied-float16": Case(**changed_head, options={"dtype": "float16"}),
        "tied-int8": Case(**changed_head, options=INT8),
        "untied-int8": Case(base=plain, steps=(Trainer.publish, change_head), options=INT8),
        "zamba": Case(base=zamba(folder / "zamba"), fresh=False),
        "lora-experts": Case(base=experts, options=LORA),
        "lora-beside-experts": Case(base=experts, options=beside_experts),
    }
    note(folder, {name: case.run for name, case in cases.items()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

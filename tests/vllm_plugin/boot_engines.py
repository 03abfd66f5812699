"""What engines that start at a version of a run hold, beside engines of that version's replay, as one file.

Run as a program, with the folder to work in and the cases to run: engines are forks of a process that imports
vLLM in a way of its own, see `engines` of the conformance suite, which must be on the path.
"""

import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny_draft
import tiny_fp8
import zoo
from engines import Engine, answers, open_run, refusal, update
from programs import note
from trainer import replayed
from vllm import LLM

TWO = {"tensor_parallel_size": 2}
EXPERTS = {"enable_expert_parallel": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and an engine that starts at version 2 of its run, where version 3 is the head."""

    save: Callable[[Path], Path]
    """Writes a checkpoint."""
    form: str | None = None
    """Of FP8 in which it is published."""
    options: Mapping[str, Any] = field(default_factory=dict)
    has_other_draft: bool = False
    """Whether the draft model is from a folder, of version 0, and not from the run."""
    answers: bool = True
    """Whether vLLM's CPU build can answer with these options, and not only load."""

    def hold(self, folder: Path) -> dict[str, Any]:
        base = self.save(folder / "base")
        with tiny_fp8.published(folder / "store", base, self.form) as trainer:
            for _ in range(3):
                tiny_fp8.step(trainer)
            replay = replayed(trainer.store, 2, folder / "replay", base)
        options = dict(self.options)
        if self.has_other_draft:
            options["speculative_config"] = tiny_draft.SPECULATIVE | {"model": str(base)}
        fresh = Engine(model=replay, arguments=options, log=folder / "fresh.log")
        return {"fresh": fresh.run(self._state), **self._start(folder, options)}

    def _start(self, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
        """Start an engine at version 2, and bring it to version 3."""
        place = folder / "store"

        def work(llm: LLM) -> dict[str, Any]:
            found = {"started": self._state(llm)}
            open_run(llm, place)
            found["serving"] = [each["serving"] for each in llm.collective_rpc("delta_status")]
            # What follows is made of deltas alone.
            shutil.move(place / "anchors", folder)
            try:
                found["refused"] = refusal(update, llm, 3)
            finally:
                shutil.move(folder / "anchors", place)
            found["updated"] = [each["serving"] for each in llm.collective_rpc("delta_status")]
            found["reload"] = refusal(llm.collective_rpc, "reload_weights")
            return found

        given = {"store": str(place), "version": 2, "scratch": str(folder / "scratch")}
        start = {"load_format": "patchstore", "model_loader_extra_config": given}
        engine = Engine(model=place, arguments={**options, **start}, log=folder / "started.log")
        found: dict[str, Any] = engine.run(work)
        return found

    def _state(self, llm: LLM) -> dict[str, Any]:
        # The first answer may convert buffers, so this comes first.
        said = answers(llm) if self.answers else None
        return {"answers": said, "fingerprints": llm.collective_rpc("delta_fingerprint")}


def experts(folder: Path) -> Path:
    return zoo.save(zoo.ARCHITECTURES["qwen3-moe"], folder)


CASES = {
    "dense": Case(save=tiny_fp8.save),
    "two": Case(save=tiny_fp8.save, options=TWO),
    "experts": Case(save=experts),
    "experts-two": Case(save=experts, options=TWO | EXPERTS, answers=False),
    "fp8-channel": Case(save=tiny_fp8.save, form="fp8-channel"),
    "draft": Case(save=tiny_draft.save, options={"speculative_config": tiny_draft.SPECULATIVE}),
    "draft-elsewhere": Case(save=tiny_draft.save, has_other_draft=True),
}


def main(folder: Path, names: list[str]) -> None:
    note(folder, {name: CASES[name].hold for name in names})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

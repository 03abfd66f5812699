"""What engines of tiny FP8 models hold after updates, as one file.

Run as a program, with the folder to work in and the cases to run: engines are forks of a process that imports
vLLM in a way of its own, see `engines` of the conformance suite, which must be on the path.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import block_kernel
import tiny_codes
import tiny_fp8
from engines import Engine, answers, open_run, refusal, update
from failing_extension import FailingExtension
from programs import note
from trainer import replayed
from vllm import LLM

from patchstore.quantization import FORMS

VERSIONS = (1, 2, 3, 0, 3)
"""By one delta each, from an anchor, and by three deltas at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, and a server that is to follow it."""

    run: str | None
    """The form that is published; None for bf16."""
    served: str | None = ""
    """Of the server's checkpoint, where it is another."""
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "dense"
    """Of model: see `tiny_fp8.build`. vLLM's CPU build cannot answer with experts in FP8."""
    forms: Any = tiny_fp8
    """Which module publishes it: rounded by the publisher, or by the trainer."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def hold(self, folder: Path) -> dict[str, Any]:
        """Bring an engine to each version in turn, and let one update fail."""
        base = tiny_fp8.save(folder / "base", self.kind)
        os.environ |= self.environment
        with self.forms.published(folder / "store", base, self.run) as trainer:
            for _ in range(4):
                self.forms.step(trainer)
            model = replayed(trainer.store, 0, folder / "first", base)
            newest = replayed(trainer.store, VERSIONS[-1], folder / "newest", base)
        if self.served != "":
            with tiny_fp8.published(folder / "other", base, self.served) as other:
                model = replayed(other.store, 0, folder / "served", base)

        def follow(llm: LLM) -> dict[str, Any]:
            found = {"refused": refusal(open_run, llm, folder / "store")}
            if found["refused"]:
                return found
            found |= self._state(llm)
            for number, version in enumerate(VERSIONS):
                found[str(number)] = {"refused": refusal(update, llm, version), **self._state(llm)}
            if len(llm.collective_rpc("delta_status")) == 1:
                worker = llm.llm_engine.model_executor.driver_worker.worker
                FailingExtension.delta_fail_writes(worker, 1)
                found["failed"] = {"refused": refusal(update, llm, 4), **self._state(llm)}
            return found

        found = Engine(model=model, arguments=self.options, log=folder / "followed.log").run(follow)
        if found["refused"] is None:
            options = {name: value for name, value in self.options.items() if name != "load_format"}
            fresh = Engine(model=newest, arguments=options, log=folder / "fresh.log")
            found["fresh"] = fresh.run(self._state)
        return found

    def _state(self, llm: LLM) -> dict[str, Any]:
        statuses, fingerprints = (
            llm.collective_rpc("delta_status"),
            llm.collective_rpc("delta_fingerprint"),
        )
        return {
            "answers": answers(llm) if self.kind == "dense" else None,
            "serving": [status["serving"] for status in statuses],
            "form": statuses[0]["form"],
            "map": statuses[0]["map"],
            # Scales of the cache, which vLLM makes up with --load-format dummy, are not of these checkpoints.
            "fingerprints": [{n: d for n, d in each.items() if ".attn." not in n} for each in fingerprints],
            "experts_read": llm.apply_model(_experts_read) if len(statuses) == 1 else None,
        }


def _experts_read(model: Any) -> list[bool]:
    """Of each layer of experts, whether its kernel, if vLLM made one, reads the scales that are served."""
    found = []
    for layer in model.modules():
        config = getattr(getattr(layer, "quant_method", None), "moe_quant_config", None)
        if config is not None and hasattr(layer, "w13_weight"):
            kernel = layer.quant_method.moe_kernel
            configs = [config] if kernel is None else [config, kernel.fused_experts.quant_config]
            scales = getattr(layer, "w13_weight_scale_inv", None)
            scales = layer.w13_weight_scale if scales is None else scales
            found.append({each.w1_scale.data_ptr() for each in configs} == {scales.data_ptr()})
    return found


DUMMY = {"load_format": "dummy"}
TWO = {"tensor_parallel_size": 2}
STARTS = {"": {}, "dummy-": DUMMY, "two-": TWO, "dummy-two-": DUMMY | TWO}
WIDENED = {"VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "0"}
"""So vLLM widens codes in each product of matrices, and not once for all when it starts."""
KINDS = {"": "dense", "experts-": "experts", "latent-": "latent"}
CASES = {
    **{
        f"{start}{prefix}{form}": Case(run=form, options=options, kind=kind)
        for start, options in STARTS.items()
        for prefix, kind in KINDS.items()
        for form in FORMS
    },
    "block-to-plain": Case(run="fp8-block", served=None),
    "plain-to-block": Case(run=None, served="fp8-block"),
    "block-to-channel": Case(run="fp8-block", served="fp8-channel"),
    "block-to-int8": Case(
        run="fp8-block", served=None, options={"quantization": "int8_per_channel_weight_only"}
    ),
    "mxfp8": Case(run="mxfp8", forms=tiny_codes, environment=WIDENED),
    **{
        f"{start}gpt-oss": Case(run="gpt-oss", options=options, kind="gpt-oss", forms=tiny_codes)
        for start, options in STARTS.items()
    },
    "made-up-cache": Case(run="fp8-block", options=DUMMY | {"kv_cache_dtype": "fp8"}),
}


def main(folder: Path, names: list[str]) -> None:
    block_kernel.register()
    block_kernel.choose_triton_for_experts()
    block_kernel.choose_emulation()
    note(folder, {name: CASES[name].hold for name in names})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

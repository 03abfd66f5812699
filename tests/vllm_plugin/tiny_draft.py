"""A tiny GLM-4 MoE with a layer that drafts tokens, and what engines of it hold after updates, as one file.

Run as a program: engines are forks of a process that imports vLLM in a way of its own, see `engines` of the
conformance suite, which must be on the path.
"""

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import zoo
from architecture import ATTENTION, text_model
from engines import Engine, answers, open_run, update
from safetensors.torch import load_file, save_file
from training import NEWEST, publish
from vllm import LLM

from patchstore.bucket.digests import digest
from patchstore.read.replay import replay
from patchstore.stores import open_store
from patchstore.tensors.bits import raw_bytes

SPECULATIVE = {"method": "mtp", "num_speculative_tokens": 1}


def save(folder: Path) -> Path:
    """Write a checkpoint whose draft layer has an embedding and a head of its own, of no use to vLLM."""
    few = {"n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 1}
    drafting = {"use_qk_norm": True, "num_nextn_predict_layers": 1, "num_experts_per_tok": 2}
    zoo.save(text_model("glm4-moe-draft", "Glm4MoeConfig", ATTENTION, few, drafting), folder)
    tensors = load_file(folder / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    # transformers does not build the draft layer: one with experts, and a few tensors more.
    last, draft = "model.layers.1.", "model.layers.2."
    shapes |= {n.replace(last, draft): shape for n, shape in shapes.items() if n.startswith(last)}
    shapes |= {f"{draft}{name}.weight": (128,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes |= {f"{draft}{name}.weight": (250, 128) for name in ("embed_tokens", "shared_head.head")}
    shapes[f"{draft}eh_proj.weight"] = (128, 256)
    random = torch.Generator().manual_seed(3)
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        weight = noise * 1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.2 * noise
        made[name] = weight.to(tensors[name].dtype if name in tensors else torch.bfloat16)
    save_file(made, folder / "model.safetensors")
    return folder


def draft_bits(worker: Any) -> dict[str, str]:
    """Digest the draft model's parameters, as vLLM has it."""
    draft = worker.model_runner.get_draft_model()
    return {name: digest(raw_bytes(parameter.detach())) for name, parameter in draft.named_parameters()}


def look(llm: LLM) -> dict[str, Any]:
    # The first answer may convert buffers, so this comes first.
    said = answers(llm)
    (fingerprint,), (draft,) = llm.collective_rpc("delta_fingerprint"), llm.collective_rpc(draft_bits)
    return {"answers": said, "fingerprint": fingerprint, "draft": draft}


def main(folder: Path) -> None:
    checkpoint, store = save(folder / "checkpoint"), folder / "store"
    publish(checkpoint, store)

    def follow(llm: LLM) -> dict[str, Any]:
        found = {"start": look(llm), "status_at_start": llm.collective_rpc("delta_status")[0]}
        open_run(llm, store)
        for version in (0, 1, NEWEST):
            update(llm, version)
            found[str(version)] = look(llm)
        return found | {"status": llm.collective_rpc("delta_status")[0]}

    def engine(name: str, folder_of_target: Path, **speculative: Any) -> Engine:
        arguments = {"speculative_config": SPECULATIVE | speculative}
        return Engine(model=folder_of_target, arguments=arguments, log=folder / f"{name}.log")

    found = {"followed": engine("followed", checkpoint).run(follow)}
    out = folder / "replayed"
    with closing(open_store(store)) as bucket:
        replay(bucket, NEWEST, out=out)
    found["fresh"] = engine("fresh", out).run(look)
    # The same layer, but from a folder of its own.
    other = shutil.copytree(checkpoint, folder / "draft")
    found["separate"] = engine("separate", checkpoint, model=str(other)).run(follow)
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

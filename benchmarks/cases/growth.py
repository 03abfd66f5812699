"""Measure how the host's work grows with the number of tensors, of a model with the names of DeepSeek-V3.

The matrices are tiny, so what is measured is the work for each tensor alone. A model in FP8 has 90,000
tensors: 256 experts of three matrices in each of 58 layers, each with its scales.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from patchstore import Publisher, Replica
from patchstore.bucket.records import Manifest
from patchstore.stores import layout
from patchstore.stores.folder import FolderStore
from patchstore.tensors.bits import bits

_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_a_layernorm",
    "self_attn.kv_a_layernorm",
)
_NUM_LAYERS, _NUM_DENSE, _NUM_EXPERTS = 61, 3, 256
_VERSIONS = 4

Shape = tuple[tuple[int, ...], torch.dtype]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, nargs="+", default=[10_000, 30_000, 91_000])
    parser.add_argument("--encodings", nargs="+", default=["gap", "context"])
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that change")
    parser.add_argument("--device", default="cpu", help="of the trainer and of the replica")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tensors and encoding."""
    for encoding in args.encodings:
        for num in args.tensors:
            yield _row(args, num, encoding)
            gc.collect()


def _row(args: argparse.Namespace, num: int, encoding: str) -> dict[str, Any]:
    random = torch.Generator().manual_seed(0)
    model = {
        name: (0.02 * torch.randn(shape, generator=random)).to(args.device, dtype)
        for name, (shape, dtype) in islice(_names(), num)
    }
    seconds: dict[str, list[tuple[float, float]]] = {}

    def timed(what: str, do: Callable[[], Any]) -> Any:
        wall, host = time.perf_counter(), time.process_time()
        found = do()
        spent = time.perf_counter() - wall, time.process_time() - host
        seconds.setdefault(what, []).append(spent)
        return found

    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(Path(folder) / "bucket")
        publisher = timed("open", lambda: Publisher(store, model, encoding=encoding, dtype=None))
        with publisher:
            timed("anchor", lambda: publisher.publish_patch(0).result())
            held = {name: tensor.clone() for name, tensor in model.items()}
            replica = timed("join", lambda: Replica(store, held, held=0))
            for version in range(1, _VERSIONS + 1):
                _change(model, args.density, random)
                newest = timed("publish", partial(_published, publisher, version))
                timed("update", partial(replica.update, version))
        assert all(torch.equal(bits(held[name]), bits(tensor)) for name, tensor in model.items())
        assert newest.delta is not None
        return {
            "encoding": encoding,
            "device": args.device,
            "tensors": len(model),
            "elements": sum(tensor.numel() for tensor in model.values()),
            "changed": newest.delta.num_changed,
            "bytes": newest.delta.num_bytes,
            "manifest_bytes": store.size(layout.manifest_key(_VERSIONS)),
            **{f"{what}_s": min(wall for wall, _ in each) for what, each in seconds.items()},
            **{f"{what}_host_s": min(host for _, host in each) for what, each in seconds.items()},
        }


def _published(publisher: Publisher, step: int) -> Manifest:
    return publisher.publish_patch(step).result()


def _change(model: dict[str, torch.Tensor], density: float, random: torch.Generator) -> None:
    """Change a share of each tensor's elements in bf16, one of a tensor at least."""
    for tensor in model.values():
        if tensor.dtype == torch.bfloat16:
            flat = bits(tensor)
            num = max(1, round(density * len(flat)))
            flat[torch.randint(len(flat), (num,), generator=random).to(flat.device)] ^= 1


def _names() -> Iterator[tuple[str, Shape]]:
    yield "model.embed_tokens.weight", ((64, 32), torch.bfloat16)
    for number in range(_NUM_LAYERS):
        layer = f"model.layers.{number}."
        for name in _ATTENTION:
            yield from _quantized(f"{layer}self_attn.{name}", (32, 32))
        for name in _NORMS:
            yield f"{layer}{name}.weight", ((32,), torch.bfloat16)
        modules = [f"{layer}mlp."]
        if number >= _NUM_DENSE:
            yield f"{layer}mlp.gate.weight", ((16, 32), torch.bfloat16)
            yield f"{layer}mlp.gate.e_score_correction_bias", ((16,), torch.float32)
            modules = [f"{layer}mlp.experts.{expert}." for expert in range(_NUM_EXPERTS)]
            modules.append(f"{layer}mlp.shared_experts.")
        for module in modules:
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield from _quantized(module + name, (16, 32))


def _quantized(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (shape, torch.bfloat16)
    yield f"{name}.weight_scale_inv", ((1, 1), torch.float32)

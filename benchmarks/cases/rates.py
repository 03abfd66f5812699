"""What a step of AdamW changes in a trained model, at each learning rate, and the bytes of its version.

The model and its text are the demo's: 20 million parameters, fp32 masters, served in bf16. It learns for
`--warm-up` steps. From there each learning rate takes `--steps` steps and publishes them in `context`; the
first half, in which AdamW's moments adapt to the new rate, is left out of the figures.
"""

import argparse
import copy
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from patchstore import Publisher, Replica
from patchstore.stores.memory import MemoryStore
from patchstore.tensors.bits import bits

if TYPE_CHECKING:
    from examples.demo.training import Trainer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-7, 1e-6, 3e-6, 1e-5, 1e-4])
    parser.add_argument("--warm-up", type=int, default=240, help="steps before the first version")
    parser.add_argument("--steps", type=int, default=8, help="published steps of each rate")


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per learning rate."""
    # Here, as all cases are imported to run one: not every machine has transformers.
    from examples.demo.corpus import encode, read_topics, train_tokenizer
    from examples.demo.training import Trainer

    texts, topic = read_topics()
    tokenizer = train_tokenizer([*texts, topic])
    trainer = Trainer(encode(tokenizer, texts), len(tokenizer))
    for loss in trainer.warm_up(args.warm_up):
        last = loss
    for rate in args.rates:
        yield {"learning_rate": rate, "loss": last, **_publish(copy.deepcopy(trainer), rate, args.steps)}


def _publish(trainer: "Trainer", rate: float, num_steps: int) -> dict[str, Any]:
    trainer.use_rate(rate)
    store = MemoryStore()
    with Publisher(
        store, trainer.model, dtype=torch.bfloat16, encoding="context", anchor_every=num_steps + 1
    ) as publisher:
        anchor = publisher.publish_patch(-1).result().anchor
        assert anchor is not None
        deltas = []
        for step in range(num_steps):
            trainer.step()
            delta = publisher.publish_patch(step).result().delta
            assert delta is not None
            deltas.append(delta)
    follower = Replica(store, {})
    follower.update()
    for name, weight in trainer.model.state_dict().items():
        if name in follower.tensors and not torch.equal(
            bits(weight.to(torch.bfloat16)), bits(follower.tensors[name])
        ):
            raise AssertionError(f"{name} differs at a learning rate of {rate}")
    last = deltas[num_steps // 2 :]
    num_changed = fmean(delta.num_changed for delta in last)
    num_bytes = fmean(delta.num_bytes for delta in last)
    return {
        "num_elements": trainer.num_parameters,
        "num_steps": len(last),
        "density": num_changed / trainer.num_parameters,
        "density_min": min(delta.num_changed for delta in last) / trainer.num_parameters,
        "density_max": max(delta.num_changed for delta in last) / trainer.num_parameters,
        "payload_bytes": num_bytes,
        "bytes_per_change": num_bytes / num_changed,
        "anchor_bytes": anchor.num_bytes,
        "share_of_anchor": num_bytes / anchor.num_bytes,
    }

"""The trainer that is killed: it trains, publishes every step, and acknowledges each stored version.

Its state is in the store alone. A new process replays the newest version and trains on from it. So it
continues the one chain of versions, at whichever moment the process before it was killed.
"""

import json
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from patchstore import Publisher, Store, open_store, replay
from patchstore.bucket import history
from patchstore.bucket.state_sums import state_total
from patchstore.errors import VersionConflict
from patchstore.tensors import state_digest

FINAL = "final.safetensors"
"""The file in the trainer's folder that has the weights of its last version. It is written at SIGTERM."""
ANCHOR_EVERY = 8

_VOCABULARY = 256
_SEQUENCES, _LENGTH = 4, 32
_RATE = 1e-3


def main() -> None:
    job = json.loads(sys.argv[1])
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    store = open_store(job["url"], **job["options"])
    while True:
        try:
            _train(store, job, ended)
        except VersionConflict:
            # A commit of the killed process took effect only now: begin again behind it.
            continue
        return


def _train(store: Store, job: Mapping[str, Any], ended: threading.Event) -> None:
    model = _model(job["checkpoint"])
    folder = Path(job["folder"])
    is_begun = history.read_header(store) is not None
    newest = history.head(store) if is_begun else None
    if newest is not None:
        replayed = folder / f"replayed-{uuid.uuid4().hex}"
        replay(store, newest.version, out=replayed)
        for file in replayed.glob("*.safetensors"):
            model.load_state_dict(load_file(file), strict=False)
        shutil.rmtree(replayed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    step = 0 if newest is None else newest.step
    with Publisher(
        store, model, files=job["checkpoint"], anchor_every=ANCHOR_EVERY, resume=is_begun
    ) as publisher:
        header = history.read_header(store)
        assert header is not None
        while True:
            step += 1
            _step(model, optimizer)
            version = publisher.publish_patch(step).result().version
            # The digest is of the trainer's weights, and not of what it published.
            weights = _served(model)
            sums = state_digest.of_tensors(header.schema, weights.items())
            _say(version=version, step=step, state=state_total(header.schema, sums))
            if ended.wait(job["pace_s"]):
                break
    save_file(weights, folder / FINAL)
    _say(final=version)


def _model(checkpoint: str | None) -> torch.nn.Module:
    """Return the tests' Qwen3 of a checkpoint folder, or without one a model that needs no transformers."""
    torch.manual_seed(0)
    if checkpoint is None:
        return torch.nn.Sequential(torch.nn.Embedding(_VOCABULARY, 64), torch.nn.Linear(64, _VOCABULARY))
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(_VOCABULARY, (_SEQUENCES, _LENGTH))
    said = model(tokens)
    logits = said if isinstance(said, torch.Tensor) else said.logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def _served(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

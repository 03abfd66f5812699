"""Train, publish every step, serve every version, and verify it: `python -m examples.demo --store file`.

Nothing goes on when this ends: the servers it starts end with it, also on Ctrl-C.
"""

import argparse
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from examples import report

# Ten seconds and more where files are not cached yet.
with report.stage("loading torch, transformers and patchstore"):
    import httpx
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from examples.checkpoint import save, served_weights
    from examples.demo import corpus, tables
    from examples.demo.training import Trainer
    from examples.serving import FollowCommand, Vllm
    from examples.stores import KINDS, Kind, start_store
    from patchstore import Manifest, PatchstoreError, Publisher, Schema, Store, open_store, replay
    from patchstore.bucket import history
    from patchstore.bucket.state_sums import state_total
    from patchstore.tensors import state_digest

WARM_UP_STEPS = 100
STEPS = 12
REPLAYED = STEPS // 2
PROMPTS = (
    'The "assert" statement',
    "Assertions",
    "If the object",
    "This method is called",
    "The value of",
    "A name",
)
NUM_TOKENS = 32


def main() -> int:
    """Run the demo; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--store", choices=KINDS, default="file", help="a folder, or a server")
    parser.add_argument("--folder", type=Path, default=Path("demo-run"), help="wiped at the start")
    arguments = parser.parse_args()
    disable_progress_bar()
    # `kill` must end the started programs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with ExitStack() as running:
            proofs = tell(arguments.store, arguments.folder, running)
    except KeyboardInterrupt:
        report.console.print("interrupted; everything that was started has ended")
        return 130
    except (PatchstoreError, RuntimeError, TimeoutError, httpx.HTTPError) as exc:
        report.console.print(f"the demo failed: {exc}", style="bold red", markup=False)
        return 1
    failed = [claim for claim, found in proofs if not found]
    for claim in failed:
        report.console.print(f"the demo failed: not true: {claim}", style="bold red", markup=False)
    return 1 if failed else 0


def tell(kind: Kind, folder: Path, running: ExitStack) -> list[tuple[str, bool]]:
    """Run the demo, and return its claims, and whether each is true."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with report.stage(f"starting the store, {kind}"):
        place = start_store(kind, folder, running)

    trainer, topic, checkpoint = warmed_up(folder)

    # The trainer's side: a bucket, a publisher, and version 0, which is the model as it is now.
    store = open_store(place.url, **place.options)
    publisher = running.enter_context(Publisher(store, trainer.model, files=checkpoint))
    with report.stage(f"publishing version 0, the anchor, to {place.url}"):
        first = publisher.publish_patch(0).result()
    header = history.read_header(store)
    assert header is not None

    # The server's side: vLLM on that checkpoint, and the process that keeps it at the head.
    vllm = running.enter_context(Vllm(checkpoint, folder / "vllm.log", hub=place.hub))
    with report.stage(f"starting vLLM, {vllm.url} (its first start ever takes a minute longer)"):
        vllm.wait_until_healthy()
    follow = running.enter_context(FollowCommand(place.url, place.reading, vllm.url, folder / "follow.log"))
    with report.stage(f"patchstore follow {place.url} --server {vllm.url}"):
        follow.wait_for(first.version)
    before, loss_before = answers(vllm, topic)

    trainer.specialise(topic)
    head, kept = publish_steps(trainer, publisher, header.schema, follow, vllm)
    after, loss_after = answers(vllm, topic)
    report.console.print(tables.generations_table(PROMPTS, before, after))

    status = vllm.status()
    proofs = [
        (f"the server serves version {head.version}, the head", status.serving == head.version),
        (
            f"its state digest is the manifest's, {head.state.total[:19]}",
            status.state_digest == head.state.total,
        ),
        (
            "its live parameters have the trainer's bits, read from the server's memory",
            vllm.holds(served_weights(trainer.model)),
        ),
        (f"its answers are labelled with weight version {head.version}", vllm.label() == str(head.version)),
        # Not that answers differ: on some CPUs none of them does, as few tokens are a close choice.
        (
            f"its loss on what was taught fell from {loss_before:.2f} to {loss_after:.2f}",
            loss_after < loss_before,
        ),
        *replay_proofs(store, folder / f"version-{REPLAYED}", kept),
    ]
    report.console.print(report.proofs_table(proofs))
    report.console.print(ending(kind, place.url, store))
    return proofs


def warmed_up(folder: Path) -> tuple[Trainer, torch.Tensor, Path]:
    """Return a trainer whose model can write a little, the topic it has not seen, and its checkpoint."""
    texts, topic = corpus.read_topics()
    tokenizer = corpus.train_tokenizer([*texts, topic])
    tokens = corpus.encode(tokenizer, texts)
    trainer = Trainer(tokens, len(tokenizer))
    report.console.print(
        f"{trainer.num_parameters:,} parameters, fp32 masters, AdamW; {len(tokens):,} tokens of Python's help"
    )
    report.train("warming up, so that it writes something", trainer.warm_up(WARM_UP_STEPS), WARM_UP_STEPS)
    checkpoint = folder / "checkpoint"
    save(trainer.model, tokenizer, checkpoint)
    return trainer, corpus.encode(tokenizer, [topic]), checkpoint


def publish_steps(
    trainer: Trainer, publisher: Publisher, schema: Schema, follow: FollowCommand, vllm: Vllm
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Publish each step and wait until it is served; return the head, and version `REPLAYED`'s weights."""
    table = tables.versions_table()
    with report.growing("publishing steps, and waiting until they are served", table):
        for step in range(1, STEPS + 1):
            loss = trainer.step()
            publication = publisher.publish_patch(step)
            manifest = publication.result()
            weights = served_weights(trainer.model)
            # Of the trainer's weights, not of what was published: the server must come to the same.
            sums = state_digest.of_tensors(schema, weights.items())
            if manifest.version == REPLAYED:
                kept = weights
            # On-policy training waits for this too: the next rollouts come from these weights.
            follow.wait_for(manifest.version)
            status = vllm.status()
            assert manifest.delta is not None
            assert publication.publish_s is not None
            tables.add_version(
                table,
                manifest,
                loss=loss,
                share=manifest.delta.share_changed(schema),
                publish_s=publication.publish_s,
                timings=status.ranks[0]["timings"],
                equal=state_total(schema, sums) == status.state_digest,
            )
    return manifest, kept


def answers(vllm: Vllm, topic: torch.Tensor) -> tuple[list[str], float]:
    """Return what the server writes after each of the prompts, and its loss on a topic."""
    with report.stage(
        f"{len(PROMPTS)} answers of {NUM_TOKENS} tokens each, and the loss on {corpus.TOPIC!r}"
    ):
        return vllm.complete(PROMPTS, NUM_TOKENS), vllm.loss(topic.tolist())


def replay_proofs(store: Store, out: Path, kept: dict[str, torch.Tensor]) -> list[tuple[str, bool]]:
    """Rebuild version `REPLAYED` from the bucket, and compare it with the weights the trainer had then."""
    with report.stage(f"patchstore replay, version {REPLAYED} into {out}"):
        replay(store, REPLAYED, out=out)
    rebuilt: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        rebuilt |= load_file(file)
    # Tied tensors are stored once; transformers ties them again.
    opened: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    loaded = opened.state_dict()
    return [
        (
            f"version {REPLAYED}, replayed, has the trainer's bits in all {len(rebuilt)} tensors",
            all(same_bits(tensor, kept[name]) for name, tensor in rebuilt.items()),
        ),
        (
            "transformers opens that folder, and has the trainer's bits too",
            all(same_bits(loaded[name], kept[name]) for name in kept),
        ),
    ]


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two bf16 tensors are equal as bits: -0.0 is not 0.0, and a NaN is itself."""
    return left.dtype == right.dtype == torch.bfloat16 and torch.equal(
        left.view(torch.int16), right.view(torch.int16)
    )


def ending(kind: str, url: str, store: Store) -> str:
    """Say where everything is."""
    if kind != "file":
        keys = list(store.list())
        return f"{url} held {len(keys)} objects; their server ran for this demo only, and ends with it"
    return f"the bucket is the folder {url}: try `patchstore log {url}`"


if __name__ == "__main__":
    sys.exit(main())

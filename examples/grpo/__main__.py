"""Teach a small model to sort digits; two vLLM servers generate, and weights travel through a bucket only.

The trainer never waits for a server to be updated: answers may be some versions old, and the run records how
old. One server is killed in the middle and started again. Nothing goes on when this ends.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Literal

from examples import report

# Ten seconds and more where files are not cached yet.
with report.stage("loading torch, transformers and patchstore"):
    import httpx
    import torch
    from transformers.utils.logging import disable_progress_bar

    from examples.checkpoint import save, served_weights
    from examples.grpo import task
    from examples.grpo.picture import Step, draw
    from examples.grpo.policy import SHAPES, Group, Policy
    from examples.grpo.rollouts import Rollouts, ask, served_version
    from examples.processes import Program
    from examples.serving import FollowCommand, Vllm
    from examples.stores import KINDS, Kind, Place, start_store
    from patchstore import PatchstoreError, Publication, Publisher, open_store

GROUPS = 16
"""Prompts of a step; each has a group of answers."""
EXAM = 64
"""Prompts that the model is examined on, before and after."""
_LEAST_GAIN = 0.1
"""By how much the mean reward must rise from the first ten steps to the last ten."""
_PATIENCE_S = 600.0


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo", description=__doc__)
    parser.add_argument("--store", choices=KINDS, default="file", help="a folder, or a server")
    parser.add_argument("--folder", type=Path, default=Path("grpo-run"), help="wiped at the start")
    parser.add_argument("--steps", type=int, default=100, help="at least 30")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small", help="sizes of the model")
    parser.add_argument("--lora", action="store_true", help="train an adapter, and publish that alone")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of trainer and servers")
    arguments = parser.parse_args()
    if arguments.steps < 30:
        parser.error("--steps must be at least 30: the first ten and the last ten are compared")
    disable_progress_bar()
    # `kill` must end the started programs, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with ExitStack() as running:
            proofs = Run(arguments, running).play()
    except KeyboardInterrupt:
        report.console.print("interrupted; everything that was started has ended")
        return 130
    except (PatchstoreError, RuntimeError, TimeoutError, httpx.HTTPError) as exc:
        report.console.print(f"the run failed: {exc}", style="bold red", markup=False)
        return 1
    report.console.print(report.proofs_table(proofs))
    return 0 if all(found for _, found in proofs) else 1


class Run:
    """One run, from random weights to the picture."""

    def __init__(self, arguments: argparse.Namespace, running: ExitStack) -> None:
        self._folder: Path = arguments.folder
        self._num_steps: int = arguments.steps
        self._store: Kind = arguments.store
        self._device: Literal["cpu", "cuda"] = arguments.device
        self._shape: str = arguments.shape
        self._adapter: str | None = "policy" if arguments.lora else None
        self._running = running
        self._servers: list[Vllm] = []
        self._rows: list[Step] = []
        self._published: list[Publication] = []

    def play(self) -> list[tuple[str, bool]]:
        """Run it, write the picture, and return what was claimed and whether it is true."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        policy = Policy(SHAPES[self._shape], self._device)
        checkpoint = self._warmed_up(policy)
        place = start_store(self._store, self._folder, self._running)
        store = self._running.enter_context(closing(open_store(place.url, **place.options)))
        if self._adapter is None:
            publisher = Publisher(store, policy.model, files=checkpoint, encoding="context")
        else:
            policy.adapt(str(checkpoint))
            publisher = Publisher(store, policy.model, adapter="default")
        self._running.enter_context(publisher)
        self._schema = publisher.schema
        first = publisher.publish_patch(0).result()
        with report.stage("starting two vLLM servers (their first start ever takes a minute longer)"):
            for name in ("a", "b"):
                self._servers.append(self._start(checkpoint, place, name))
            for server in self._servers:
                server.wait_until_healthy()
        urls = [server.url for server in self._servers]
        follow = self._running.enter_context(
            FollowCommand(place.url, place.reading, urls, self._folder / "follow.log", self._adapter)
        )
        with report.stage(f"patchstore follow {place.url}, for both servers"):
            self._wait_for_servers(first.version, follow)
        before = examine(urls[0], self._adapter)

        killed, returned = self._learn(policy, publisher, checkpoint, place, follow)
        head = self._published[-1].result()
        with report.stage(f"both servers come to version {head.version}, the head"):
            self._wait_for_servers(head.version, follow)
        after = examine(urls[0], self._adapter)
        return self._report(policy, killed, returned, (before, after))

    def _warmed_up(self, policy: Policy) -> Path:
        """Teach the model the form of an answer; return its checkpoint, which the servers start from."""
        report.console.print(f"{policy.num_parameters:,} parameters, fp32 masters, AdamW")
        num_steps = SHAPES[self._shape].warm_up_steps
        report.train("warming up on answers of which 30 % are sorted", policy.warm_up(), num_steps)
        checkpoint = self._folder / "checkpoint"
        save(policy.model, task.tokenizer(), checkpoint)
        return checkpoint

    def _start(self, checkpoint: Path, place: Place, name: str, port: int | None = None) -> Vllm:
        log = self._folder / f"vllm-{name}.log"
        return self._running.enter_context(
            Vllm(
                *(checkpoint, log),
                hub=place.hub,
                port=port,
                device=self._device,
                num_threads=1,
                adapter=self._adapter,
            )
        )

    def _learn(
        self, policy: Policy, publisher: Publisher, checkpoint: Path, place: Place, follow: Program
    ) -> tuple[int, int]:
        """Take all steps, and publish each. Kill a server after a third of them, and start it again.

        Returns:
            The step at which it was killed, and the first that learnt from its answers again.
        """
        killed, returned = self._num_steps // 3, 0
        victim = self._servers[1]
        watched: list[Program] = [*self._servers, follow]
        urls = [server.url for server in self._servers]
        with Rollouts(urls, max_waiting=GROUPS // 2, seed=1, adapter=self._adapter) as rollouts:
            for number in range(1, self._num_steps + 1):
                began = time.monotonic()
                if number == killed:
                    watched.remove(victim)
                    victim.kill()
                    self._servers[1] = self._start(checkpoint, place, "b-again", victim.port)
                    watched.append(self._servers[1])
                    report.console.print(f"killed {victim.url} with SIGKILL, and started it again")
                if number == self._num_steps - 10 and not returned:
                    with report.stage("waiting for the restarted server, for the last ten steps"):
                        self._wait_until_served(victim.url, watched)
                groups = self._batch(rollouts, watched)
                policy.step(groups)
                self._published.append(publisher.publish_patch(number))
                row = describe(number, groups, time.monotonic() - began)
                self._rows.append(row)
                if number > killed and not returned and _is_back(groups, victim.url, killed):
                    returned = number
                    report.console.print(f"step {number} learns from the restarted server's answers")
                report.console.print(
                    f"step {number:3}  reward {row.reward:.3f}  right {row.right:4.0%}  "
                    f"lag {row.lag:.1f} (at most {row.max_lag})  {row.seconds:.1f} s"
                )
        return killed, returned

    def _batch(self, rollouts: Rollouts, watched: Sequence[Program]) -> list[Group]:
        """Return the groups of one step; it fails if a program ended, or none came in ten minutes."""
        groups: list[Group] = []
        deadline = time.monotonic() + _PATIENCE_S
        while len(groups) < GROUPS:
            if group := rollouts.take(timeout_s=1):
                groups.append(group)
                continue
            for program in watched:
                program.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server answered in {_PATIENCE_S:.0f} s")
        return groups

    def _wait_until_served(self, url: str, watched: Sequence[Program]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            for program in watched:
                program.check_alive()
            try:
                if served_version(url, self._adapter) is not None:
                    return
            except PatchstoreError:
                pass
            time.sleep(0.25)
        raise TimeoutError(f"{url} was not brought to a version in {_PATIENCE_S:.0f} s")

    def _wait_for_servers(self, version: int, follow: Program) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while any(server.status().serving != version for server in self._servers):
            follow.check_alive()
            if time.monotonic() > deadline:
                raise TimeoutError(f"the servers did not come to version {version} in {_PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def _report(
        self, policy: Policy, killed: int, returned: int, exam: tuple[float, float]
    ) -> list[tuple[str, bool]]:
        """Write the rows and the picture, and check the claims."""
        manifests = [publication.result() for publication in self._published]
        for row, manifest in zip(self._rows, manifests, strict=True):
            # A version in full: all of it may have changed.
            row.density = 1.0
            if manifest.delta is not None:
                row.density = manifest.delta.share_changed(self._schema)
            row.num_bytes = manifest.num_bytes if manifest.delta is None else manifest.delta.num_bytes
        lines = [json.dumps(asdict(row)) for row in self._rows]
        (self._folder / "steps.jsonl").write_text("\n".join(lines) + "\n")
        picture = self._folder / "grpo.png"
        what = "of a LoRA adapter" if self._adapter else "of a model"
        title = (
            f"{self._schema.num_elements / 1e6:.1f} M parameters {what} learn to sort; two vLLM servers; "
            f"weights through a bucket ({self._store})"
        )
        with report.stage("drawing the picture"):
            draw(self._rows, killed, returned or self._num_steps, title, picture)
        report.console.print(f"picture: {picture}; rows: {self._folder / 'steps.jsonl'}")
        rewards = [row.reward for row in self._rows]
        first, last = mean(rewards[:10]), mean(rewards[-10:])
        head = manifests[-1]
        num_bytes, density = sum(row.num_bytes for row in self._rows), mean(row.density for row in self._rows)
        proofs = [
            (
                f"the mean reward rose from {first:.2f} in the first ten steps to {last:.2f} in the last ten",
                last >= first + _LEAST_GAIN,
            ),
            (
                f"of {EXAM} unseen prompts, {exam[0]:.0%} were right before and {exam[1]:.0%} after",
                exam[1] > exam[0],
            ),
            (
                f"follow brought the killed server back, and step {returned} learnt from its answers",
                returned > killed,
            ),
            (
                f"every step is a version: {num_bytes / 1e6:.1f} MB in all, {density:.1%} changed in each",
                all(new.version == old.version + 1 for old, new in pairwise(manifests)),
            ),
        ]
        for server in self._servers:
            status = server.status()
            if self._adapter is None:
                equal = status.state_digest == head.state.total and server.holds(served_weights(policy.model))
            else:
                equal = server.holds_adapter(saved_adapter(policy.model))
            proofs.append(
                (
                    f"{server.url} holds version {head.version}, with the trainer's bits in its memory",
                    status.serving == head.version and equal,
                )
            )
        return proofs


def saved_adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapter as PEFT saves them."""
    import peft

    return {name: each.detach().cpu() for name, each in peft.get_peft_model_state_dict(model).items()}


def describe(number: int, groups: Sequence[Group], seconds: float) -> Step:
    """Return what a step that learnt from these groups records. Version n is the one of step n."""
    rewards = [reward for group in groups for reward in group.rewards]
    lags = [number - 1 - group.version for group in groups]
    return Step(
        step=number,
        reward=mean(rewards),
        right=mean(reward == 1 for reward in rewards),
        lag=mean(lags),
        max_lag=max(lags),
        answers_of=dict(Counter(group.server for group in groups for _ in group.answers)),
        seconds=seconds,
    )


def _is_back(groups: Sequence[Group], url: str, killed: int) -> bool:
    """Whether one of the groups comes from that server, and from a version after the kill."""
    return any(group.server == url and group.version >= killed for group in groups)


def examine(url: str, adapter: str | None = None) -> float:
    """Return the share of `EXAM` fixed prompts that a server answers right, greedily."""
    draw_fixed = random.Random("exam")
    prompts = [task.draw_prompt(draw_fixed) for _ in range(EXAM)]
    with report.stage(f"{url} sorts {EXAM} prompts"), httpx.Client(timeout=120) as client:
        version = served_version(url, adapter) or 0
        groups = [ask(client, url, version, prompt, greedy=True, adapter=adapter) for prompt in prompts]
    return mean(group.rewards[0] == 1 for group in groups)


if __name__ == "__main__":
    # The servers need the other cores.
    torch.set_num_threads(1)
    sys.exit(main())

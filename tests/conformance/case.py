"""One architecture in one layout: are weights after updates those of a fresh start from the same version?"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import torch
from architecture import LAYOUTS, Architecture, Layout
from engines import Engine, EngineFailed, answers, open_run, update
from safetensors import safe_open
from training import NEWEST, Patch, publish
from vllm import LLM
from zoo import ARCHITECTURES, save

from patchstore.read.replay import replay
from patchstore.stores import open_store

COMPARED = (1, NEWEST)
"""Versions that are compared: a delta after an anchor, and one after deltas and another anchor."""

Verdict = Literal["equal", "not offered by vLLM", "refused", "FAILED"]
State = tuple[list[dict[str, str]], list[Any]]
"""Each rank's digests by parameter or buffer, and the answers to some prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one case ended."""

    verdict: Verdict
    reason: str = ""
    """Why it is not `equal`."""
    start: str = ""
    """What the engine started from: `dummy` weights, or the `checkpoint` that became version 0."""
    num_names: int = 0
    """Tensors of the checkpoint."""
    map: Mapping[str, Any] = field(default_factory=dict)
    """What `delta_status` of the first rank says under that key."""
    upstream: str = ""
    """How vLLM's own loader of patches did; empty where it was not tried."""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.reason}" if self.reason else self.verdict


def run(name: str, layout_name: str, folder: Path) -> Outcome:
    """Run one case; its files stay in the folder."""
    architecture, layout = ARCHITECTURES[name], LAYOUTS[layout_name]
    if reason := architecture.refusal(layout_name):
        return Outcome(verdict="not offered by vLLM", reason=reason)
    checkpoint, store = save(architecture, folder / "checkpoint"), folder / "store"
    patches = publish(checkpoint, store)
    case = _Case(architecture, layout, folder)
    # About half of the cases begin with each, and a case always with the same.
    is_odd = crc32(f"{name}:{layout_name}".encode()) % 2 == 1
    start = "dummy" if is_odd and not architecture.only_from_checkpoint else "checkpoint"
    outcome = {"start": start, "num_names": len(_shapes(checkpoint))}
    try:
        states, status = case.engine("updated", checkpoint, start).run(case.follow)
    except EngineFailed as exc:
        return Outcome(verdict="refused" if exc.refused else "FAILED", reason=str(exc), **outcome)
    outcome |= {"map": status.get("map", {})}
    truths = {}
    for version in COMPARED:
        try:
            truths[version] = case.truth(version)
        except EngineFailed as exc:
            return Outcome(verdict="FAILED", reason=f"a fresh start from version {version}: {exc}", **outcome)
        if reason := differences(states[version], truths[version]):
            return Outcome(verdict="FAILED", reason=f"version {version}: {reason}", **outcome)
    if layout_name == "tp1":
        outcome |= {"upstream": case.upstream(patches, truths[NEWEST])}
    return Outcome(verdict="equal", **outcome)


class _Case:
    def __init__(self, architecture: Architecture, layout: Layout, folder: Path) -> None:
        self._arguments = {**architecture.engine, **layout.engine}
        self._generates = architecture.generates and layout.generates
        self._folder = folder

    def engine(self, name: str, model: Path, start: str = "checkpoint") -> Engine:
        load_format = "dummy" if start == "dummy" else "auto"
        return Engine(
            model=model,
            arguments=self._arguments | {"load_format": load_format},
            log=self._folder / f"{name}.log",
        )

    def follow(self, llm: LLM) -> tuple[dict[int, State], dict[str, Any]]:
        """Bring an engine to every version in turn; return its state at some, and its status."""
        open_run(llm, self._folder / "store")
        states = {}
        for version in range(NEWEST + 1):
            update(llm, version)
            if version in COMPARED:
                states[version] = self._state(llm)
        return states, llm.collective_rpc("delta_status")[0]

    def truth(self, version: int) -> State:
        """Return the state of a fresh engine that loaded a version from a folder."""
        out = self._folder / f"version-{version}"
        with closing(open_store(self._folder / "store")) as store:
            replay(store, version, out=out)
        return self.engine(out.name, out).run(self._state)

    def upstream(self, patches: list[Patch], truth: State) -> str:
        """Say how vLLM's own loader of patches does, from version 0 to the newest."""
        checkpoint, file = self._folder / "checkpoint", self._folder / "patches.pt"
        torch.save({"patches": patches, "shapes": _shapes(checkpoint)}, file)

        def work(llm: LLM) -> State:
            llm.collective_rpc("conformance_load_upstream", args=(str(file),))
            return self._state(llm)

        try:
            state = self.engine("upstream", checkpoint).run(work)
        except EngineFailed as exc:
            return f"fails: {exc}"
        return differences(state, truth) or "equal"

    def _state(self, llm: LLM) -> State:
        # The first answer may convert a buffer, such as the cache of rotations, so this comes first.
        said = answers(llm) if self._generates else []
        return llm.collective_rpc("delta_fingerprint"), said


def differences(state: State, truth: State) -> str:
    """Say what differs between two states; empty if nothing does."""
    for rank, (found, expected) in enumerate(zip(state[0], truth[0], strict=True)):
        if wrong := sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        ):
            return f"{len(wrong)} of {len(expected)} tensors of rank {rank} differ, such as {wrong[0]}"
    return "" if state[1] == truth[1] else "all tensors are equal, but answers differ"


def _shapes(checkpoint: Path) -> dict[str, list[int]]:
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118

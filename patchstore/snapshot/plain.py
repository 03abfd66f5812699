"""A snapshot that is compared in plain torch and numpy."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from patchstore import diff, digest
from patchstore.change import Change, Listed
from patchstore.digest import Sums
from patchstore.encodings import ENCODINGS, named
from patchstore.model import TensorSpec
from patchstore.relative import Coder, code
from patchstore.snapshot.memory import Place, allocating, in_file, served, views
from patchstore.tensors import TORCH_DTYPES, TensorPatch, bits


class PlainSnapshot:
    """A snapshot of tensors on any devices, compared one after the other; small ones on the CPU together."""

    def __init__(
        self,
        current: Mapping[str, torch.Tensor],
        specs: Sequence[TensorSpec],
        encoding: str,
        place: Place,
    ) -> None:
        self._specs, self._encoding = {spec.name: spec for spec in specs}, encoding
        self._coder = Coder() if encoding not in ENCODINGS else None
        num_bytes = sum(spec.num_bytes for spec in specs)
        with allocating(place, num_bytes):
            if isinstance(place, os.PathLike):
                starts = [0]
                for spec in specs:
                    starts.append(starts[-1] + -(-spec.num_bytes // 8) * 8)
                self._tensors = views(in_file(place, starts[-1]), specs, starts[:-1])
            else:
                self._tensors = {
                    spec.name: torch.empty(
                        spec.shape,
                        dtype=TORCH_DTYPES[spec.dtype],
                        device=current[spec.name].device if place == "device" else "cpu",
                    )
                    for spec in specs
                }
        self.replace(current)

    def compare(self, step: int, current: Mapping[str, torch.Tensor]) -> Change:
        if self._coder is not None:
            self._coder.wait()
        num_changed = 0
        patches, before = [], []
        for (name, tensor, snapshot), changed in diff.changed_each(self._pairs(current)):
            spec, held = self._specs[name], self._tensors[name]
            num_changed += changed.numel()
            stated = changed if self._coder is not None else named(self._encoding).stated(changed)
            values = bits(tensor)[stated]
            patch = TensorPatch(name=name, indices=stated.cpu(), values=values.view(tensor.dtype).cpu())
            patches.append((spec, patch))
            before.append(bits(snapshot)[stated].view(tensor.dtype).cpu())
            bits(held)[stated.to(held.device)] = values.to(held.device)
        # Tensors were compared in groups, which are not in the schema's order.
        order = sorted(range(len(patches)), key=lambda number: patches[number][0].name)
        patches, before = [patches[number] for number in order], [before[number] for number in order]
        if self._coder is None or not patches:
            return Listed(
                step=step,
                num_changed=num_changed,
                encoding=self._encoding if self._coder is None else "gap",
                patches=tuple(patches),
                before=tuple(before),
            )
        replaced = {
            patch.name: TensorPatch(name=patch.name, indices=patch.indices, values=old)
            for (_, patch), old in zip(patches, before, strict=True)
        }
        parents = partial(parent_of, self._tensors, replaced)
        schema = list(self._specs.values())
        work = partial(code, schema, patches, parents, may_be_gap=self._encoding == "auto")
        return self._coder.start(step, num_changed, work)

    def _pairs(self, current: Mapping[str, torch.Tensor]) -> Iterator[diff.Pair]:
        for name, spec in self._specs.items():
            tensor = served(current[name], spec)
            yield name, tensor, self._tensors[name].to(tensor.device)

    def replace(self, current: Mapping[str, torch.Tensor]) -> None:
        if self._coder is not None:
            self._coder.wait()
        for name, spec in self._specs.items():
            self._tensors[name].copy_(served(current[name], spec))
        # Whoever reads it next does so on another thread, and so on another stream.
        for device in {tensor.device for tensor in current.values() if tensor.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()

    def read(self, name: str) -> tuple[torch.Tensor, Sums]:
        tensor = self._tensors[name].cpu()
        return tensor, digest.of_tensor(tensor)

    def close(self) -> None:
        if self._coder is not None:
            self._coder.close()


def parent_of(
    snapshot: Mapping[str, torch.Tensor],
    replaced: Mapping[str, TensorPatch],
    name: str,
) -> torch.Tensor:
    """Return a copy of a snapshot's tensor, in host memory, with what was replaced put back."""
    parent = snapshot[name].to("cpu", copy=True)
    bits(parent)[replaced[name].indices] = bits(replaced[name].values)
    return parent

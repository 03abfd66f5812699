"""The weights a model serves: loaded through the model's own loader, saved, restored, fingerprinted."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from patchstore import checksum
from patchstore.errors import LoadFailed, SchemaMismatch
from patchstore.tensors import raw_bytes


class LiveWeights:
    """The parameters and buffers of one rank's model.

    Addresses never change: everything is written in place, as captured CUDA graphs require.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter and buffer once, under its first name in the model."""
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> set[str]:
        """Load checkpoint tensors in full.

        Args:
            tensors: by checkpoint name, on the CPU; several names may share one tensor (tied).

        Returns:
            The names whose elements the loader never read: it has no use for them on this rank.

        Raises:
            SchemaMismatch: the loader refused a tensor; the weights now hold part of the others.
            LoadFailed: it raised anything else; the weights now hold part of the tensors.
        """
        at = "before it read a tensor"

        def in_order() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal at
            for name, tensor in tensors.items():
                at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
                yield name, tensor

        reads = _Reads(tensors)
        try:
            with reads:
                self._model.load_weights(in_order())  # type: ignore[operator]
        except Exception as exc:
            # What vLLM's loaders raise for names and shapes that their model does not have.
            refused = isinstance(exc, KeyError | ValueError | AttributeError | AssertionError)
            error = SchemaMismatch if refused else LoadFailed
            raise error(f"the model's loader failed {at}: {type(exc).__name__}: {exc}") from exc
        return reads.unread

    def save(self) -> dict[str, torch.Tensor]:
        """Return a copy of everything on the CPU, which costs one model of host memory."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.tensors()}

    @torch.no_grad()
    def restore(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Put back what `save` returned."""
        for name, tensor in self.tensors():
            tensor.copy_(saved[name])

    def fingerprint(self) -> dict[str, str]:
        """Digest the bits of each parameter and buffer; equal fingerprints mean equal weights."""
        return {name: checksum.digest(raw_bytes(tensor.detach())) for name, tensor in self.tensors()}


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices which of the given tensors any operation touches, also through views of them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        spans: dict[tuple[int, int], set[str]] = {}
        for name, tensor in tensors.items():
            if tensor.numel():
                span = (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
                spans.setdefault(span, set()).add(name)
        self._spans = sorted(spans)
        self._names = [spans[span] for span in self._spans]
        self.unread = {name for names in self._names for name in names}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._note((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, list | tuple):
                self._note(value)
            elif isinstance(value, torch.Tensor) and value.device.type == "cpu":
                where = value.data_ptr()
                i = bisect_right(self._spans, (where, 1 << 64)) - 1
                if i >= 0 and where < self._spans[i][1]:
                    self.unread -= self._names[i]

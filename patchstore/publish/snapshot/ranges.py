"""Whether numbers are within the range of the dtype in which they are served."""

from collections.abc import Iterable, Sequence

import torch

from patchstore.errors import SchemaMismatch

Converted = tuple[str, torch.Tensor, torch.Tensor]
"""A name, a tensor of the model, and its elements as they are served."""


def is_narrowed(given: torch.dtype, served: torch.dtype) -> bool:
    """Whether a finite number of one dtype may be beyond the range of the other."""
    return given != served and torch.finfo(given).max > torch.finfo(served).max


class Ranges:
    """Looks for finite numbers that are infinite in the dtype in which they are served, in one pass.

    A number beyond the range has the bits of an infinity that the trainer published before: it is no change.
    So changed elements are enough only of a tensor that had neither an infinity nor a NaN.
    """

    def __init__(self, finite: Iterable[str] = ()) -> None:
        """Begin.

        Args:
            finite: what this found in the snapshot's tensors.
        """
        self.finite = set(finite)
        """Tensors that were converted to a smaller range, and have neither an infinity nor a NaN there."""
        self._error: SchemaMismatch | None = None

    def look(
        self, name: str, given: torch.Tensor, served: torch.Tensor, at: torch.Tensor | None = None
    ) -> None:
        """Look at a tensor.

        Args:
            served: all elements, or those at the flat positions `at`, of a tensor in `finite`.
        """
        self.look_at([(name, given, served)], at)

    def look_at(self, tensors: Sequence[Converted], at: torch.Tensor | None = None) -> None:
        """Look at some tensors on one device, with one wait for it; as `look`."""
        self.finite.difference_update(name for name, _, _ in tensors)
        narrowed = [each for each in tensors if is_narrowed(each[1].dtype, each[2].dtype)]
        self.finite.update(name for name, _, served in narrowed if not served.numel())
        narrowed = [each for each in narrowed if each[2].numel()]
        if not narrowed:
            return
        # A NaN is the least and the greatest number.
        ends = torch.stack([end for _, _, served in narrowed for end in served.aminmax()])
        for each, is_finite in zip(narrowed, ends.isfinite().view(-1, 2).all(dim=1).tolist(), strict=True):
            if is_finite:
                self.finite.add(each[0])
            elif self._error is None:
                self._error = _beyond(*each, at)

    def end(self) -> None:
        """End the pass.

        Raises:
            SchemaMismatch: a number was beyond the range. Not earlier: other processes may take part in the
                pass of a stream, and would wait for this one.
        """
        if self._error is not None:
            raise self._error


def _beyond(
    name: str, given: torch.Tensor, served: torch.Tensor, at: torch.Tensor | None
) -> SchemaMismatch | None:
    """Return what is wrong, if not all that is not finite was given so."""
    flat = given.detach().reshape(-1)
    numbers = flat if at is None else flat[at.to(flat.device)]
    lost = numbers.isfinite() & ~served.isfinite().view(-1).to(flat.device)
    if not bool(lost.any()):
        return None
    wider = "with " if served.dtype == torch.bfloat16 else "as torch.bfloat16, or with "
    return SchemaMismatch(
        f"{name.partition(chr(9))[0]!r} has {int(lost.sum())} numbers beyond the range of {served.dtype}, "
        f"such as {float(numbers[lost][0])}; nothing was published, and once they are smaller the next call "
        f"goes on. Publish {wider}dtype=None, in its own dtype"
    )

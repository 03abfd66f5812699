"""What changed between two states of a model."""

from collections.abc import Sequence

from patchstore.format.records import TensorSpec
from patchstore.tensors.bits import TensorPatch

Patches = Sequence[tuple[TensorSpec, TensorPatch]]


class Changes:
    """The elements whose bits differ from the state before: positions and new bits.

    The old bits are not in it: a caller that needs them reads the tensors of the state before.
    """

    def __init__(self, num_changed: int, patches: Patches) -> None:
        """Take the changes of each tensor that has any.

        Args:
            num_changed: elements, of all tensors.
            patches: ascending by name, in host memory, with exactly the positions that changed.
        """
        self.num_changed = num_changed
        self._patches = patches

    def patches(self) -> Patches:
        """Return the changes of each tensor that has any, ascending by name, in host memory."""
        return self._patches

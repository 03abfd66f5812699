"""The extension under test, and a way to make the model's loader fail in the middle."""

from collections.abc import Iterable

import torch

from vllm_plugin import DeltaWorkerExtension


class FailingExtension(DeltaWorkerExtension):
    """Adds `delta_fail_loads`; changes nothing else."""

    def delta_fail_loads(self, num_failures: int, rank: int | None = None) -> None:
        """Let the next loads fail after half of their tensors.

        Args:
            num_failures: 1 fails the load of a version, 2 its undoing too.
            rank: the only rank to fail in; None for all.
        """
        if rank not in (None, self.rank):
            return
        model = self.model_runner.get_model()
        load = type(model).load_weights
        left = num_failures

        def failing(weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
            nonlocal left
            if left == 0:
                del model.load_weights
                return load(model, weights)
            left -= 1
            every = list(weights)
            load(model, every[: len(every) // 2])
            raise OSError("made to fail by the test")

        model.load_weights = failing

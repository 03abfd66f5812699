"""The extension under test, and upstream's own loader of patches beside it."""

from pathlib import Path

import torch

from vllm_plugin import DeltaWorkerExtension


class ConformanceExtension(DeltaWorkerExtension):
    """Adds `conformance_load_upstream`; changes nothing else."""

    def conformance_load_upstream(self, file: str) -> None:
        """Load patches with vLLM's loader, which knows nothing of ours.

        Args:
            file: a `torch.save` of a list of `training.Patch`, with the whole tensors' shapes.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.checkpoint_weight_patch import (
            CheckpointWeightPatch,
            load_checkpoint_weight_patches,
        )

        saved = torch.load(Path(file), weights_only=True)
        with set_current_vllm_config(self.vllm_config):
            for patch in saved["patches"]:
                load_checkpoint_weight_patches(
                    self.model_runner.get_model(),
                    [
                        CheckpointWeightPatch(
                            name=name,
                            shape=tuple(saved["shapes"][name]),
                            dtype=values.dtype,
                            values=values,
                            indices=positions,
                        )
                        for name, (positions, values) in patch.items()
                    ],
                )

"""Trainers of tiny models that quantize by themselves, in forms that the publisher does not round to."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tiny_fp8
import torch
from safetensors.torch import load_file, save_file
from trainer import Trainer

from patchstore.tensors.bits import bits
from tests.support.codes import config, quantized


class Coder(Trainer):
    """Publishes what a reference quantizer makes of its weights."""

    masters: dict[str, torch.Tensor]
    form: str

    def recode(self) -> None:
        """Quantize the weights again, and publish that."""
        for name, tensor in quantized(self.masters, self.form).items():
            bits(self.tensors[name]).copy_(bits(tensor))
        self.publish()


@contextmanager
def published(folder: Path, base: Path, form: str) -> Iterator[Coder]:
    """A trainer of a bf16 checkpoint, which becomes one in a form; it has published version 0."""
    masters = load_file(base / "model.safetensors")
    coded = quantized(masters, form)
    save_file(coded, base / "model.safetensors", {"format": "pt"})
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "quantization_config": config(form)}))
    trainer = Coder(folder, coded, dtype=None, files=base)
    trainer.masters, trainer.form = {name: tensor.clone() for name, tensor in masters.items()}, form
    try:
        trainer.publish()
        yield trainer
    finally:
        trainer.close()


def step(trainer: Coder) -> None:
    """Change some numbers by a tenth, and with them some codes and scales."""
    tiny_fp8.change(trainer.masters, seed=len(trainer.history))
    trainer.recode()

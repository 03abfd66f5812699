"""Whether a source can be published in FP8, said before anything is read or written."""

import logging
from collections.abc import Collection, Mapping

import torch

from patchstore.errors import SchemaMismatch
from patchstore.format.records import TensorSpec
from patchstore.quantization import Quantization

logger = logging.getLogger(__name__)


def check_layers(source: object) -> None:
    """Refuse a model with layers whose weights are transposed, as GPT-2 has.

    Raises:
        SchemaMismatch: it has one; checkpoints in FP8 have no such layers.
    """
    for name, module in source.named_modules() if isinstance(source, torch.nn.Module) else ():
        if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
            raise SchemaMismatch(
                f"{name!r} is a Conv1D, which has its weights as [inputs, outputs], and checkpoints in "
                "FP8 have them as [outputs, inputs]; publish without quantization="
            )


def check_roundable(
    quantization: Quantization,
    specs: Mapping[str, TensorSpec],
    is_rounded: Mapping[str, bool],
    tied: Collection[str],
    *,
    has_parts: bool,
) -> None:
    """Refuse tensors of which codes and scales cannot be made; warn of matrices that few programs would read.

    Args:
        specs: what would be served without quantization, whole tensors, by name.
        is_rounded: which of them the quantization rounds.
        tied: further names of tensors.
        has_parts: the source is sharded, so that other ranks may have what is rounded.

    Raises:
        SchemaMismatch: nothing is rounded, a weight is in FP8 already, or a tensor has the name of scales.
    """
    form = quantization.form
    for name, spec in specs.items():
        if spec.dtype.startswith("F8_") and name.endswith("weight"):
            raise SchemaMismatch(
                f"{name!r} is in FP8 already, so quantization={form.name!r} cannot round it; publish such "
                "weights as they are, with dtype=None and without quantization="
            )
    rounded = sorted(name for name, each in is_rounded.items() if each)
    if specs and not rounded and not has_parts:
        raise SchemaMismatch(
            f"quantization={form.name!r} finds no weight of a linear layer among {len(specs)} tensors, such "
            f"as {next(iter(specs))!r}; their names must be those of the checkpoint, and end in '.weight'; "
            "see patchstore.mapped"
        )
    for name in rounded:
        if (scales := form.scale_name(name)) in specs or scales in tied:
            raise SchemaMismatch(
                f"the source has a tensor {scales!r}, the name that quantization={form.name!r} gives the "
                f"scales of {name!r}; leave that tensor out, or publish without quantization="
            )
    if form.block is None or quantization.names is not None:
        # A base checkpoint that has smaller blocks at edges is one that is served.
        return
    rows, columns = form.block
    uneven = [name for name in rounded if specs[name].shape[0] % rows or specs[name].shape[1] % columns]
    if uneven:
        logger.warning(
            "blocks of %d x %d do not divide %r, %s (in all, matrices of such a size: %d). transformers "
            "cannot read such a checkpoint. vLLM can, but not where another matrix follows in the same fused "
            "layer. quantization='fp8-channel' has no blocks.",
            *(rows, columns, uneven[0], specs[uneven[0]].kind, len(uneven)),
        )

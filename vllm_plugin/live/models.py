"""The models that one rank serves, and their own loaders: traced for a run, or called to load a version."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

import torch

from patchstore.bucket import digests, schema_text
from patchstore.bucket.records import Schema
from patchstore.errors import LoadFailed, PatchstoreError, SchemaMismatch, UsageError
from patchstore.tensors.bits import TORCH_DTYPES, raw_bytes
from vllm_plugin.live.derived import NO_WEIGHTS, Derived
from vllm_plugin.live.own_memory import check_own
from vllm_plugin.map.provenance import Runtime, Trace
from vllm_plugin.map.trace import same_parameters, trace, untraced

ADVICE = (
    "choose kernels that use weights as they are loaded (for FP8 set VLLM_USE_DEEP_GEMM=0, and for experts "
    '--moe-backend triton), publish with Publisher(..., quantization="fp8-block") and serve a checkpoint of '
    "that run, or serve bf16"
)
"""What to do where vLLM makes something else of the weights."""

Hand = Callable[[Mapping[str, torch.Tensor]], Generator[tuple[str, torch.Tensor], None, None]]
"""Hands tensors to a loader, which may write to them and keep them."""

Load = Callable[[torch.nn.Module, Iterator[tuple[str, torch.Tensor]]], object]
"""Calls a model's loader, in the surroundings that loaders expect; may return a set of weights left alone."""


def copies(tensors: Mapping[str, torch.Tensor]) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Hand tensors to a loader. Copies: some loaders write to what they are given."""
    for name, tensor in tensors.items():
        yield name, tensor.clone()


@contextmanager
def explained(
    schema: Schema, handed: Generator[tuple[str, torch.Tensor], None, None]
) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """Yield tensors to hand to a loader, and raise what it fails with as what that says of a run.

    Raises:
        SchemaMismatch: the loader does not take tensors of this schema.
        LoadFailed: it failed for another reason.
        PatchstoreError: as `handed` raised it.
    """
    at = "before it read a tensor"

    def told() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal at
        for name, tensor in handed:
            at = f"when it had read up to {name!r} {tuple(tensor.shape)} {tensor.dtype}"
            yield name, tensor

    try:
        # Closed at once where a loader fails, and not when its error is forgotten.
        with closing(handed):
            # No generator: a loader that leaves one which yields from this would end it, and with it the
            # proof of what was loaded.
            yield iter(told().__next__, None)
    except PatchstoreError:
        raise
    except Exception as exc:
        # What vLLM's loaders raise for names and shapes that their model does not have.
        refused = isinstance(exc, KeyError | ValueError | AttributeError | AssertionError)
        error = SchemaMismatch if refused else LoadFailed
        reason = f"the model's loader failed {at}: {type(exc).__name__}: {schema_text.brief(str(exc))}"
        raise error(schema_text.explain(schema, reason) if refused else reason) from exc


class ServedModels:
    """The model of one rank, and perhaps a draft model that comes with it."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        load: Load,
        derived: Derived,
        *,
        fits: Callable[[Schema], object] = bool,
        load_traced: Load | None = None,
        is_calculated: bool = False,
    ) -> None:
        """Take over models as they are, the target first.

        `fits` raises if a run's tensors are of another form. `load_traced` is given for a quantized
        checkpoint. Nothing is copied where vLLM quantizes weights while it loads them: `is_calculated`.
        """
        self.every = tuple(models)
        self.derived = derived
        self.device = next(iter(models[0].parameters())).device
        self._load, self._load_traced = load, load_traced or load
        self._is_quantized, self._is_calculated = load_traced is not None, is_calculated
        self._fits = fits

    def trace(self, schema: Schema) -> Trace:
        """Trace the models' loaders for a schema, and prove what is made of weights. All stays as it is.

        Refuses loaders that do not take these names, leave a parameter as it is, or cannot be traced; memory
        that other processes use too; and models that keep what they made of weights and cannot make again.
        """
        self._fits(schema)
        if self._is_calculated:
            self.derived.notice()
            traced = untraced(self.every, schema)
            self._check_own(traced)
            return traced
        traced = trace(self._target_last(), schema, self._load_traced)
        if self._is_quantized and traced.computed:
            raise self._calculated(schema, traced)
        bare = {
            n: count
            for n, count in traced.uncovered.items()
            if n not in self.derived.names and n.rpartition(".")[2] not in NO_WEIGHTS
        }
        if bare:
            listed = ", ".join(f"{name!r} ({count:,} elements)" for name, count in sorted(bare.items())[:5])
            if any(".base_layer." in name for name in bare):
                raise UsageError(
                    f"vLLM's loader does not reach {len(bare):,} weights that LoRA wraps, such as {listed}: "
                    "start vllm without --enable-lora, or with --lora-target-modules and only modules of "
                    "linear layers, such as qkv_proj o_proj, so that experts stay as they are"
                )
            raise SchemaMismatch(
                schema_text.explain(
                    schema,
                    f"{len(bare):,} parameters of the model get nothing from this run's "
                    f"{len(schema.tensors):,} tensors, such as {listed}: publish them too, or serve a model "
                    "without them",
                )
            )
        # Before anything is made again, which writes too.
        reached = self._check_own(traced)
        self.derived.verify({each.storage.data_ptr() for each in reached})
        return traced

    def _check_own(self, traced: Trace) -> list[Runtime]:
        """Return what a checkpoint's tensors reach, where all that, and what is made of it, is our own."""
        indices = {index for found in traced.regions.values() for index, _ in found}
        indices = indices.union(*(found for _, found in traced.computed))
        reached = [traced.runtimes[index] for index in sorted(indices)]
        check_own([*((each.names[0], each.storage) for each in reached), *self.derived.storages()])
        return reached

    def _calculated(self, schema: Schema, traced: Trace) -> PatchstoreError:
        """Say what keeps tensors of a quantized checkpoint from being written where they are served."""
        specs = schema.by_name()
        for group, indices in traced.computed:
            served = {traced.runtimes[index].dtype for index in indices}
            for name in sorted(group):
                if TORCH_DTYPES[specs[name].dtype] not in served:
                    has = ", ".join(sorted(map(str, served)))
                    return SchemaMismatch(
                        f"the run has {name!r} as {specs[name].dtype}, and this server as {has}: the lists "
                        "of what is not quantized (modules_to_not_convert, or ignore, in "
                        "quantization_config) differ; start vllm from the run's own checkpoint"
                    )
        names = sorted(name for group, _ in traced.computed for name in group)
        return UsageError(
            f"vLLM calculates something else from {len(names):,} tensors of this quantized checkpoint, such "
            f"as {names[0]!r}, so versions cannot be written where they are served: {ADVICE}"
        )

    @torch.no_grad()
    def load(self, schema: Schema, tensors: Mapping[str, torch.Tensor], hand: Hand = copies) -> None:
        """Have the models' own loaders load tensors of the CPU. If this raises, some may be loaded."""
        for model in self._target_last():
            with same_parameters(model), explained(schema, hand(tensors)) as handed:
                left = self._load(model, handed)
            if isinstance(left, set) and left and tensors.keys() >= schema.by_name().keys():
                reason = (
                    f"{len(left):,} weights of the model get nothing from this run's {len(tensors):,} "
                    f"tensors, such as {min(left)!r}"
                )
                raise SchemaMismatch(schema_text.explain(schema, reason))

    def fingerprint(self) -> dict[str, str]:
        """Digest the bits of each parameter and buffer; equal fingerprints mean equal weights."""
        several = len(self.every) > 1
        return {
            (f"draft.{name}" if several and i else name): digests.digest(raw_bytes(tensor.detach()))
            for i, name, tensor in self.tensors()
        }

    def tensors(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        """Yield each parameter and buffer once: the number of its model, its first name there, and itself."""
        for number, model in enumerate(self.every):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield number, name, tensor

    def _target_last(self) -> Sequence[torch.nn.Module]:
        # A draft model shares the target's embedding and head, and checkpoints may have other values for
        # those under the draft's names. vLLM loads both before it lets them share, and so keeps the target's.
        return self.every[::-1]

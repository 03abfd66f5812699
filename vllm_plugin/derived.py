"""What a model calculates from its weights after loading, and must calculate again when they change.

Multi-head latent attention splits one projection into two that it multiplies separately. vLLM does that in
`process_weights_after_loading`, which some versions answer with new tensors; here their contents move into
the old ones, whose addresses CUDA graphs have captured.
"""

from collections.abc import Callable, Sequence

import torch

from patchstore.errors import LoadFailed

_NOT_MADE = frozenset({"kv_cache"})
"""What vLLM gives attention layers after loading, and is made from no weights."""


class Derived:
    """The modules of some models that hold tensors made from weights."""

    def __init__(
        self, models: Sequence[torch.nn.Module], refresh: Callable[[torch.nn.Module], object]
    ) -> None:
        """Find them.

        Args:
            refresh: calls a module's `process_weights_after_loading`.
        """
        self._refresh = refresh
        self._modules: list[torch.nn.Module] = []
        names: set[str] = set()
        for model in models:
            for path, module in model.named_modules():
                made = _made(module)
                if hasattr(module, "process_weights_after_loading") and made:
                    self._modules.append(module)
                    names |= {f"{path}.{name}" if path else name for name in made}
        self.names = frozenset(names)
        """Of the tensors, as `named_parameters` would call them."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Calculate all of them again, into the same memory.

        Raises:
            LoadFailed: one came out in another shape or dtype. None has moved.
        """
        for module in self._modules:
            before = _made(module)
            try:
                self._refresh(module)
                after = _made(module)
            finally:
                # Also after a failure, so that it is the old memory that is put right when that is undone.
                for name, old in before.items():
                    setattr(module, name, old)
            for name, old in before.items():
                new = after.get(name)
                if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
                    raise LoadFailed(f"{type(module).__name__}.{name} was {_shape(old)} and is {_shape(new)}")
                if new.data_ptr() != old.data_ptr():
                    old.copy_(new)


def _made(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Matrices that a module holds itself: weights of its own are in modules below it."""
    own = {**vars(module), **module._parameters}
    return {
        name: value
        for name, value in own.items()
        if isinstance(value, torch.Tensor) and value.dim() >= 2 and name not in _NOT_MADE
    }


def _shape(tensor: torch.Tensor | None) -> str:
    return "gone" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"

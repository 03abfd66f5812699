"""How vLLM serves a model: the parts of it that this package touches beside the engine's own interface.

Where versions 0.26 to 0.33 or platforms differ, the difference is here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform

from patchstore.errors import UsageError


class Serving:
    """The models of one rank, and how to call them."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module) -> None:
        self._config = vllm_config
        self._model = model

    def models(self, worker: Any) -> list[torch.nn.Module]:
        """The model, and after it the draft model if that is loaded from the same checkpoint."""
        draft = self.draft(worker)
        return [self._model] if draft is None or not self._is_from_checkpoint() else [self._model, draft]

    def draft(self, worker: Any) -> torch.nn.Module | None:
        """The speculative draft model, wherever its weights come from."""
        runner = worker.model_runner
        if hasattr(runner, "get_draft_model"):
            found = runner.get_draft_model()
        else:
            found = getattr(getattr(runner, "drafter", None), "model", None)
        return found if isinstance(found, torch.nn.Module) else None

    def _is_from_checkpoint(self) -> bool:
        speculative = self._config.speculative_config
        draft = None if speculative is None else speculative.draft_model_config
        return draft is not None and draft.model == self._config.model_config.model

    def load(self, model: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Call a model's own loader, as vLLM does when it starts."""
        with self._surroundings():
            model.load_weights(weights)  # type: ignore[operator]

    def refresh(self, module: torch.nn.Module) -> None:
        """Have an attention layer calculate again what it made from its weights."""
        with self._surroundings():
            module.process_weights_after_loading(self._config.model_config.dtype)  # type: ignore[operator]

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._config.model_config.dtype)
        try:
            with set_current_vllm_config(self._config):
                yield
        finally:
            torch.set_default_dtype(before)

    def check_layout(self) -> None:
        """Refuse a model whose weights were rearranged after loading: they cannot be loaded into again.

        Raises:
            UsageError: with the reason, the parameters, and the option that helps.
        """
        config = self._config.model_config
        if (quantization := config.quantization) is not None:
            raise UsageError(
                f"the delta backend cannot update weights quantised as {quantization!r}; serve bf16"
            )
        if getattr(current_platform, "is_zen_cpu", bool)():
            raise UsageError(
                "the delta backend needs Linear weights as loaded, but this platform packs them for ZenDNN"
            )
        for name, module in self._model.named_modules():
            backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
            kept = "CPU" if current_platform.is_cpu() else "TRITON"
            if backend is not None and kept not in backend.name:
                raise UsageError(
                    f"the delta backend needs experts as loaded, but {name!r} uses {backend.name}, which "
                    "rearranges them: choose --moe-backend triton"
                )
        packed = [name for name, parameter in self._model.named_parameters() if parameter.numel() == 0]
        if packed:
            raise UsageError(
                f"the delta backend needs weights as loaded, but {len(packed)} were packed, such as "
                f"{packed[0]!r}"
            )


def groups() -> list[dist.ProcessGroup]:
    """CPU groups that span this engine's ranks, and no other data-parallel engine's."""
    found = [parallel_state.get_tp_group(), parallel_state.get_pcp_group(), parallel_state.get_pp_group()]
    return [group.cpu_group for group in found if group.world_size > 1]


def watch_sleep(worker: Any, asleep: Callable[[int], None], awake: Callable[[], None]) -> None:
    """Be told before a worker gives its weights' memory away, and after it has it back.

    Args:
        asleep: takes the level: 1 keeps a copy of the weights on the host, 2 keeps nothing.
    """
    sleep, wake_up = worker.sleep, worker.wake_up

    def sleep_watched(level: int = 1, **kwargs: Any) -> Any:
        asleep(level)
        return sleep(level, **kwargs)

    def wake_up_watched(tags: list[str] | None = None) -> Any:
        answer = wake_up(tags)
        if tags is None or "weights" in tags:
            awake()
        return answer

    worker.sleep, worker.wake_up = sleep_watched, wake_up_watched

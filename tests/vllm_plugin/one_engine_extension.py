"""The extension under test, with calls that only one data-parallel engine obeys."""

from typing import Any

from failing_extension import FailingExtension


class OneEngineExtension(FailingExtension):
    """Adds a way to break one engine and not the other."""

    def delta_in_engine(self, index: int, method: str, args: list[Any]) -> None:
        """Call a method in the engine of this number alone."""
        if self.vllm_config.parallel_config.data_parallel_index == index:
            getattr(self, method)(*args)

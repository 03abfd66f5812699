"""A KV connector for tests: vLLM's example, which stores keys and values in files, and can forget them."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ForgettingConnector(ExampleConnector):
    """Empties its folder, unless a file beside it says otherwise."""

    def _folder(self) -> Path:
        return Path(self._kv_transfer_config.get_from_extra_config("shared_storage_path", ""))

    def reset_cache(self) -> bool | None:
        folder = self._folder()
        if (said := folder.with_suffix(".answers")).exists():
            answers = said.read_text().split()
            answer, rest = answers[0], answers[1:]
            said.write_text(" ".join(rest)) if rest else said.unlink()
            if answer != "true":
                return False if answer == "false" else super().reset_cache()
        for each in stored(folder):
            shutil.rmtree(each)
        return True


def stored(folder: Path) -> Iterator[Any]:
    """Yield what a connector keeps in a folder."""
    return folder.iterdir()

"""Which files of a folder are a checkpoint's weights: the one rule, for base checkpoints and for servers."""

import json
from pathlib import Path

from patchstore.errors import CorruptObject

INDEX = "model.safetensors.index.json"
"""Lists the files of a checkpoint that has several."""
_SINGLE = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Return the files that make up a checkpoint, whether or not they are there, ascending by name.

    An index says which. Without one it is the file that libraries give a checkpoint of one file, or else all
    safetensors files. So further copies in other layouts, which folders may hold, are left out.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            names = {str(each) for each in json.loads(index.read_bytes())["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptObject(f"{index}: it should have a weight_map of names to files: {exc!r}") from exc
        return [folder / name for name in sorted(names)]
    single = folder / _SINGLE
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))

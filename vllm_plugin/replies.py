"""Keep vLLM's replies in step with its calls, where several workers answer each call.

vLLM broadcasts a call to its workers and then reads one reply from each worker's queue. It stops reading at
the first worker that failed, and when the caller's timeout has passed. The replies that it did not read stay
in the queues, so every later call returns an answer to an earlier one: `update_weights` could report success
for a version that does not exist.

`vllm_plugin.plugin` installs it in each process of vLLM.
"""

import functools
import os
import uuid
from typing import Any

import cloudpickle

LOADED = "PATCHSTORE_REPLIES_IN_STEP"
"""Environment variable that the process which makes the calls sets for the workers that it starts."""

_UNREAD = "_patchstore_has_unread_replies"
_WAIT_S = 1.0
"""How long to wait for a reply before looking whether the workers still live."""


def keep_in_step() -> None:
    """Have vLLM's executor drop unread replies before the next call. Calling it again changes nothing.

    Only executors of servers with the backend `delta` behave differently; all others stay as they are.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    os.environ[LOADED] = "1"
    call = MultiprocExecutor.collective_rpc
    if hasattr(call, "__wrapped__"):
        return

    @functools.wraps(call)
    def collective_rpc(executor: Any, *args: Any, **kwargs: Any) -> Any:
        config = executor.vllm_config.weight_transfer_config
        if config is None or config.backend != "delta":
            return call(executor, *args, **kwargs)
        if getattr(executor, _UNREAD, False):
            _drop_unread(executor)
        try:
            return call(executor, *args, **kwargs)
        except Exception:
            setattr(executor, _UNREAD, True)
            raise

    MultiprocExecutor.collective_rpc = collective_rpc


def _drop_unread(executor: Any) -> None:
    """Send the workers a token, and read each worker's replies up to that token.

    Calls that vLLM has not yet waited for cannot be lost: it waits for all of them before a call can fail.

    Raises:
        RuntimeError: the workers have died.
        Whatever reading a queue raises twice: of each queue one reply is unread, and that may be one that
            cannot be unpickled.
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

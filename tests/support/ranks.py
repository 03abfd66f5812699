"""Processes of a torch.distributed job with gloo, to which tests send functions."""

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from patchstore import Manifest

TIMEOUT_S = 240
IMPORT_S = 180
"""Importing vLLM takes minutes on a busy machine."""


class Ranks:
    """Some ranks that wait for functions. The key-value store is this process's, so it survives any rank."""

    def __init__(self, num: int, timeout_s: float = TIMEOUT_S) -> None:
        self.num, self.timeout_s = num, timeout_s
        self.has_failed = False
        """Whether a function raised, or did not return."""
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._tasks = [context.Queue() for _ in range(num)]
        self._results: Any = context.Queue()
        self.processes = [
            context.Process(
                target=_serve,
                args=(rank, num, self._store.port, tasks, self._results, timeout_s),
                daemon=True,
            )
            for rank, tasks in enumerate(self._tasks)
        ]
        for process in self.processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(rank, *args)` on every rank; return the results, by rank.

        Raises:
            AssertionError: one of them raised; the message has its traceback.
        """
        self._send(function, args, together=True)
        return self.end(range(self.num))

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        self._send(function, args, together=False)

    def _send(self, function: Callable[..., Any], args: tuple[Any, ...], *, together: bool) -> None:
        for tasks in self._tasks:
            tasks.put((function, args, together))

    def end(self, ranks: Any) -> list[Any]:
        """Wait for the results of these ranks."""
        found: dict[int, Any] = {}
        failed = []
        self.has_failed, has_failed = True, self.has_failed
        while len(found) < len(ranks):
            try:
                rank, result, error = self._results.get(timeout=self.timeout_s + IMPORT_S)
            except queue.Empty:
                raise AssertionError(f"ranks {set(ranks) - found.keys()} did not return") from None
            if rank in ranks:
                found[rank] = result
                if error:
                    failed.append(f"rank {rank}: {error}")
        assert not failed, "\n".join(sorted(failed))
        self.has_failed = has_failed
        return [found[rank] for rank in ranks]

    def reach_store(self) -> Any:
        """Return a connection to the key-value store, as any process has that reaches its port."""
        return dist.TCPStore(
            "127.0.0.1",
            self._store.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=2),
        )

    def end_store(self) -> None:
        """End the key-value store, as when the process that hosts it is killed."""
        self._store = None

    def close(self) -> None:
        """Kill them: they have nothing to save, and ending in order takes each of them seconds."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


RanksOf = Callable[[int], Ranks]
"""The fixture that starts ranks once for each number."""
Published = Callable[..., list[Manifest]]
"""The fixture that has so many ranks publish, compares the bits of each version, and returns manifests."""


class RanksByNumber:
    """Starts ranks once for each number, and anew where they failed or were closed."""

    def __init__(self) -> None:
        self._started: dict[int, Ranks] = {}

    def __call__(self, num: int) -> Ranks:
        if num in self._started and self._started[num].has_failed:
            # One of them may still be in the midst of something.
            self._started.pop(num).close()
        if num not in self._started:
            self._started[num] = Ranks(num)
        return self._started[num]

    def close(self) -> None:
        while self._started:
            self._started.popitem()[1].close()


def _serve(rank: int, num: int, port: int, tasks: Any, results: Any, timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=num, timeout=timedelta(seconds=timeout_s)
    )
    num_tasks = 0
    while True:
        function, args, together = tasks.get()
        torch.manual_seed(0)
        num_tasks += 1
        try:
            if together:
                _meet(store, f"task {num_tasks}", num, timeout_s)
            results.put((rank, function(rank, *args), ""))
        except BaseException:  # noqa: BLE001 -- the test fails with it
            results.put((rank, None, traceback.format_exc()))


def _meet(store: Any, name: str, num: int, timeout_s: float) -> None:
    """Wait until every rank has imported what a function needs: its own timeouts begin there."""
    if store.add(name, 1) == num:
        store.set(f"{name}, all", b"")
    store.wait([f"{name}, all"], timedelta(seconds=timeout_s + IMPORT_S))

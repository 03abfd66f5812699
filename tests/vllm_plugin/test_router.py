"""Three servers behind the example's router, under load: one of them boots, and one lags behind."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest
from asking import PROMPT, question
from server_process import ROOT, ForkingServer, call

from examples.processes import free_port
from patchstore.follow.vllm_server import VllmServer
from patchstore.follow.wait import wait_until
from patchstore.follow.wanted import Wanted

pytestmark = pytest.mark.exhaustive

NUM_VERSIONS = 4
NUM_CLIENTS = 4


class Answered(NamedTuple):
    wanted: str
    status: int
    versions: dict[str, Any] | None
    """What it says that it is of; None if it is an error."""
    tokens: list[int]
    """Greedy ones."""


@contextmanager
def program(*arguments: object) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-m", *map(str, arguments)], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def answered(url: str, wanted: str, *, stream: bool) -> Answered:
    asked = question(PROMPT[:8], max_tokens=48, stream=stream)
    headers = {"X-Patchstore-Version": wanted} if wanted else {}
    answer = httpx.post(f"{url}/v1/completions", json=asked, headers=headers, timeout=120)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] if lines else [answer.json()]
    last = parts[-1]
    if "error" in last:
        return Answered(wanted, last["error"]["code"], None, [])
    tokens = [token for part in parts for choice in part["choices"] for token in choice["token_ids"]]
    return Answered(wanted, answer.status_code, last["patchstore"], tokens)


def test_no_answer_is_of_a_version_that_its_request_excludes(model, new_trainer, tmp_path):
    trainer = new_trainer()
    trainer.publish()
    servers = [ForkingServer(tmp_path / f"server-{each}.log") for each in range(3)]
    booting, steady, lagging = servers
    follow, router = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    is_over = Event()

    def ask_on(seed: int) -> list[Answered]:
        chosen, found = random.Random(seed), []
        while not is_over.is_set():
            newest = len(trainer.history) - 1
            wanted = chosen.choice(["", f"={newest}", f"={max(0, newest - 1)}", f">={newest}", "hold"])
            found.append(answered(router, wanted, stream=chosen.random() < 0.5))
        return found

    with ExitStack() as machines, ExitStack() as stack:
        for each in (steady, lagging):
            machines.enter_context(each.serving(model))
        machines.callback(booting.stop)
        urls = [argument for each in servers for argument in ("--server", each.url)]
        listens = ("--listen", follow.rpartition(":")[2], "--max-poll-interval", "0.5")
        stack.enter_context(program("patchstore", "follow", trainer.url, *urls, *listens))
        stack.enter_context(
            program("examples.router", "--follow", follow, "--listen", router.rpartition(":")[2])
        )
        wait_until(0, servers=[steady.url, lagging.url], timeout_s=120)
        while not httpx.get(f"{follow}/livez").is_success or not reached(router):
            time.sleep(0.1)
        pool = stack.enter_context(ThreadPoolExecutor(NUM_CLIENTS + 1))
        stack.callback(is_over.set)
        asked = [pool.submit(ask_on, seed) for seed in range(NUM_CLIENTS)]
        boot = pool.submit(booting.start, model)
        with VllmServer(lagging.url) as late:
            for version in range(1, NUM_VERSIONS):
                call(late, "delta_fail_writes", 1)
                trainer.step(density=0.5)
                wait_until(version, servers=[steady.url], timeout_s=300)
        boot.result()
        wait_until(NUM_VERSIONS - 1, servers=[each.url for each in servers], timeout_s=300)
        # All three answer for a while.
        time.sleep(3)
        is_over.set()
        found = [each for client in asked for each in client.result()]
        # Nothing drives the servers any more.
        stack.close()
        with VllmServer(booting.url) as quiet:
            right = {}
            for version in range(NUM_VERSIONS):
                quiet.apply(version)
                right[version] = answered(booting.url, f"={version}", stream=False).tokens

    assert {each.status for each in found} <= {200, 409}
    whole = [each for each in found if each.versions is not None]
    for wanted, _, versions, tokens in whole:
        says = Wanted.parse(wanted) if wanted else Wanted()
        assert says.allows(versions["begin"]) and says.allows(versions["end"]), (wanted, versions)
        assert not (says.is_one and versions["mixed"]), (wanted, versions)
        if not versions["mixed"]:
            assert tokens == right[versions["begin"]]
    assert {each.versions["begin"] for each in whole} == set(range(NUM_VERSIONS))
    assert any(each.wanted.startswith("=") for each in whole)
    assert any(each.status == 409 for each in found)


def reached(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").is_success
    except httpx.TransportError:
        return False

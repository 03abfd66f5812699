"""Fixtures for all tests: stores and small models that change like trained ones."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from patchstore.stores.memory import MemoryStore
from tests.support import interpreted  # before anything imports Triton
from tests.support.compiled import Compiler
from tests.support.trainers import RUNNER
from tests.support.weights import Run

# Tests count the requests of a store. huggingface_hub reads this when it is imported, which is later.
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Once TRL is imported, servers that the process starts log errors alone, unless this is set.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
# What a shell starts in the background ignores Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# On a busy machine any example may take long; pytest's own timeout ends one that hangs.
hypothesis.settings.register_profile("patient", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("patient")

_RANKS = "tests/publish/group/"
"""Tests here share processes of a job, which take half a minute to start."""

UNTIL = os.environ.get("PATCHSTORE_TESTS_UNTIL")
"""Seconds since 1970 after which no further exhaustive test begins. CI sets it, as its time is limited."""


@pytest.fixture
def store() -> MemoryStore:
    """An empty store of its own."""
    return MemoryStore()


@pytest.fixture
def run(store: MemoryStore) -> Iterator[Run]:
    """A small run on `store`, not yet begun."""
    run = Run(store)
    yield run
    run.close()


@pytest.fixture(scope="session")
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.close()


@pytest.fixture(autouse=True)
def _compiles(compiler: Compiler) -> Iterator[None]:
    """Fail where a kernel that a test interpreted does not compile for a GPU."""
    yield
    # All at once: what comes after one that fails is not the next test's.
    launched = sorted(interpreted.LAUNCHED)
    interpreted.LAUNCHED.clear()
    for launch in launched:
        compiler.check(launch)


@pytest.fixture(scope="session", autouse=True)
def _sockets() -> Iterator[None]:
    """Where vLLM has its sockets: it leaves them there when it is killed, as many tests do."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_RPC_BASE_PATH", folder)
        yield


def _thread() -> tuple[bool, bool, BaseException | None]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), sys.exception()


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed each test, and fail one that leaves its thread in another mode, in which later tests would run."""
    torch.manual_seed(0)
    before = _thread()
    yield
    after = _thread()
    torch.set_grad_enabled(before[0])
    assert after == before, "changed: gradients on, inference mode on, or the exception that is handled"


@pytest.fixture(scope="session")
def runner() -> Iterator["subprocess.Popen[str]"]:
    """Where `tests.support.trainers` run."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a file's tests to one process, as `--dist loadfile` does; all that share ranks to one too."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class BySharedProcesses(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return _RANKS if nodeid.startswith(_RANKS) else nodeid.partition("::")[0]

    return BySharedProcesses(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but some cases of each sampled test as exhaustive, and begin with what takes longest.

    Those tests have a limit of their own. They start servers and wait for them, while other processes test.
    """
    items.sort(
        key=lambda item: 0 if item.get_closest_marker("timeout") else 1 if _RANKS in item.nodeid else 2
    )
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample"):
            name = getattr(item, "originalname", item.name)
            cases.setdefault((item.nodeid.partition("[")[0], name), []).append(item)
    for found in cases.values():
        sample = found[0].get_closest_marker("sample")
        assert sample is not None
        num = min(len(found), *sample.args)
        # The first, the last, and those evenly between: parameters that are listed last vary fastest.
        kept = {round(i * (len(found) - 1) / max(1, num - 1)) for i in range(num)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.exhaustive)
    for item in items:
        if item.get_closest_marker("exhaustive") and not item.get_closest_marker("timeout"):
            # These do the most work, beside others; what hangs is still ended.
            item.add_marker(pytest.mark.timeout(900))
    if UNTIL is not None:
        # Another order each time, the same in all processes, so that each test has its turn.
        items.sort(key=lambda item: zlib.crc32(f"{UNTIL} {item.path.name}".encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Look for no garbage while tests are collected: there is none, and it took a quarter of that time."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep the garbage collector from what pytest imported and collected: it took half a second each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Let it have all, or libraries in C++ complain at exit of what they find alive."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sum up what tests counted and recorded as a property: a tuple, under the names of its numbers."""
    counts: dict[str, list[int]] = {}
    for report in terminalreporter.getreports(""):
        for name, value in report.user_properties:
            if isinstance(value, list | tuple):
                counts[name] = [
                    sum(each) for each in zip(value, counts.get(name, [0] * len(value)), strict=True)
                ]
    for name, numbers in counts.items():
        terminalreporter.write_line(f"{name}: {', '.join(f'{number:,}' for number in numbers)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip an exhaustive test that would begin too late; the closing line counts it."""
    if UNTIL is not None and item.get_closest_marker("exhaustive") and time.time() > float(UNTIL):
        pytest.skip("not begun: the time for exhaustive tests was over")

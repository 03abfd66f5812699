"""The benchmark `fuzz-server` without vLLM: what it draws, and what it must notice."""

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.cases import fuzz_server
from benchmarks.cases.fuzz_server import Fuzz
from benchmarks.fuzz_server.calls import METHODS, Call, Calls
from patchstore.errors import StateMismatch


def drawn(seed: str) -> list[Call]:
    calls = Calls(seed, ["run", "other", "unfit", "nothing"], 8, "{}")
    return [call for _ in range(500) for call in calls.draw()]


def test_a_seed_draws_the_same_calls_of_every_kind_and_of_no_other_method() -> None:
    calls = drawn("1")
    assert calls == drawn("1")
    assert calls != drawn("2")
    methods = {call.body.get("method") for call in calls if isinstance(call.body, dict)}
    assert set(METHODS) < methods
    assert all(name is None or "__" not in name for name in methods)
    assert {"/update_weights", "/sleep", "/weight_checker", "/v1/completions"} < {call.path for call in calls}
    for call in calls:
        if not isinstance(call.body, bytes):
            json.dumps(call.body)


RANK = dict.fromkeys(fuzz_server.ALIKE) | {"serving": 1, "asleep": False, "half_applied": False}


class Server:
    """Says what it is told to, and takes all else."""

    def __init__(self, *ranks: dict[str, Any]) -> None:
        self._http = SimpleNamespace(post=lambda *_: None)
        self._ranks = tuple({"rank": i} | RANK | each for i, each in enumerate(ranks))

    def status(self) -> SimpleNamespace:
        held = {rank["serving"] for rank in self._ranks}
        return SimpleNamespace(
            ranks=self._ranks, half_applied=False, store="run", serving=held.pop() if len(held) == 1 else None
        )

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def fuzz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fuzz:
    monkeypatch.setattr(Fuzz, "prove", lambda *_: None)
    parser = argparse.ArgumentParser()
    fuzz_server.arguments(parser)
    return Fuzz(parser.parse_args([]), tmp_path)


def test_ranks_that_say_the_same_are_as_they_should_be(fuzz: Fuzz) -> None:
    fuzz.check_ranks(Server({}, {}), 0)  # type: ignore[arg-type]
    assert fuzz.failed == []
    assert (fuzz.counts["held_proved"], fuzz.counts["healed_proved"]) == (1, 1)


@pytest.mark.parametrize(
    "wrong", [{"serving": 2}, {"staged": 3}, {"half_applied": True}, {"update_open": True}, {"rank": 0}]
)
def test_ranks_that_differ_are_noticed(fuzz: Fuzz, wrong: dict[str, Any]) -> None:
    fuzz.check_ranks(Server({}, wrong), 0)  # type: ignore[arg-type]
    assert len(fuzz.failed) == 1


def test_weights_that_are_wrong_are_noticed(fuzz: Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StateMismatch("1 tensors differ")

    monkeypatch.setattr(Fuzz, "prove", refuse)
    fuzz.check_ranks(Server({}, {}), 0)  # type: ignore[arg-type]
    assert "1 tensors differ" in fuzz.failed[0]


@pytest.mark.parametrize(("staged", "is_so"), [([4, 4], True), ([4, 3], False), ([4], False)])
def test_a_call_that_succeeded_must_have_done_what_it_said_in_both_ranks(
    fuzz: Fuzz, staged: list[int], is_so: bool
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"results": [{"staged": each} for each in staged]})

    with httpx.Client(base_url="http://server", transport=httpx.MockTransport(answer)) as http:
        fuzz.expect(http, Call(path="/update_weights"), "staged", 4)
    assert (fuzz.failed == []) is is_so

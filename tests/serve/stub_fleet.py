"""A process of many stub servers, well and unwell, for rolling updates: `python stub_fleet.py KIND...`.

Prints one JSON object with their URLs, then one each time a server comes to hold a version, or none, and at
the end one for each, whether it was left paused, half-applied or in a switch. Ends with its standard input.
"""

import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from tests.support.vllm_stub import StubServer, serving

FAILURES = (
    "[corrupt-object] deltas/x should have digest y",
    "[load-failed] the loader failed",
    "[store-unavailable] no answer in time",
    "index out of range",
)


class FleetServer(StubServer):
    """A stub of some kind, that tells what it holds.

    `well`; `slow`, which takes 2 s to stage; `failing`, a third of whose updates fail in one of many ways,
    half-applied ones included; `restarting`, which is gone for a second every 6 s, and then holds nothing.
    """

    def __init__(self, kind: str, number: int, run_id: str) -> None:
        super().__init__()
        self.kind, self.number, self.run_id = kind, number, run_id
        self._random = random.Random(number)

    def answer(self, path: str, query: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
        call = body.get("method", path)
        if self.kind == "slow" and call == "delta_prove":
            time.sleep(2)
        if self.kind == "failing" and call in {"delta_prove", "/finish_weight_update"}:
            chance = self._random.random()
            if chance < 0.04 and path == "/finish_weight_update":
                self.tears = True
            elif chance < 0.17:
                self.failures[call] = [self._random.choice(FAILURES)]
        answer = super().answer(path, query, body)
        if path == "/finish_weight_update":
            self.tell()
        return answer

    def live(self, stop: threading.Event) -> None:
        """Go and come back, until told to stop."""
        # Not all at once, as in a rolling restart.
        stop.wait(self._random.uniform(0, 6))
        while not stop.wait(6):
            self.down = True
            self.restart()
            self.tell()
            stop.wait(1)
            self.down = False

    def tell(self) -> None:
        say({"server": self.url, "held": self.held, "at": time.time()})


def say(event: dict[str, Any]) -> None:
    # In one piece, whichever thread it comes from.
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    run_id, *kinds = sys.argv[1:]
    stop = threading.Event()
    with ExitStack() as stack:
        stubs = [
            stack.enter_context(serving(FleetServer(kind, number, run_id)))
            for number, kind in enumerate(kinds)
        ]
        say({"urls": [stub.url for stub in stubs]})
        restarting = [
            threading.Thread(target=stub.live, args=(stop,)) for stub in stubs if stub.kind == "restarting"
        ]
        for thread in restarting:
            thread.start()
        sys.stdin.read()
        stop.set()
        for thread in restarting:
            thread.join()
        for stub in stubs:
            say({"server": stub.url, "left": stub.paused or stub.half_applied or stub.switch is not None})


if __name__ == "__main__":
    main()

"""Random calls to a vLLM server, valid and invalid, of routes that update weights or interfere with that."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

METHODS = (
    "delta_status",
    "delta_prefetch",
    "delta_switch",
    "delta_sums",
    "delta_fits",
    "delta_expect",
    "delta_fingerprint",
)
"""Methods of the plugin. `/collective_rpc` can call any attribute of a worker (`docs/security.md`)."""

_WRONG: tuple[Any, ...] = (None, True, -1, 10**30, 2.5, "", "x", "12", [], [1], {}, "\x00", "\u00fc" * 5000)
_BODIES: tuple[Any, ...] = (b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"update_info":', {"a": 1})
_UPDATING = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/collective_rpc",
)
_UNKNOWN = ("delta_no_such", "no_such_method", "", "delta_status ", "DELTA_STATUS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    path: str
    body: Any = field(default_factory=dict)
    """JSON, or bytes that are sent unchanged."""
    query: dict[str, str] = field(default_factory=dict)
    method: str = "POST"

    @property
    def version(self) -> int | None:
        """The version that `/update_weights` asks for."""
        info = self.body.get("update_info") if isinstance(self.body, dict) else None
        return info.get("version") if isinstance(info, dict) else None


class Calls:
    """Draws calls. One seed gives one sequence of calls."""

    def __init__(self, seed: str, stores: Sequence[str], num_versions: int, header: str) -> None:
        """Prepare.

        Args:
            stores: URLs of two runs that fit, a run that does not, and a place without one.
            header: the text of a run's `store.json`.
        """
        self._random = random.Random(seed)
        self._stores, self._num_versions, self._header = stores, num_versions, header

    def draw(self) -> list[Call]:
        """Return one call, or a sequence of calls."""
        kinds: list[tuple[Callable[[], list[Call]], int]] = [
            (self._update, 6),
            (self._out_of_order, 6),
            (self._open, 3),
            (self._offered, 8),
            (self._elsewhere, 6),
            (self._malformed, 3),
            (self._answer, 2),
        ]
        (kind,) = self._random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        return kind()

    def _version(self) -> int:
        return self._random.randrange(self._num_versions)

    def _wrong(self) -> Any:
        """Return a value that is invalid for almost every argument."""
        return self._random.choice(_WRONG)

    def _update(self) -> list[Call]:
        version = self._version()
        return [
            Call(path="/start_weight_update"),
            Call(path="/update_weights", body={"update_info": {"version": version}}),
            Call(path="/finish_weight_update", body={"weight_version": str(version)}),
        ]

    def _out_of_order(self) -> list[Call]:
        info: Any = {"version": self._random.choice([self._version(), self._num_versions + 5, self._wrong()])}
        if self._random.random() < 0.3:
            info = self._random.choice([self._wrong(), [info], {"step": 1}, {**info, "more": 1}])
        return [
            self._random.choice(
                [
                    Call(path="/start_weight_update"),
                    Call(path="/start_draft_weight_update"),
                    Call(path="/update_weights", body={"update_info": info}),
                    Call(path="/finish_weight_update", body={"weight_version": self._wrong()}),
                    Call(path="/finish_weight_update"),
                ]
            )
        ]

    def _open(self) -> list[Call]:
        info: Any = {"store": self._random.choice(self._stores)}
        if self._random.random() < 0.4:
            changes = [{"store": self._wrong()}, {"scratch": "/etc/x"}, {"partial": 1}, {"cache_bytes": "1"}]
            info |= self._random.choice([*changes, {"partial": True}, {"storage_options": self._wrong()}])
        if self._random.random() < 0.1:
            info = self._wrong()
        close = Call(path="/shutdown_weight_transfer_engine")
        opened = Call(path="/init_weight_transfer_engine", body={"init_info": info})
        return self._random.choice([[opened], [opened], [close], [close, opened]])

    def _offered(self) -> list[Call]:
        """Return a call of a plugin's method with valid or invalid arguments, or of an unknown method."""
        name = self._random.choice([*METHODS, *METHODS, *_UNKNOWN])
        status = [{}, {"serving": self._version()}, {"initialised": False}, {"none": 1}]
        fitting: dict[str, list[list[Any]]] = {
            "delta_prefetch": [[self._version()], [self._num_versions + 3]],
            "delta_switch": [["resume"], ["stay-paused"], [None]],
            "delta_sums": [[0, 1000], [5, 10**9], [10**6, 1]],
            "delta_fits": [[self._header], ["{}"], ["no JSON"]],
            "delta_expect": [
                ["delta_status", [], [self._random.choice(status) for _ in range(2)]],
                ["delta_prefetch", [self._version()], [{"is_done": True}] * 2],
                ["delta_status", [], []],
            ],
        }
        args = self._random.choice(fitting.get(name, [[]]))
        body: dict[str, Any] = {"method": name, "args": args}
        spoiled = self._random.random()
        if spoiled < 0.15:
            body["args"] = [self._wrong() for _ in range(self._random.randrange(4))]
        elif spoiled < 0.2:
            body["kwargs"] = self._random.choice([{"version": self._wrong()}, {"none": 1}])
        elif spoiled < 0.25:
            body["timeout"] = self._random.choice([0, 0.001, -1, 30])
        return [Call(path="/collective_rpc", body=body)]

    def _elsewhere(self) -> list[Call]:
        """Return a call of another route of vLLM's development mode."""
        action = self._random.choice(["checksum", "checksum", "reset", "compare", "x"])
        tags = self._random.choice([{}, {}, {"tags": "weights"}, {"tags": "kv_cache"}, {"tags": "x"}])
        pause = {"mode": self._random.choice(["keep", "abort", "x"])}
        drawn = self._random.choice(
            [
                Call(path="/pause", query=pause),
                Call(path="/resume"),
                Call(path="/is_paused", method="GET"),
                Call(path="/sleep", query={"level": self._random.choice(["0", "1", "2", "3"])}),
                Call(path="/wake_up", query=tags),
                Call(path="/is_sleeping", method="GET"),
                Call(path="/weight_checker", body={"action": action, "baseline": {"a": "b"}}),
                Call(path="/weight_info", method="GET"),
                Call(path="/update_weight_version", body={"new_version": self._wrong()}),
                Call(path="/reset_prefix_cache", query={"reset_running_requests": "true"}),
                Call(path="/reset_mm_cache"),
                Call(path="/reset_encoder_cache"),
                Call(path="/abort_requests"),
                Call(path="/get_world_size", method="GET"),
                Call(path="/server_info", method="GET"),
            ]
        )
        return [drawn, Call(path="/wake_up")] if drawn.path == "/sleep" else [drawn]

    def _malformed(self) -> list[Call]:
        return [Call(path=self._random.choice(_UPDATING), body=self._random.choice(_BODIES))]

    def _answer(self) -> list[Call]:
        prompt = [self._random.randrange(1, 250) for _ in range(self._random.randrange(1, 40))]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        return [Call(path="/v1/completions", body=body)]

"""Messages between the ranks of a publisher, through a key-value store of torch.distributed.

No message is a collective: a rank that is dead or late keeps no other waiting beyond a timeout, and the
groups that the trainer computes with are not touched. All ranks take part in *rounds*, in the same order. In
a round each rank does its part and tells the leader the result. The leader concludes, and tells all. A
failure of any rank is the result of the round on every rank.

A process that reaches the store can write every key. So the ranks share a secret from `trust` on, and
a message that another process wrote ends the round with an error.

A process that publishes alone is a group of one: `LocalChannel` has its rounds, and sends nothing.
"""

import base64
import hashlib
import hmac
import json
import re
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch.distributed as dist

from patchstore.errors import PatchstoreError, PublishFailed, RankFailed, UsageError, of_kind
from patchstore.publish.sources.quantized import Blocks, Cuts, Values, joined
from patchstore.support.threads import Task

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Message: TypeAlias = dict[str, Any]
"""What JSON can say."""

_ANSWER_TIMES = 3
"""The leader's answer is awaited for so many times the timeout: the leader waits for all others itself."""
_SESSION = re.compile("[0-9a-f]{32}")
_LEAVING_S = 10.0
_GRACE_S = 1.0
"""After a rank has failed, so long others may go on with what they do in the round, and fail themselves."""
_LEAST_POLL_S = 0.002
_MOST_POLL_S = 0.2
"""How long to wait before asking again: an eighth of the time so far, within these."""


Conclude: TypeAlias = Callable[[list[Message]], Message | list[Message]]
"""What the leader makes of the results of all ranks, in their order: one answer for all, or a list with one
for each."""


class LocalChannel:
    """The only end of a group of one."""

    is_alone = True
    leads = True
    index = 0
    rank = 0
    ranks = (0,)

    def name(self, rank: int) -> str:
        return "this process"

    def twin(self, purpose: str) -> Self:
        return self

    def packed(self, value: Any) -> Any:
        """Return it as it is: no other process reads it."""
        return value

    def unpacked(self, told: Any) -> Any:
        return told

    def next_call(self) -> None:
        """Do nothing: no other process counts the rounds."""

    def round(self, what: str, local: Callable[[], Message], conclude: Conclude) -> Message:
        found = conclude([local()])
        return found[0] if isinstance(found, list) else found

    def leave(self) -> None:
        """Do nothing: no other process waits for this one."""


class Channel:
    """One rank's end. For one thread at a time."""

    is_alone = False

    def __init__(
        self, ranks: Sequence[int], rank: int, connect: Callable[[], Any], timeout_s: float, purpose: str = ""
    ) -> None:
        """Take part in a group of global ranks, of which the first leads; `meet` comes before all else.

        `connect` returns the store of keys. `purpose` tells apart several channels of the same ranks.
        """
        self.ranks, self.rank, self.timeout_s = tuple(ranks), rank, timeout_s
        if rank not in self.ranks:
            raise UsageError(
                f"this is rank {rank}, which is not in the publisher's group of ranks "
                f"{_listed(self.ranks)}; open the Publisher on those ranks alone"
            )
        self._connect = connect
        with self._storing():
            self._store = connect()
        named = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        self._base = f"patchstore/{named}{purpose and '/' + purpose}"
        self.session = ""
        self._call, self._stage = 0, 0
        """Which call of the publisher this is, and which round of it. If ranks differ in where a call failed,
        the next one still begins at the same place on all."""
        self._old: list[str] = []
        """Keys of rounds that all ranks have ended once they are heard of in the next one."""
        self._heard: list[str] = []
        """Keys by which ranks say that they have the answer of the last round."""
        self._secret: bytes | None = None
        self._open = {rank: hashlib.sha256() for rank in self.ranks}
        """Of what each rank and the leader told each other without a secret, as far as this one knows."""

    @property
    def leads(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def index(self) -> int:
        """This rank's place in the group, from 0."""
        return self.ranks.index(self.rank)

    def name(self, rank: int) -> str:
        """What errors call a rank."""
        return f"rank {rank} of {len(self.ranks)}" if self.ranks[-1] < len(self.ranks) else f"rank {rank}"

    def meet(self) -> None:
        """Wait until all ranks are here, and agree on a name for this session.

        Each rank makes itself known under a word of its own, so that a rank whose last attempt failed is not
        taken for that attempt.
        """
        deadline = time.monotonic() + self.timeout_s
        with self._storing():
            if self.leads:
                self._welcome(deadline)
                return
            nonce = uuid.uuid4().hex
            self._store.set(f"{self._base}/hello/{self.rank}", nonce)
            key = f"{self._base}/welcome/{self.rank}/{nonce}"
            if not self._wait([key], deadline):
                raise RankFailed(
                    f"{self.name(self.ranks[0])} did not open a publisher within {self.timeout_s:g} s, but "
                    f"{self.name(self.rank)} did: every rank of a group must open it",
                    (self.ranks[0],),
                )
            self.session = self._store.get(key).decode(errors="replace")
            if not _SESSION.fullmatch(self.session):
                raise self._forged(self.ranks[0])
            self._store.delete_key(key)
            self._store.set(f"{self._base}/{self.session}/here/{self.rank}", "")

    def _welcome(self, deadline: float) -> None:
        self.session = uuid.uuid4().hex
        missing, welcomed = set(self.ranks) - {self.rank}, dict[int, str]()
        while missing:
            for rank in sorted(missing):
                hello = f"{self._base}/hello/{rank}"
                if self._store.check([f"{self._base}/{self.session}/here/{rank}"]):
                    missing.discard(rank)
                    self._store.delete_key(hello)
                elif self._store.check([hello]) and welcomed.get(rank) != (
                    nonce := self._store.get(hello).decode(errors="replace")
                ):
                    welcomed[rank] = nonce
                    self._store.set(f"{self._base}/welcome/{rank}/{nonce}", self.session)
            if missing and time.monotonic() > deadline:
                error = RankFailed(
                    f"{_named(self, sorted(missing))} did not open a publisher within {self.timeout_s:g} s: "
                    "every rank of a group must open it",
                    tuple(sorted(missing)),
                )
                # Those that came are in the first round, and find its answer.
                self._tell(f"{self._base}/{self.session}/0.1/answer", {"error": _told(error)})
                raise error
            if missing:
                time.sleep(10 * _LEAST_POLL_S)

    def trust(self, secret: bytes) -> None:
        """Believe only messages of those who know this, from now on; all ranks do so after the same round.

        Each report then shows whether the rank and the leader heard what the other told it before.
        """
        self._secret = secret

    def _tell(self, path: str, message: Message) -> None:
        text = json.dumps(message)
        self._store.set(path, self._tag(path, text) + text)

    def _hear(self, path: str, teller: int) -> Message:
        stored: bytes = self._store.get(path)
        text = stored.decode(errors="replace")
        tag, text = text[: len(self._tag(path, ""))], text[len(self._tag(path, "")) :]
        found: Any = None
        if hmac.compare_digest(tag.encode(), self._tag(path, text).encode()):
            with suppress(ValueError):
                found = json.loads(text)
        if not isinstance(found, dict):
            raise self._forged(teller)
        return found

    def _tag(self, path: str, text: str) -> str:
        """Return what shows that one of the ranks wrote this, and in this place."""
        if self._secret is None:
            return ""
        return hmac.new(self._secret, f"{path}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _note(self, rank: int, message: Message) -> None:
        """Remember what a rank and the leader told each other without a secret."""
        if self._secret is None:
            self._open[rank].update(json.dumps(message).encode())

    def _forged(self, teller: int) -> RankFailed:
        unknown = "; what the ranks concluded is unknown here" if teller == self.ranks[0] else ""
        return RankFailed(
            f"{self.name(self.rank)} found another message in the place of that of {self.name(teller)}, in "
            f"the key-value store of torch.distributed{unknown}: another process writes there. Let only the "
            "hosts of this job reach MASTER_PORT",
            (teller,),
        )

    def twin(self, purpose: str) -> "Channel":
        """Return another channel of the same ranks, for another thread; they have met there already."""
        found = Channel(self.ranks, self.rank, self._connect, self.timeout_s, purpose)
        found.meet()
        assert self._secret is not None
        found.trust(self._secret)
        return found

    def packed(self, value: Any) -> str:
        """Return JSON in few bytes: there are tens of thousands of names, and hundreds of ranks."""
        return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()

    def unpacked(self, told: str) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(told)))

    def next_call(self) -> None:
        """Begin the rounds of the next publication; all ranks count them."""
        self._call, self._stage = self._call + 1, 0

    def round(
        self,
        what: str,
        local: Callable[[], Message],
        conclude: Conclude,
    ) -> Message:
        """Do this rank's part of the next round, and return the leader's answer."""
        self._stage += 1
        prefix = f"{self._base}/{self.session}/{self._call}.{self._stage}"
        failure: Exception | None = None
        try:
            mine: Message = {"ok": local()}
        except Exception as exc:  # noqa: BLE001 -- raised below, when the others know
            failure, mine = exc, {"error": _told(exc)}
        with self._storing():
            if self.leads:
                return self._lead(prefix, what, mine, failure, conclude)
            return self._follow(prefix, what, mine, failure)

    def _follow(self, prefix: str, what: str, mine: Message, failure: Exception | None) -> Message:
        if self._secret is not None:
            mine["open"] = self._open[self.rank].hexdigest()
        self._note(self.rank, mine)
        self._tell(f"{prefix}/{self.rank}", mine)
        if failure is not None:
            raise failure
        leader = self.ranks[0]
        keys = [f"{prefix}/answer", f"{prefix}/answer/{self.rank}"]
        deadline = time.monotonic() + _ANSWER_TIMES * self.timeout_s
        if not self._wait(keys[:1], deadline, leader):
            raise RankFailed(
                f"{self.name(leader)}, which commits, did not answer within "
                f"{_ANSWER_TIMES * self.timeout_s:g} s when ranks {what}; whether that was published is "
                "unknown here",
                (leader,),
            )
        answer = self._hear(keys[0], leader)
        if "each" in answer:
            answer = self._hear(keys[1], leader)
        self._note(self.rank, answer)
        self._store.set(f"{prefix}/heard/{self.rank}", "")
        if "error" in answer:
            raise _error(answer["error"])
        found: Message = answer["ok"]
        return found

    def _lead(
        self,
        prefix: str,
        what: str,
        mine: Message,
        failure: Exception | None,
        conclude: Conclude,
    ) -> Message:
        try:
            if failure is not None:
                raise failure
            reports = [mine["ok"], *self._gather(prefix, what)]
            # All have heard the answer of the round before: they are in this one.
            for key in self._old:
                self._store.delete_key(key)
            self._old = []
            self._heard = [f"{prefix}/heard/{rank}" for rank in self.ranks[1:]]
            found = conclude(reports)
        except Exception as exc:
            told = _told(exc)
            if not isinstance(exc, PatchstoreError):
                told["message"] = f"{self.name(self.rank)}: {told['message']}"
            # It stays: a rank that is late finds it whenever it comes.
            self._tell(f"{prefix}/answer", {"error": told})
            raise
        finally:
            self._old += [f"{prefix}/{rank}" for rank in self.ranks[1:]]
            self._old += [f"{prefix}/heard/{rank}" for rank in self.ranks[1:]]
        self._old.append(f"{prefix}/answer")
        answers = found if isinstance(found, list) else [found] * len(self.ranks)
        for rank, report, answer in zip(self.ranks, reports, answers, strict=True):
            self._note(rank, {"ok": report})
            self._note(rank, {"ok": answer})
        if not isinstance(found, list):
            self._tell(f"{prefix}/answer", {"ok": found})
            return found
        for rank, answer in zip(self.ranks[1:], found[1:], strict=True):
            self._old.append(f"{prefix}/answer/{rank}")
            self._tell(f"{prefix}/answer/{rank}", {"ok": answer})
        self._tell(f"{prefix}/answer", {"each": True})
        return found[0]

    def _gather(self, prefix: str, what: str) -> list[Message]:
        began = time.monotonic()
        found: dict[int, Message] = {}
        missing, failed, failed_at = list(self.ranks[1:]), list[int](), began
        while missing:
            for rank in list(missing):
                if self._store.check([f"{prefix}/{rank}"]):
                    found[rank] = self._hear(f"{prefix}/{rank}", rank)
                    if self._secret is not None and found[rank].get("open") != self._open[rank].hexdigest():
                        raise self._forged(rank)
                    missing.remove(rank)
                    if "error" in found[rank]:
                        failed_at = failed_at if failed else time.monotonic()
                        failed.append(rank)
                elif self._has_left(rank) and not self._store.check([f"{prefix}/{rank}"]):
                    raise RankFailed(f"{self.name(rank)} has closed its publisher", (rank,))
            now = time.monotonic()
            if failed and (not missing or now - failed_at > min(_GRACE_S, self.timeout_s)):
                break
            if missing and now - began > self.timeout_s:
                raise RankFailed(
                    f"{_named(self, missing)} {'was' if len(missing) == 1 else 'were'} not heard of within "
                    f"{self.timeout_s:g} s when ranks {what}",
                    tuple(missing),
                )
            if missing:
                time.sleep(min(max((now - began) / 8, _LEAST_POLL_S), _MOST_POLL_S))
        if failed:
            told = found[min(failed)]["error"]["message"]
            others = f"; {_named(self, sorted(failed)[1:])} failed too" if len(failed) > 1 else ""
            raise RankFailed(f"{self.name(min(failed))}: {told}{others}", tuple(sorted(failed)))
        return [found[rank]["ok"] for rank in self.ranks[1:]]

    def leave(self) -> None:
        """Tell the others that this rank takes part in no more rounds.

        The leader waits a moment until they have its last answer: the store may end with its process.
        """
        if self.session:
            try:
                self._store.set(self._left(self.rank), "")
                if self._heard:
                    self._wait(self._heard, time.monotonic() + min(_LEAVING_S, self.timeout_s))
            except RuntimeError:
                # The store is gone, and so are the others.
                return

    def _wait(self, keys: Sequence[str], deadline: float, rank: int | None = None) -> bool:
        """Wait until all of these keys exist, or a rank has left; return whether they do.

        Asks again and again: torch's own `wait` logs a warning for each time that it ends without a key.
        """
        began = time.monotonic()
        while not self._store.check(list(keys)):
            now = time.monotonic()
            if now > deadline:
                return False
            # It may have answered and then left, both since the first look.
            if rank is not None and self._has_left(rank) and not self._store.check(list(keys)):
                raise RankFailed(f"{self.name(rank)}, which commits, has closed its publisher", (rank,))
            time.sleep(min(max((now - began) / 8, _LEAST_POLL_S), _MOST_POLL_S))
        return True

    def _has_left(self, rank: int) -> bool:
        return bool(self._store.check([self._left(rank)]))

    def _left(self, rank: int) -> str:
        return f"{self._base}/{self.session}/left/{rank}"

    @contextmanager
    def _storing(self) -> Iterator[None]:
        """Raise RankFailed where the key-value store of the ranks does not answer."""
        try:
            yield
        except (dist.DistError, BrokenPipeError, ConnectionError) as exc:
            raise RankFailed(
                f"{self.name(self.rank)} on {socket.gethostname()} cannot reach the key-value store of "
                f"torch.distributed, through which the ranks speak; its host or process may have ended: {exc}"
            ) from exc


def _told(error: Exception) -> Message:
    kind = error.kind if isinstance(error, PatchstoreError) else ""
    return {
        "kind": kind,
        "message": str(error) if kind else f"{type(error).__name__}: {error}",
        "ranks": list(getattr(error, "ranks", ())),
    }


def _error(told: Message) -> Exception:
    found = of_kind(told["kind"]) or PublishFailed
    if found is RankFailed:
        return RankFailed(told["message"], tuple(told["ranks"]))
    return found(told["message"])


def _named(channel: Channel, ranks: Sequence[int]) -> str:
    return channel.name(ranks[0]) if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


AnyChannel: TypeAlias = Channel | LocalChannel


def connect(group: "ProcessGroup | None", sharded: set[int], timeout_s: float) -> AnyChannel:
    """Meet the ranks that publish together; this process alone where there are no others."""
    ranks = sorted(sharded)
    if group is not None:
        distributed: Any = dist
        if not isinstance(group, distributed.ProcessGroup):
            raise UsageError(
                f"group must be a process group of torch.distributed in which this rank is, not {group!r}"
            )
        ranks = sorted(distributed.get_process_group_ranks(group))
        if missing := sharded - set(ranks):
            raise UsageError(
                f"tensors are sharded over ranks {sorted(sharded)}, but group= has {ranks}: without "
                f"{sorted(missing)} there is no whole tensor; pass a group with all of them"
            )
    if len(ranks) < 2:
        return LocalChannel()
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("publishing from several ranks needs torch.distributed.init_process_group first")
    channel = Channel(ranks, dist.get_rank(), partial(_connected, timeout_s), timeout_s)
    channel.meet()
    return channel


def _connected(timeout_s: float) -> Any:
    """Return a connection of its own: another thread of the trainer may wait on the one that it has."""
    default: Any = dist.distributed_c10d._get_default_store()
    task = Task(default.clone)
    # Where the store is gone, it tries for as long as the process group may wait: half an hour.
    Thread(target=task.run, name="patchstore-connect", daemon=True).start()
    if not task.wait(timeout_s):
        raise ConnectionError(f"it did not answer within {timeout_s:g} s")
    found = task.result()
    # Of one request: a host that is cut off from the network does not answer at all.
    found.set_timeout(timedelta(seconds=timeout_s))
    return found


class BlockAmax:
    """The largest magnitudes of blocks that lie on several ranks: all that rounding to FP8 must share.

    Every rank takes part in one exchange per publication.
    """

    def __init__(self, channel: AnyChannel) -> None:
        self._channel = channel
        self._is_needed: bool | None = None
        """Whether any rank has a part of a block; None before the first exchange."""
        self._is_begun = False
        self._cuts: list[Cuts] = []
        """Of each rank, on the one that leads."""

    def begin(self) -> None:
        """Begin the exchange of the next publication; all ranks count them."""
        self._channel.next_call()
        self._is_begun = True

    def exchange(self, cuts: Cuts, local: Callable[[], Values]) -> Values:
        """Return the maxima over all ranks of the blocks that this rank has a part of, given its own.

        `cuts` are the same in each publication. What `local` raises, the other ranks are told.
        """
        self._is_begun = False
        if self._is_needed is False:
            return local()
        is_first = self._is_needed is None

        def mine() -> Message:
            found: Message = {"values": _packed(local())}
            if is_first:
                found["cuts"] = cuts
            return found

        def conclude(reports: list[Message]) -> list[Message]:
            if is_first:
                self._cuts = [[(name, Blocks(*box)) for name, box in report["cuts"]] for report in reports]
            values = [_unpacked(report["values"]) for report in reports]
            needed = any(self._cuts)
            return [{"values": _packed(each), "needed": needed} for each in joined(self._cuts, values)]

        answer = self._channel.round("compare the largest weights of their blocks", mine, conclude)
        self._is_needed = bool(answer["needed"])
        return _unpacked(answer["values"])

    def abandon(self, error: Exception) -> None:
        """Tell the other ranks that this one cannot take part in the exchange that it began."""
        if not self._is_begun or self._is_needed is False:
            return
        self._is_begun = False

        def fail() -> Message:
            raise error

        try:
            self._channel.round("compare the largest weights of their blocks", fail, lambda _: [])
        except Exception:  # noqa: BLE001 -- raised already
            return

    def leave(self) -> None:
        self._channel.leave()


def _packed(values: Values) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _unpacked(text: str) -> Values:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32)

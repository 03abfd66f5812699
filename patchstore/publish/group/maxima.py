"""The largest magnitudes of blocks that lie on several ranks: all that rounding to FP8 must share."""

import base64
from collections.abc import Callable, Sequence

import numpy as np

from patchstore.publish.group.channel import Channel, Message
from patchstore.publish.sources.cuts import Cuts, Values, joined


class Maxima:
    """One rank's end of an exchange that every rank takes part in once per publication."""

    def __init__(self, ranks: Sequence[int], timeout_s: float, secret: bytes) -> None:
        """Meet the other ranks; see `Channel.trust`.

        Raises:
            RankFailed: some did not come in time.
        """
        self._channel = Channel(ranks, timeout_s, "maxima")
        self._channel.meet()
        self._channel.trust(secret)
        self._is_needed: bool | None = None
        """Whether any rank has a part of a block; None before the first exchange."""
        self._is_begun = False
        self._cuts: dict[int, Cuts] = {}
        """Of each rank, on the one that leads."""

    def begin(self) -> None:
        """Begin the exchange of the next publication; all ranks count them."""
        self._channel.next_call()
        self._is_begun = True

    def exchange(self, cuts: Cuts, local: Callable[[], Values]) -> Values:
        """Return the maxima over all ranks of the blocks that this rank has a part of.

        Args:
            cuts: where those are; the same in each publication.
            local: returns this rank's maxima of them. What it raises, the other ranks are told.

        Raises:
            RankFailed: another rank failed, or was not heard of in time.
        """
        self._is_begun = False
        if self._is_needed is False:
            return local()
        is_first = self._is_needed is None

        def mine() -> Message:
            found: Message = {"values": _packed(local())}
            if is_first:
                found["cuts"] = cuts.told()
            return found

        def conclude(reports: list[Message]) -> list[Message]:
            if is_first:
                self._cuts = {rank: Cuts.of(report["cuts"]) for rank, report in enumerate(reports)}
            every = [self._cuts[rank] for rank in range(len(reports))]
            values = [_unpacked(report["values"]) for report in reports]
            needed = any(each.num_blocks for each in every)
            return [{"values": _packed(each), "needed": needed} for each in joined(every, values)]

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
        """Tell the other ranks that this one publishes no more."""
        self._channel.leave()


def _packed(values: Values) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _unpacked(text: str) -> Values:
    return np.frombuffer(base64.b64decode(text), dtype="<f4").astype(np.float32)

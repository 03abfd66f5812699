"""A store that counts what is asked of it."""

from patchstore.testing.faults import FaultyStore


class CountingStore(FaultyStore):
    """A store without faults that counts requests, and the bytes that it returns."""

    num_bytes = 0

    @property
    def num_requests(self) -> int:
        return len(self.calls)

    def reset(self) -> None:
        """Begin to count anew."""
        self.calls.clear()
        self.num_bytes = 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        data = super().get(key, start, end)
        self.num_bytes += len(data)
        return data

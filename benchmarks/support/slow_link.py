"""A TCP proxy that delays what passes, as a network between two regions does.

`python -m benchmarks.support.slow_link HOST:PORT ROUND_TRIP_MS MBIT_S` prints its own URL, and ends with its
standard input. Each direction delivers a byte half a round trip after it was sent, and all connections share
MBIT_S in each direction. A connection costs a round trip more, as its handshake does.
"""

import asyncio
import sys
from asyncio import StreamReader, StreamWriter

_PIECE = 64 << 10
_MAX_PIECES = 4096
"""Pieces of a connection that are under way in one direction: more than the link holds."""


class Direction:
    """One direction of the link, which all connections share."""

    def __init__(self, delay_s: float, bytes_s: float) -> None:
        self._delay_s, self._bytes_s = delay_s, bytes_s
        self._free_at = 0.0

    def due(self, num_bytes: int) -> float:
        """Send bytes now; return when the last of them arrives, by the loop's clock."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time()) + num_bytes / self._bytes_s
        return self._free_at + self._delay_s

    async def carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Pass all on from one side to the other, and its end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_PIECES)

        async def deliver() -> None:
            while (piece := await under_way.get())[1]:
                await asyncio.sleep(max(0.0, piece[0] - asyncio.get_running_loop().time()))
                writer.write(piece[1])
                await writer.drain()
            writer.close()

        async with asyncio.TaskGroup() as group:
            group.create_task(deliver())
            while data := await reader.read(_PIECE):
                await under_way.put((self.due(len(data)), data))
            await under_way.put((0.0, b""))


async def _serve(host: str, port: int, round_trip_s: float, bytes_s: float) -> None:
    there, back = (Direction(round_trip_s / 2, bytes_s) for _ in range(2))

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        await asyncio.sleep(round_trip_s)
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            there.carry(reader, far_writer), back.carry(far_reader, writer), return_exceptions=True
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    name, _, number = sys.argv[1].rpartition(":")
    asyncio.run(_serve(name, int(number), float(sys.argv[2]) / 1e3, float(sys.argv[3]) * 1e6 / 8))

"""`python -m tests.support.hub --port 0`: print the URL, and serve until SIGTERM or the end of stdin."""

import argparse
import signal
import sys
import threading

from tests.support.hub.server import Hub


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.hub", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 for a free one")
    parser.add_argument("--folder", help="where contents lie; a temporary folder if not given")
    parser.add_argument("--bucket", action="append", default=[], metavar="OWNER/NAME", help="to begin with")
    arguments = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, lambda *_: ended.set())
    with Hub(port=arguments.port, folder=arguments.folder) as hub:
        for bucket in arguments.bucket:
            hub.create_bucket(bucket)
        print(hub.url, flush=True)  # noqa: T201
        threading.Thread(target=_wait_for_the_end_of_input, args=(ended,), daemon=True).start()
        ended.wait()


def _wait_for_the_end_of_input(ended: threading.Event) -> None:
    # Then the process that started this has ended, perhaps without stopping it.
    sys.stdin.buffer.read()
    ended.set()


if __name__ == "__main__":
    main()

"""A place in S3, also behind a proxy that does not answer all requests as the server did."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from patchstore.stores.s3 import S3Store
from tests.support import http_server
from tests.support.http_server import Answer, Request, passed_on

CLOSED = Answer(status=0)
"""No answer: the connection is closed, and the server has not seen the request."""


class Place(NamedTuple):
    """A prefix of a bucket that no other test uses, and options of a store there."""

    url: str
    options: dict[str, Any]

    @contextmanager
    def opened(self, **more: Any) -> Iterator[S3Store]:
        store = S3Store(self.url, **{**self.options, **more})
        yield store
        store.close()

    @contextmanager
    def through(
        self,
        *,
        is_lost: Callable[[Request], bool] = lambda request: False,
        instead: Callable[[Request], Answer | None] = lambda request: None,
        is_damaged: Callable[[Request], bool] = lambda request: False,
        **more: Any,
    ) -> Iterator[S3Store]:
        """Yield a store behind the proxy, as `passing_on` makes it."""
        proxy = passing_on(
            self.options["endpoint_url"], is_lost=is_lost, instead=instead, is_damaged=is_damaged
        )
        with proxy as endpoint_url, self.opened(**more, endpoint_url=endpoint_url) as store:
            yield store

    @contextmanager
    def losing_the_answer(self, method: str, ending: str) -> Iterator[S3Store]:
        """Yield a store of which the answer to the first `method` on a path that ends so is lost.

        An `ending` with a `?` is one of the path and the names of the query in order.
        """
        lost: list[Request] = []

        def is_lost(request: Request) -> bool:
            if lost or not _matches(request, method, ending):
                return False
            lost.append(request)
            return True

        with self.through(is_lost=is_lost) as store:
            yield store
        assert lost

    @contextmanager
    def behind(
        self, method: str = "", ending: str = "", answers: Iterable[Answer] = (), **more: Any
    ) -> Iterator[tuple[S3Store, list[Request]]]:
        """Yield a store of which the first requests that match get these answers; and all requests so far."""
        with (
            answering(self.options["endpoint_url"], method, ending, answers) as (endpoint_url, asked),
            self.opened(**more, endpoint_url=endpoint_url) as store,
        ):
            yield store, asked


@contextmanager
def answering(
    endpoint_url: str, method: str = "", ending: str = "", answers: Iterable[Answer] = ()
) -> Iterator[tuple[str, list[Request]]]:
    """Yield the proxy's URL, and the requests so far.

    The first requests that match get these answers instead of the server's.
    """
    left, asked, lock = iter(answers), list[Request](), threading.Lock()

    def instead(request: Request) -> Answer | None:
        with lock:
            asked.append(request)
            return next(left, None) if _matches(request, method, ending) else None

    with passing_on(endpoint_url, instead=instead) as url:
        yield url, asked


def taken(answers: list[Any]) -> Any:
    """Take one of these answers, or None if none is left; several threads may ask."""
    with suppress(IndexError):
        return answers.pop()
    return None


def error(status: int, code: str, **headers: str) -> Answer:
    """What S3 says when it refuses."""
    body = f"<Error><Code>{code}</Code><Message>made up</Message></Error>".encode()
    return Answer(
        status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )


def _matches(request: Request, method: str, ending: str) -> bool:
    path, _, query = request.target.partition("?")
    names = "&".join(sorted(each.partition("=")[0] for each in query.split("&")))
    return request.method == method and (f"{path}?{names}" if "?" in ending else path).endswith(ending)


def changed(data: bytes) -> bytes:
    """The same with one bit changed in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@contextmanager
def passing_on(
    endpoint_url: str,
    *,
    is_lost: Callable[[Request], bool] = lambda request: False,
    instead: Callable[[Request], Answer | None] = lambda request: None,
    is_damaged: Callable[[Request], bool] = lambda request: False,
    port: int = 0,
) -> Iterator[str]:
    """Yield the proxy's URL; `instead` is asked before the server is, and `is_lost` after it answered.

    Of a body that is damaged one bit changes on its way to the server.
    """

    def answer(request: Request) -> Answer | None:
        made_up = instead(request)
        if made_up is not None:
            return None if made_up is CLOSED else made_up
        body = request.body.read()
        # The server may be gone, where a request was held until the end.
        found = passed_on(request, endpoint_url, changed(body) if body and is_damaged(request) else body)
        return None if is_lost(request) else found

    with http_server.serving(answer, port=port) as url:
        yield url

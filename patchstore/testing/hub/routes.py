"""Which function of the local Hub answers which requests."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from patchstore.testing.hub.serving import Answer, Request, json_answer

if TYPE_CHECKING:
    from patchstore.testing.hub.server import Hub

Handler = Callable[["Hub", Request, re.Match[str]], Answer]


class Routes:
    """Handlers by method and path."""

    def __init__(self) -> None:
        self._handlers: list[tuple[str, re.Pattern[str], Handler]] = []

    def add(self, method: str, pattern: str) -> Callable[[Handler], Handler]:
        """Keep the decorated handler for requests whose whole path matches a regular expression."""

        def keep(handler: Handler) -> Handler:
            self._handlers.append((method, re.compile(pattern), handler))
            return handler

        return keep

    def answer(self, hub: "Hub", request: Request, path: str) -> Answer | None:
        """Answer a request for a path; None if no handler is there for it."""
        for method, pattern, handler in self._handlers:
            match = pattern.fullmatch(path)
            if match and method == request.method:
                try:
                    return handler(hub, request, match)
                except ValueError as exc:
                    return json_answer({"error": str(exc)}, 400)
        return None


def not_found(code: str) -> Answer:
    """Answer as the Hub does where something is missing."""
    return json_answer({"error": code}, 404, X_Error_Code=code, X_Error_Message=code)

"""Options that several stores have, checked when a store is opened."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from patchstore.errors import UsageError
from patchstore.stores.deadline import LONGEST_S


def checked_timeout(timeout_s: object) -> float:
    """Return the option `timeout_s` as seconds.

    Raises:
        UsageError: not a number of seconds above 0 and up to a day.
    """
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise UsageError(f"the option timeout_s must be a number of seconds, and is {timeout_s!r}")
    if not math.isfinite(timeout_s) or not 0 < timeout_s <= LONGEST_S:
        raise UsageError(
            f"timeout_s must be above 0 and at most {LONGEST_S:.0f} seconds, and is {timeout_s!r}"
        )
    return float(timeout_s)


def check_texts(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse an option that is no text. The message omits its value, which may be a secret.

    Raises:
        UsageError: names the option.
    """
    for name in names:
        value = options.get(name)
        if value is not None and not (isinstance(value, str) and value.isprintable() and value.isascii()):
            kind = "text with others" if isinstance(value, str) else f"of type {type(value).__name__}"
            raise UsageError(f"the option {name} must be text of printable ASCII characters, and is {kind}")


def check_endpoint(name: str, url: object) -> None:
    """Refuse an option that is not the URL of a service.

    Raises:
        UsageError: names the option.
    """
    if url is None:
        return
    try:
        parts = urlsplit(url) if isinstance(url, str) else urlsplit("")
        is_one = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        is_one = is_one and not re.search(r"\s", parts.netloc)
    except ValueError:
        is_one = False
    if not is_one:
        raise UsageError(f"the option {name} must be a URL such as https://store.example.com:9000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(f"the option {name} holds credentials, a query or a fragment; use other options")

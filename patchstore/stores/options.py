"""What a store is opened with: options that several kinds have, and the packages that each kind needs.

`pyproject.toml` asks an installer for the same releases. It cannot enforce it: a package installed later may
bring an older release back, and `huggingface_hub` may be older where something else needs that.
"""

import math
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from packaging.version import Version

from patchstore.errors import UnsupportedStore, UsageError
from patchstore.stores.deadline import LONGEST_S

OLDEST = {
    # With botocore 1.36, the first that has options for checksums.
    "aiobotocore": "2.19",
    # The first with `mode="create"` and, for s3fs, a conditional PUT behind it.
    "fsspec": "2024.12",
    "s3fs": "2024.12",
    # Before it a request that could not connect was not repeated.
    "huggingface_hub": "1.27",
    # Downloads of 1.6 as streams never end.
    "hf-xet": "1.7",
    # Before it an option of its `S3Store` had another name or did not exist.
    "obstore": "0.12",
}


def problem(package: str) -> str:
    """Return what is wrong with a package's release; empty if nothing is."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return f"{package} {found} is too old" if Version(found) < Version(OLDEST[package]) else ""


def advice(*packages: str) -> str:
    """Return the command that installs releases that work."""
    return " ".join(("pip install", *(f"'{package}>={OLDEST[package]}'" for package in packages)))


def check_packages(store: str, *packages: str) -> None:
    """Raise UnsupportedStore where a package is missing or too old for a kind of store, such as `s3://`."""
    wrong = {package: found for package in packages if (found := problem(package))}
    if wrong:
        raise UnsupportedStore(
            f"{store} stores cannot be opened: {', '.join(wrong.values())}: {advice(*wrong)}"
        )


def check_known(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that a kind of store does not have."""
    if unknown := sorted(set(given) - set(known)):
        has = ", ".join(sorted(known)) or "none"
        raise UsageError(f"{kind} has no option {', '.join(unknown)}; known are {has}")


def checked_timeout(timeout_s: object) -> float:
    """Return the option `timeout_s` as seconds: above 0 and up to a day."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise UsageError(f"the option timeout_s must be a number of seconds, and is {timeout_s!r}")
    if not math.isfinite(timeout_s) or not 0 < timeout_s <= LONGEST_S:
        raise UsageError(
            f"timeout_s must be above 0 and at most {LONGEST_S:.0f} seconds, and is {timeout_s!r}"
        )
    return float(timeout_s)


def check_texts(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse an option that is no text. The message omits its value, which may be a secret."""
    for name in names:
        value = options.get(name)
        if value is not None and not (isinstance(value, str) and value.isprintable() and value.isascii()):
            kind = "text with others" if isinstance(value, str) else f"of type {type(value).__name__}"
            raise UsageError(f"the option {name} must be text of printable ASCII characters, and is {kind}")


def check_endpoint(name: str, url: object) -> None:
    """Refuse an option that is not the URL of a service."""
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

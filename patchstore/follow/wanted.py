"""Which versions a request accepts, as its sender writes it: `=12`, `>=12`, `hold`, or `>=12, hold`."""

import re
from dataclasses import dataclass
from typing import Any, Self

from patchstore.errors import UsageError

_TERM = re.compile(r"(>?=)\s*([0-9]{1,18})|hold")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The versions that one request accepts."""

    exactly: int | None = None
    least: int | None = None
    hold: bool = False
    """Whichever version it is, all of the answer is of it."""

    @classmethod
    def parse(cls, text: Any) -> Self:
        """Read what a request says. `UsageError` if it is not in this form."""
        wanted: dict[str, Any] = {}
        for term in text.split(",") if isinstance(text, str) else [""]:
            found = _TERM.fullmatch(term.strip())
            name = {None: "hold", "=": "exactly", ">=": "least"}[found[1]] if found else ""
            if found is None or name in wanted or wanted.keys() | {name} >= {"exactly", "least"}:
                raise UsageError(
                    "the wanted version is =12 (this one), >=12 (this one or a later one), hold (one version "
                    f"for all of the answer), or two of them, as >=12, hold; not {text!r:.80}"
                )
            wanted[name] = int(found[2]) if found[2] else True
        return cls(**wanted)

    @property
    def is_one(self) -> bool:
        """Whether an answer may be of one version only."""
        return self.hold or self.exactly is not None

    def allows(self, version: int | None) -> bool:
        """Whether a server that serves this version, or none, may answer."""
        if version is None:
            return self.exactly is None and self.least is None
        return self.exactly in {None, version} and (self.least is None or version >= self.least)

    def __str__(self) -> str:
        if self.exactly is not None:
            return f"version {self.exactly}"
        return "one version" if self.least is None else f"version {self.least} or a later one"

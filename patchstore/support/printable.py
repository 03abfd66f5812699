"""Text from elsewhere, such as a store or a server, as it may be shown on a terminal or in a log."""

import json
import re
from typing import Any

# Fixed ranges, and not `str.isprintable`, which changes with the Unicode version of each Python.
UNPRINTABLE = re.compile(
    "[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff]"
)
"""Control characters, line ends, what changes the direction of text or is invisible, and surrogates."""

_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(text: str) -> str:
    r"""Return a text on one line, with `\x1b` and the like in place of what is not printable.

    A terminal obeys control characters, and a line end within a value would begin a line that its writer
    made up. A backslash stays as it is, so this is for people to read, and not for programs.
    """
    return UNPRINTABLE.sub(lambda found: _SHORT.get(found[0]) or _spelled(found[0]), text)


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def json_line(value: Any, **options: Any) -> str:
    """Spell a value as `json.dumps` does, on one line, with escapes of JSON for all that is not printable."""
    # There is none outside of strings, and each is one unit of UTF-16.
    return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, **options))


def duration(seconds: float) -> str:
    """Return a time in its largest unit, such as `5 minutes`; 0 s where clocks make it negative."""
    seconds = max(0.0, seconds)
    for unit, length_s in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"

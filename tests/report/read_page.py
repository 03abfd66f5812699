"""A page as a browser's parser sees it: texts, figures, the table, and which tags there are."""

import base64
import hashlib
import json
from collections import Counter
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """A page that was parsed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.ids: set[str] = set()
        self.policy = ""
        self.scripts: list[str] = []
        self._texts: list[str] = []
        self._rows: list[list[str]] = []
        self._last = ""
        """The tag that began last, if it has not ended: cells of the table have no end tags."""
        self.feed(text)
        self.close()
        self.text = "".join(self._texts)
        self.charts: dict[str, Any] = json.loads(self.scripts[0])["charts"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        found = dict(attrs)
        self.attributes |= found.keys()
        self.ids |= {each for name, each in attrs if name == "id" and each is not None}
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self._rows.append([])
        if tag in {"td", "th"}:
            self._rows[-1].append("")
        self._last = tag

    def handle_endtag(self, tag: str) -> None:
        self._last = ""

    def handle_data(self, data: str) -> None:
        if self._last == "script":
            self.scripts[-1] += data
        elif self._last != "style":
            self._texts.append(data)
            if self._last in {"td", "th"}:
                self._rows[-1][-1] += data.strip("\n")

    @property
    def rows(self) -> list[dict[str, str]]:
        """The table of versions, newest first."""
        names, *rows = self._rows
        return [dict(zip(names, row, strict=True)) for row in rows]

    def trace(self, chart: str, name: str) -> dict[str, Any]:
        """A line or points of a picture."""
        return next(each for each in self.charts[chart]["figure"]["data"] if each.get("name") == name)

    def allows_its_scripts(self) -> bool:
        """Whether the policy names the scripts that run, and nothing else that may run."""
        sources = self.policy.partition("script-src ")[2].partition(";")[0].split()
        digests = [
            base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in self.scripts[1:]
        ]
        return sources == [f"'sha256-{each}'" for each in digests]

    @property
    def drawn_texts(self) -> list[str]:
        """All texts of figures, in which plotly.js reads some HTML."""
        return [*_texts({name: each["figure"] for name, each in self.charts.items()})]


def _texts(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)

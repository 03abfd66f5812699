"""What `make docs` adds to the Markdown files of docs/: what they link outside of it, and generated pages.

mkdocs calls the functions `on_*`.
"""

import logging
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import patchstore

log = logging.getLogger("mkdocs.plugins.build")
ROOT = Path(__file__).parent.parent
OUTSIDE = ("README.md", "C*.md", "LICENSE", "benchmarks/**/*.md", "benchmarks/**/*.png", "examples/**/*.*")
"""Files outside of docs/ that pages may link."""
LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and the files from outside."""
    for path in sorted({path for pattern in OUTSIDE for path in ROOT.glob(pattern)}):
        if path.is_file() and "__pycache__" not in path.parts:
            place = in_site(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, place, abs_src_path=str(path)))
    for name, content in (("api.md", api()), ("cli.md", commands()), ("llms.txt", index())):
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Let links lead to where files lie in the site."""
    source = page.file.src_uri
    path = page.file.abs_src_path
    folder = Path(path).parent.relative_to(ROOT).as_posix() if path else "docs"

    def moved(found: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(folder, found[2])))
        return found[1] + posixpath.relpath(target, posixpath.dirname(source) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Warn of a list that is none for want of an empty line before it; `--strict` makes that an error."""
    for text in re.findall(r"<p>[^<]*(?:<(?!/p>)[^<]*)*\n *(?:-|1\.) [^\n]*", html):
        log.warning("%s: a list without an empty line before it: %s", page.file.src_uri, text[:80])
    return html


def on_post_page(output: str, page: Page, config: Any) -> str:
    """Warn of what a browser would fetch from elsewhere."""
    for url in re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"(https?:[^\"]*)", output):
        log.warning("%s: needs a network: %s", page.file.src_uri, url)
    return output


def in_site(path: str) -> str:
    """Return where a file of the repository lies in the site."""
    return "readme.md" if path == "README.md" else path.removeprefix("docs/")


def api() -> str:
    """Return a page of the package's public names."""
    about = "What `import patchstore` offers. Everything else may change from release to release."
    return "\n\n".join(["# Python", about, *(f"::: patchstore.{name}" for name in patchstore.__all__)])


def index() -> str:
    """Return llms.txt with the site's links."""

    def moved(found: re.Match[str]) -> str:
        return found[1] + in_site(found[2]).replace("README.md", "index.html").replace(".md", ".html")

    return LINK.sub(moved, (ROOT / "llms.txt").read_text())


def commands() -> str:
    """Return a page of all commands and options, as typer writes it."""
    typer = [sys.executable, "-m", "typer", "patchstore.cli.main", "utils", "docs", "--name", "patchstore"]
    done = subprocess.run(typer, cwd=ROOT, check=True, capture_output=True, text=True)
    page = done.stdout.replace("# `patchstore`\n", "# Commands\n", 1)
    # typer cuts what each command is for after 45 characters.
    about = dict(re.findall(r"^## `patchstore (\w+)`\n\n(.+)$", page, re.MULTILINE))
    return re.sub(
        r"^\* `(\w+)`: .*\.\.\.$", lambda line: f"* `{line[1]}`: {about[line[1]]}", page, flags=re.MULTILINE
    )

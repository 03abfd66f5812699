"""Those that a mirror tells of a version: a command that is run, or a URL to which JSON is posted."""

import json
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import httpx

from patchstore.errors import ConsumerFailed, UsageError
from patchstore.serve.vllm_http import trusted

FIELDS = ("folder", "link", "version", "step", "run_id", "store")
"""What `{...}` may name in a command or a body."""
BODY = '{"model_path": "{folder}", "weight_version": "{version}"}'
"""What SGLang's `/update_weights_from_disk` takes."""
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")
_LOOK_S = 0.2
_END_S = 10.0
"""Time that a command has to end after SIGTERM."""
_MAX_SHOWN = 500


class Stopped(Exception):
    """The caller asked for an end before the consumer had accepted the version."""


class Consumer(ABC):
    """Somebody who uses versions."""

    name: str
    """For messages."""

    @abstractmethod
    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        """Tell of a version, and wait until it is accepted.

        Args:
            values: of each of `FIELDS`.

        Raises:
            ConsumerFailed: it was not.
            Stopped: `stop` was set.
        """


class Command(Consumer):
    """A command, which accepts a version by exit status 0. Its output goes to standard error."""

    def __init__(self, line: str, *, timeout_s: float) -> None:
        """Split a command line as a shell does; no shell runs it.

        Raises:
            UsageError: it cannot be split, is empty, or names an unknown field.
        """
        try:
            self._words = shlex.split(line)
        except ValueError as exc:
            raise UsageError(f"the command {line!r} cannot be split into words: {exc}") from exc
        if not self._words:
            raise UsageError("the command is empty")
        for word in self._words:
            check_fields(word)
        self.name, self._timeout_s = self._words[0], timeout_s

    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        words = [filled(word, values) for word in self._words]
        environment = {f"PATCHSTORE_{name.upper()}": value for name, value in values.items()}
        try:
            # A session of its own: Ctrl-C is for this process, which ends the command then.
            process = subprocess.Popen(  # noqa: S603 -- the caller's own command, without a shell
                words,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as exc:
            raise ConsumerFailed(f"{words[0]} cannot be started: {exc}") from exc
        end = time.monotonic() + self._timeout_s
        try:
            while True:
                try:
                    code = process.wait(_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    if stop.is_set():
                        raise Stopped from None
                    if time.monotonic() > end:
                        raise ConsumerFailed(
                            f"{shlex.join(words)} did not end within {self._timeout_s:.0f} s"
                        ) from None
        finally:
            _end(process)
        if code:
            how = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
            raise ConsumerFailed(f"{shlex.join(words)} ended with {how}; it is run again")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and what it started, if it runs still."""
    if process.poll() is not None:
        return
    try:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    except ProcessLookupError:
        process.wait()


class Post(Consumer):
    """A URL, which accepts a version by a status of 200 to 299, unless the answer says `"success": false`."""

    def __init__(self, url: str, *, body: str = BODY, timeout_s: float) -> None:
        """Check what is going to be sent.

        Args:
            body: JSON; fields are filled into its texts.

        Raises:
            UsageError: this is no URL, the body is no JSON, or it names an unknown field.
        """
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError) as exc:
            raise UsageError(f"{url!r} is no URL: {exc}") from exc
        if parsed.scheme not in {"http", "https"} or not parsed.host:
            raise UsageError(f"{url!r} is no URL to post to: give one such as http://127.0.0.1:30000/update")
        try:
            self._body: Any = json.loads(body)
        except ValueError as exc:
            raise UsageError(f"the body {body!r:.200} is no JSON: {exc}") from exc
        check_fields(body)
        self.name = str(parsed.copy_with(username=None, password=None, query=None))
        self._url, self._timeout_s = url, timeout_s

    def tell(self, values: Mapping[str, str], stop: threading.Event) -> None:
        body = _filled_in(self._body, values)
        errors: list[ConsumerFailed | None] = []
        # On a thread: a server that loads weights answers late, and the end must not wait for it.
        sending = threading.Thread(target=lambda: errors.append(self._sent(body)), daemon=True)
        sending.start()
        while sending.is_alive():
            sending.join(_LOOK_S)
            if stop.is_set() and sending.is_alive():
                raise Stopped
        (error,) = errors
        if error is not None:
            raise error

    def _sent(self, body: Any) -> ConsumerFailed | None:
        try:
            timeout = httpx.Timeout(self._timeout_s, connect=10.0)
            answer = httpx.post(self._url, json=body, timeout=timeout, verify=trusted())
        except (httpx.HTTPError, OSError, ValueError) as exc:
            return ConsumerFailed(f"POST {self.name}: {type(exc).__name__}: {exc}")
        said = " ".join(answer.text.split())[:_MAX_SHOWN]
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not answer.is_success or (isinstance(found, dict) and found.get("success") is False):
            return ConsumerFailed(f"POST {self.name}: status {answer.status_code}: {said}")
        return None


def check_fields(text: str) -> None:
    """Raises UsageError where a text has `{...}` of an unknown field."""
    if unknown := sorted(set(_FIELD.findall(text)) - set(FIELDS)):
        known = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise UsageError(f"{{{unknown[0]}}} is not known: a command or a body may have {known}")


def filled(text: str, values: Mapping[str, str]) -> str:
    """Replace each field by its value; values are not looked at again."""
    return _FIELD.sub(lambda match: values[match[1]], text)


def _filled_in(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return filled(value, values)
    if isinstance(value, list):
        return [_filled_in(each, values) for each in value]
    if isinstance(value, dict):
        return {name: _filled_in(each, values) for name, each in value.items()}
    return value

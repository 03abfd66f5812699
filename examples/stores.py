"""The bucket of an example: a folder, or a store whose server runs on this machine."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import httpx

from examples.processes import Program, free_port, wait_for

Kind = Literal["file", "s3", "hf"]
KINDS: tuple[Kind, ...] = ("file", "s3", "hf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the bucket is."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    """Storage options of the publisher, which may write."""
    hub: str | None = None
    """Endpoint of the Hugging Face Hub that vLLM may ask too."""

    @property
    def reading(self) -> dict[str, str]:
        """Storage options of a reader, which gets no key to the gateway."""
        return {name: value for name, value in self.options.items() if not name.startswith("gateway")}


def start_store(kind: Kind, folder: Path, running: ExitStack) -> Place:
    """Start the server of a kind of store, if it has one; it ends when `running` is closed."""
    if kind == "s3":
        s3 = running.enter_context(S3Server(folder / "s3.log"))
        s3.create_bucket()
        return Place(url=s3.url, options=s3.options)
    if kind == "hf":
        hub = running.enter_context(HubServer(folder / "hub.log"))
        return Place(url=hub.url, options=hub.options, hub=hub.endpoint)
    return Place(url=str(folder / "bucket"))


class S3Server(Program):
    """An S3 server with one bucket, in memory: what is stored ends with it."""

    def __init__(self, log: Path) -> None:
        port = free_port()
        super().__init__([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], log=log)
        self.url = "s3://demo/run"
        self.options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "demo", "secret": "demo"}

    def create_bucket(self) -> None:
        """Wait until the server answers, and create the bucket."""
        wait_for(self, f"{self.options['endpoint_url']}/moto-api/")
        httpx.put(f"{self.options['endpoint_url']}/demo").raise_for_status()


class HubServer(Program):
    """A Hugging Face Hub with one bucket, on this machine: what is stored ends with it."""

    def __init__(self, log: Path) -> None:
        super().__init__(
            [sys.executable, "-m", "tests.support.hub", "--bucket", "demo/bucket"],
            log=log,
            piped=True,
            owned=True,
        )
        assert self.process.stdout is not None
        self.endpoint = self.process.stdout.readline().strip()
        if not self.endpoint:
            self.process.wait()
            self.check_alive()
        self.url = "hf://buckets/demo/bucket/run"
        self.options = {
            "endpoint": self.endpoint,
            "token": "hf_test",
            # The Hub's S3 gateway, which alone can create an object only once.
            "gateway_url": f"{self.endpoint}/s3/demo",
            "gateway_key": "HFAKTEST",
            "gateway_secret": "gateway-secret",
        }

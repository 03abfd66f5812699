"""SeaweedFS's master, volume and filer servers and its S3 gateway, as one program on this machine."""

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from examples.processes import free_port

SECRET = "test-secret"
STARTED = "Start(ing)? (Seaweed )?S3 API Server"
"""What the program prints once its S3 gateway answers."""


@dataclass(frozen=True, slots=True)
class SeaweedFS:
    """A program that is to be run, and how its S3 gateway is reached.

    The key `owner` may do all, the key `test` may read, write and list.
    """

    command: list[str]
    endpoint_url: str


def seaweedfs(program: str, folder: Path) -> SeaweedFS:
    """Configure SeaweedFS with its files in a folder that exists; the ports are free now.

    Asked to end, it waits half a minute for requests: kill it.
    """
    # An administrator's requests would make a bucket that is missing.
    users = {"owner": ["Admin"], "test": ["Read", "Write", "List"]}
    identities = [
        {"name": name, "credentials": [{"accessKey": name, "secretKey": SECRET}], "actions": actions}
        for name, actions in users.items()
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    # Each server also listens on its port + 10000, for its others.
    master, volume, filer, gateway = _free_ports(4)
    command = [
        *(program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={folder}"),
        *(
            f"-master.port={master}",
            "-master.volumeSizeLimitMB=64",
            f"-volume.port={volume}",
            "-volume.max=50",
        ),
        *("-filer", f"-filer.port={filer}", f"-filer.localSocket={folder}/filer.sock"),
        *("-s3", f"-s3.port={gateway}", "-s3.ip.bind=127.0.0.1", f"-s3.config={folder}/s3.json"),
        *("-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    return SeaweedFS(command, f"http://127.0.0.1:{gateway}")


def _free_ports(count: int) -> list[int]:
    """Ports on which nothing listens, nor on those 10000 above."""
    found: list[int] = []
    while len(found) < count:
        port = free_port() - 10_000
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found

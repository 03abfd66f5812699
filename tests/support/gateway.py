"""A gateway in front of servers, over TLS or not; also a proxy, as it takes whole URLs too."""

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from itertools import cycle
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.http_server import Answer, Request, json_answer, passed_on, serving


@dataclass
class Gateway:
    """Forwards to a server, as it is told."""

    upstream: str | Iterator[str]
    """A server's URL, or that of each request."""
    needs: tuple[str, str] | None = None
    """A header, and its value. Requests without it are refused, and told what they sent."""
    moved_to: str | None = None
    """A URL to which everything is redirected."""
    says: tuple[int, str] | None = None
    """The status and the page of all answers."""
    url: str = ""
    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """The target of each request, and its headers."""

    def answer(self, request: Request) -> Answer:
        self.seen.append((request.target, dict(request.headers)))
        if self.moved_to is not None:
            return Answer(status=307, headers={"Location": f"{self.moved_to}?token=in-the-query"})
        if self.says is not None:
            return Answer(status=self.says[0], body=self.says[1].encode())
        if self.needs is not None and request.headers.get(self.needs[0]) != self.needs[1]:
            return json_answer({"you sent": dict(request.headers)}, 401)
        return passed_on(request, self.upstream if isinstance(self.upstream, str) else next(self.upstream))


@contextmanager
def forwarding(gateway: Gateway, *, tls: ssl.SSLContext | None = None) -> Iterator[Gateway]:
    """Serve a gateway on a free port."""
    with serving(gateway.answer, tls=tls, protocol="HTTP/1.0") as gateway.url:
        yield gateway


@contextmanager
def balanced(urls: Sequence[str]) -> Iterator[str]:
    """Balance servers: each request goes to the next. Yield the one URL at which they answer then."""
    with forwarding(Gateway(upstream=cycle(urls))) as gateway:
        yield gateway.url


@contextmanager
def tunnel(url: str, tls: ssl.SSLContext) -> Iterator[str]:
    """Yield the URL of a port that speaks TLS and passes all bytes on to a server without it."""
    target = urlsplit(url)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError), socket.create_connection((target.hostname, target.port)) as server:
                client = tls.wrap_socket(self.request, server_side=True)
                with client:
                    back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                    back.start()
                    _pump(client, server)
                    back.join()

    class Server(ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while received := source.recv(65_536):
            sink.sendall(received)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def certified(
    folder: Path, *, address: str = "127.0.0.1", ended: bool = False
) -> tuple[ssl.SSLContext, Path]:
    """Make a CA, and a certificate of it for an address; return what a server takes, and the CA's file."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a CA of our own")])
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a server")])
    ca_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = (
        _begun(ca_name, ca_name, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(ca_id, critical=False)
        .add_extension(_signs_certificates(), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    issued = (
        _begun(name, ca_name, key, ago=timedelta(days=2) if ended else timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(address))]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(ca_id), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    form = serialization.Encoding.PEM
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(private + issued.public_bytes(form))
    (folder / "ca.pem").write_bytes(ca.public_bytes(form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem")
    return context, folder / "ca.pem"


def _begun(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, ago: timedelta = timedelta(hours=1)
) -> x509.CertificateBuilder:
    begin = datetime.now(UTC) - ago
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + timedelta(days=1))
    )


def _signs_certificates() -> x509.KeyUsage:
    no = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "crl_sign",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(key_cert_sign=True, **no)

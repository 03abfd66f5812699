"""`patchstore sign`: sign versions that exist already."""

import os
from pathlib import Path
from typing import Annotated

import typer

from patchstore.cli import output
from patchstore.cli.options import Json, StorageOption, StoreUrl
from patchstore.cli.stores import head, header, open_with
from patchstore.signing import KeySigner, anchors, stored

PASSWORD = "PATCHSTORE_KEY_PASSWORD"  # noqa: S105 # nosec B105 # the name of a variable
"""Environment variable: of the private key."""


def sign(
    store: StoreUrl,
    *,
    key: Annotated[
        Path,
        typer.Option(
            "--key", metavar="PRIVATE_KEY", help=f"A private key in PEM; ${PASSWORD} is its password, if any."
        ),
    ],
    first: Annotated[int, typer.Option("--from", min=0, help="The first version to sign.")] = 0,
    last: Annotated[
        int | None, typer.Option("--to", min=0, help="The last one; the newest by default.")
    ] = None,
    with_anchors: Annotated[
        bool, typer.Option("--anchors", help="Also put model.sig beside the files of each anchor.")
    ] = False,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Sign versions that exist, without verifying their payloads: you vouch for their manifests."""
    signer = KeySigner(key, password=os.environ.get(PASSWORD))
    bucket = open_with(store, option)
    run, newest = header(bucket), head(bucket).version
    until = newest if last is None else last
    if until > newest or first > until:
        raise typer.BadParameter(f"versions are 0 to {newest}, so there is nothing from {first} to {until}")
    num_signed = num_anchors = 0
    with output.versions_progress("versions", shown=not as_json, total=until - first + 1) as advance:
        for version in range(first, until + 1):
            is_new = stored.sign_version(bucket, signer, run, version)
            is_anchor = with_anchors and anchors.sign_anchor(bucket, signer, run, version)
            num_signed, num_anchors = num_signed + is_new, num_anchors + is_anchor
            if as_json and (is_new or is_anchor):
                output.print_json(
                    {"version": version, "signed": is_new, "anchor_signed": is_anchor, "key": signer.name}
                )
            advance()
    if not as_json:
        beside = f", and {num_anchors} anchors" if with_anchors else ""
        output.print_line(
            f"{num_signed} of {until - first + 1} versions signed by the key {signer.name}{beside}; the "
            "others were signed before"
        )

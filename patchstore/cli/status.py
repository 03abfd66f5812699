"""`patchstore status`: a run, and what each server serves of it, in one screen."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from patchstore.bucket import history, manifest_json
from patchstore.cli import output
from patchstore.cli.follow import Adapter
from patchstore.cli.options import Json, ServerHeader, StorageOption, StoreUrl, open_with, server_headers
from patchstore.errors import DataError, NotFound, PatchstoreError, WrongParent
from patchstore.read.run import Run
from patchstore.read.versions import Version
from patchstore.support.printable import duration

_TIMEOUT_S = 60.0
"""vLLM examines its machine before it first says how it was started."""


def status(
    store: StoreUrl,
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="URL", help="A vLLM server to ask; repeatable."),
    ] = None,
    adapter: Adapter = None,
    server_header: ServerHeader = None,
    option: StorageOption = None,
    as_json: Json = False,
) -> None:
    """Show the newest version, its age, the way to it, and how far behind each server is."""
    headers = server_headers(server_header)
    urls = list(dict.fromkeys(server or ()))
    errors: list[PatchstoreError] = []
    with Run.open(open_with(store, option)) as run:
        newest = run.latest if run.newest() is not None else None
        found, way = _of_store(run, newest, errors)
        # One that does not answer keeps no other waiting.
        rows = history.read_many(lambda url: _of_server(run, newest, url, adapter, headers), urls)
    errors += [error for _, _, error in rows if error is not None]
    if as_json:
        for record in (found, *(record for record, _, _ in rows)):
            output.print_json(record)
    else:
        output.print_status(way, [shown for _, shown, _ in rows])
    for error in errors:
        output.print_error(error.kind, str(error))
    if errors:
        raise typer.Exit(output.exit_code(errors[0]))


def _of_store(run: Run, newest: Version | None, errors: list[PatchstoreError]) -> tuple[dict[str, Any], str]:
    """Return what is known of the run, for programs and for people."""
    record: dict[str, Any] = {"store": run.store.url, "run_id": run.header.run_id}
    begin = f"{run.store.url}: run {run.header.run_id}"
    if newest is None:
        return {**record, "version": None}, f"{begin} has no version yet"
    age_s = max(0.0, (datetime.now(UTC) - newest.time).total_seconds())
    record |= {"version": newest.number, "step": newest.step, "age_s": round(age_s, 3)}
    begin += f", version {newest.number}, step {newest.step}, {duration(age_s)} old"
    try:
        plan = run.plan(newest.number)
    except (DataError, NotFound, WrongParent) as exc:
        errors.append(exc)
        return record, f"{begin}; no way leads to it"
    assert plan.anchor is not None
    anchor, num_deltas = plan.anchor.version, len(plan.deltas)
    record |= {"anchor": anchor, "num_deltas": num_deltas, "bytes": plan.num_bytes}
    way = f"a new server reads anchor {anchor} and {num_deltas} deltas, {plan.num_bytes:,} bytes"
    return record, f"{begin}; {way}"


def _of_server(
    run: Run, newest: Version | None, url: str, adapter: str | None, headers: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str], PatchstoreError | None]:
    """Return what a server serves, for programs and for people, and why that is not known."""
    from patchstore.follow.adapter_server import AdapterServer
    from patchstore.follow.vllm_server import VllmServer

    record: dict[str, Any] = {"server": url, "serving": None, "behind": None, "behind_s": None}
    row = {"server": url, "serves": "-", "behind": "-", "what": ""}
    try:
        client = (
            VllmServer(url, timeout_s=_TIMEOUT_S, headers=headers)
            if adapter is None
            else AdapterServer(url, adapter, run.store, timeout_s=_TIMEOUT_S, headers=headers)
        )
        with client:
            found = client.status()
        record |= {"serving": found.serving, "run_id": found.run_id}
        what = []
        if found.serving is not None:
            row["serves"] = str(found.serving)
        if found.run_id not in {None, run.header.run_id}:
            what.append(f"of run {found.run_id}")
        elif found.serving is not None and newest is not None:
            # It may serve a version that came meanwhile.
            behind = max(0, newest.number - found.serving)
            behind_s = (newest.time - _created(run, found.serving)).total_seconds() if behind > 0 else 0.0
            record |= {"behind": behind, "behind_s": behind_s}
            row["behind"] = f"{behind} ({duration(behind_s)})" if behind else "0"
        is_so = {
            "parts of two versions": found.half_applied,
            "engines differ": found.engines_differ,
            "an update is under way": found.update_open or found.switch is not None,
        }
        what += [words for words, is_true in is_so.items() if is_true]
        what += [found.last_error] if found.last_error is not None else []
        if found.serving is None and found.run_id is None and not what:
            what.append("follows no store yet")
        row["what"], record["half_applied"] = "; ".join(what), found.half_applied
    except PatchstoreError as exc:
        record["error"] = {"kind": exc.kind, "message": str(exc)}
        return record, {**row, "what": exc.kind}, exc
    return record, row, None


def _created(run: Run, version: int) -> datetime:
    return manifest_json.time_of(run.manifest(version).created_at)

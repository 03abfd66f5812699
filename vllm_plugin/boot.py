"""A server that starts at a version: what `--load-format patchstore` means, and the settings it takes.

    vllm serve MODEL --load-format patchstore --model-loader-extra-config '{"store": URL, "version": "head"}'

The process that reads the command line decides which version that is, before it starts any other: `head` and
tags become a number there. `vllm_plugin.loader` loads that version in every rank.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from patchstore.bucket import digests
from patchstore.bucket.records import Payload, Plan
from patchstore.errors import UsageError
from patchstore.read.download import chunks, unfinished, write_file
from patchstore.read.host_cache import HostCache, holds, own_folder
from patchstore.read.run import Run
from patchstore.stores.base import Store
from patchstore.support import host
from vllm_plugin.opening import check_whole, reached, scratch_folder
from vllm_plugin.permission import check_store, keywords, required_keys

LOAD_FORMAT = "patchstore"
WHAT = "--model-loader-extra-config"
_CONFIG = "config.json"
_TYPES = {"store": str, "version": int | str, "storage_options": dict, "scratch": str, "cache_bytes": int}

# vLLM configures only loggers below its own name.
logger = init_logger("vllm.patchstore")


def settle(args: Any, create: Callable[..., Any], *more: Any, **options: Any) -> Any:
    """Decide what a server starts from, and call `EngineArgs.create_engine_config`, which this replaces.

    Where MODEL is the store itself, it becomes a folder with what the version's anchor has beside weights.

    Raises:
        UsageError: a setting, or a place that is not allowed here.
        As `Run.plan`: there is no such version, or it may not be used.
        StoreUnavailable: the store does not answer.
    """
    if args.load_format.lower() == LOAD_FORMAT:
        given = args.model_loader_extra_config
        with opened(given) as (run, _):
            version = number_of(run, given)
            logger.info("starting at version %d of run %s at %s", version, run.header.run_id, run.store.url)
            # No key may have signed it.
            run.manifest(version)
            if args.model.rstrip("/") == given["store"].rstrip("/"):
                args.served_model_name = args.served_model_name or args.model
                args.model = str(_config_folder(run, version, scratch_folder(given)))
        args.model_loader_extra_config = {**given, "version": version}
    return create(*more, **options)


@contextmanager
def opened(given: object) -> Iterator[tuple[Run, HostCache]]:
    """Open the run of a server's settings, and this host's cache, as `init_weight_transfer_engine` does."""
    known = keywords(WHAT, given, _TYPES, required={"store"})
    check_store(known["store"], known.get("storage_options", {}))
    store, cache = reached(known)
    with closing(store):
        run = Run.open(store, required_keys())
        check_whole(run)
        yield run, cache


def number_of(run: Run, given: Mapping[str, Any]) -> int:
    """Return the number of the version that the settings name: a number, a tag, or `head`, the default."""
    return run.named(given.get("version"))


def version_of(config: Any) -> int | None:
    """Return the version that a server with this `VllmConfig` started at; None if it started otherwise."""
    if config.load_config.load_format != LOAD_FORMAT:
        return None
    version = config.load_config.model_loader_extra_config.get("version")
    # Who makes a `VllmConfig` without `EngineArgs` may leave that to the ranks.
    return version if isinstance(version, int) else None


def _config_folder(run: Run, version: int, scratch: Path) -> Path:
    """Return a folder with the config, tokenizer and code of a version's anchor, verified. Its name says what
    it holds, so that versions with the same files share it.
    """

    def made(plan: Plan) -> Path:
        assert plan.anchor is not None and plan.anchor.anchor is not None
        files = {each.key.rpartition("/")[2]: each for each in plan.anchor.anchor.files}
        if _CONFIG not in files:
            raise UsageError(
                f"the run at {run.store.url} has no {_CONFIG}: serve a folder or a name that has one as "
                "MODEL, or publish with Publisher(..., files=)"
            )
        content = "".join(f"{name} {files[name].digest}\n" for name in sorted(files))
        folder = scratch / "configs" / digests.digest(content.encode()).partition(":")[2][:16]
        for each in (folder.parent, folder):
            own_folder(each)
        for name, wanted in files.items():
            if not _has(folder / name, wanted):
                _fetch(run.store, wanted, folder / name)
        return folder

    with host.asked(f"keeping a config in {scratch}"):
        return run.reach(version, made)


def _has(path: Path, wanted: Payload) -> bool:
    try:
        with path.open("rb") as file:
            return holds(file, wanted)
    except FileNotFoundError:
        return False


def _fetch(store: Store, wanted: Payload, path: Path) -> None:
    with unfinished(path, is_folder=False) as draft:
        write_file(draft, chunks(store, wanted))

"""What `--worker-extension-cls` mixes into vLLM's worker: methods for `/collective_rpc`.

All are prefixed `delta_`, since vLLM refuses an extension that hides an attribute of its worker.
Each rank answers for itself. A method that refuses raises here, and the rank answers
`{"error": "[kind] message"}`: as `vllm_plugin.ranks` says, several ranks that raise put vLLM's replies out of
step. So does every method where the engine is not the `delta` engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import vllm
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

import patchstore
from patchstore.bucket import manifest_json
from patchstore.errors import EnginesDiffer, PatchstoreError, UsageError
from vllm_plugin import adapter_slots
from vllm_plugin.core import NOT_LOADED
from vllm_plugin.engine import WORKERS, DeltaWeightTransferEngine
from vllm_plugin.live.derived import watch_loading
from vllm_plugin.live.update import Updater
from vllm_plugin.map.mapping import WeightMap, share
from vllm_plugin.ranks import Failure, RanksLost
from vllm_plugin.serving import keep_load_layout, leave_order_to_engine, watch
from vllm_plugin.waiting import RINGS_KEY

BACKEND = "delta"
_COMPARED = ("delta_status", "delta_open", "delta_prefetch", "delta_sums")
"""Methods whose answers `delta_expect` compares."""


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "delta"}'` known. Calling it again changes nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, DeltaWeightTransferEngine)


def adopt(worker: object) -> None:
    """Prepare a worker that is about to be constructed, and remember it for its engine."""
    WORKERS.add(worker)
    keep_load_layout()
    watch_loading()
    watch(
        worker,
        asleep=lambda level: _tell(worker, lambda engine: engine.sleeping(level)),
        awake=lambda: _tell(worker, lambda engine: engine.sleeping(None)),
        reloaded=lambda: _tell(worker, lambda engine: engine.reloaded()),
    )
    leave_order_to_engine(worker)


def _tell(worker: Any, news: Callable[[DeltaWeightTransferEngine], None]) -> None:
    engine = getattr(worker, "weight_transfer_engine", None)
    if isinstance(engine, DeltaWeightTransferEngine):
        news(engine)


P = ParamSpec("P")
T = TypeVar("T")


def _with_engine(
    method: Callable[Concatenate["DeltaWorkerExtension", P], T],
) -> Callable[Concatenate["DeltaWorkerExtension", P], T | dict[str, str]]:
    """Answer with what the method refuses. Where another weight transfer engine was started, or none, refuse
    without a call.
    """

    @wraps(method)
    def answer(worker: "DeltaWorkerExtension", /, *args: P.args, **kwargs: P.kwargs) -> T | dict[str, str]:
        engine = getattr(worker, "weight_transfer_engine", None)
        try:
            if not isinstance(engine, DeltaWeightTransferEngine):
                raise UsageError(
                    f"the weight transfer engine is {type(engine).__name__}; start vllm with "
                    '--weight-transfer-config \'{"backend": "delta"}\''
                )
            return method(worker, *args, **kwargs)
        except PatchstoreError as exc:
            return {"error": f"[{exc.kind}] {exc}"}

    return answer


class DeltaWorkerExtension:
    """Mixed into the worker's bases before it is constructed."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        worker = super().__new__(cls)
        adopt(worker)
        return worker

    @_with_engine
    def delta_status(self) -> dict[str, Any]:
        """Return what this rank serves, as JSON values; needs no open store.

        Keys: `rank`, `release` (of patchstore), `vllm`, `initialised`, `asleep`, `draft` (None without a
        speculative draft model, `followed` if it is updated together with the model, `separate` if its
        checkpoint is another, so that it stays as it is), `form` (`plain`, `fp8-block` or `fp8-channel`, as
        the checkpoint that was loaded; `calculated` where vLLM quantized that), `required_keys` (names of the
        public keys that it was started to require, in the order of the alphabet), `store`, `run_id`,
        `serving` (version or None), its `parent`, `step` and `state_digest`, `staged` (version or None),
        `update_open`, `switch` (see `delta_switch`), `half_applied`, `last_error` (None, or `rank`,
        `kind`, `message`), `timings` (seconds, of the last update), `staging_bytes` (of the device's memory,
        that staging took at most the last time), `map` (None, or see `_map`). vLLM's engine core adds
        `engine` (see `delta_engine`), `drivers` (others that keep this server at a version, each with `id`
        and `wants`), `stale` (None, or which cache could not be emptied), and `keeps` (None, or which cache
        no update can empty).
        """
        engine = self._delta_engine()
        updater = engine.updater
        held = staged = None
        if updater is not None:
            held = updater.held
            staged = None if updater.staged is None else updater.staged.manifest
        return {
            "rank": engine.rank,
            "release": patchstore.__version__,
            "vllm": vllm.__version__,
            "initialised": engine.is_open,
            "asleep": engine.is_asleep,
            "draft": engine.draft,
            "form": engine.form,
            "required_keys": [] if engine.required is None else engine.required.names,
            "store": None if updater is None else updater.run.store.url,
            "run_id": None if updater is None else updater.run.header.run_id,
            "serving": None if held is None else held.version,
            "parent": None if held is None else held.parent,
            "step": None if held is None else held.step,
            "state_digest": None if held is None else held.state.total,
            "staged": None if staged is None else staged.version,
            "update_open": engine.update_open,
            "switch": engine.switch,
            "half_applied": updater is not None and updater.half_applied,
            "last_error": None if engine.last_error is None else asdict(engine.last_error),
            "timings": {} if updater is None else updater.timings,
            "staging_bytes": engine.live.staging_bytes,
            "map": None if updater is None else _map(updater),
        }

    @_with_engine
    def delta_open(self, init_info: Mapping[str, Any]) -> dict[str, bool]:
        """Begin to open a store while generation goes on; call again with the same until `is_done`.

        `init_weight_transfer_engine` with the same `init_info` is quick then. It also says what went wrong,
        if anything did: this never raises.
        """
        return {"is_done": self._delta_engine().open_ahead(init_info)}

    @_with_engine
    def delta_prefetch(
        self, version: int, run_id: str | None = None, *, bell: str | None = None
    ) -> dict[str, Any]:
        """Begin to fetch and verify a version while generation goes on; call again until `is_done`.

        With the keyword `wait_s` vLLM's engine core answers when it is done, and at the latest after so many
        seconds, up to 60; where that cannot be, at once. Generation and other calls go on meanwhile. The core
        hands ranks a `bell` for that; see `vllm_plugin.waiting`.

        `update_weights` with that version is quick then. It also says what went wrong, if anything did: this
        never raises, since an exception in one rank would confuse vLLM's replies.

        With `run_id` it begins only if the open store holds this run, and nothing else is being staged;
        without it, what another driver had begun is dropped. Returns `is_done`, and all keys of
        `delta_status`. Of what is no version's number it refuses, and what was begun before goes on.
        """
        engine = self._delta_engine()
        is_done = engine.prefetch(version, run_id)
        rings = {RINGS_KEY: engine.rings(version, bell)} if bell is not None else {}
        return self.delta_status() | {"is_done": is_done} | rings

    @_with_engine
    def delta_switch(self, switch: str | None) -> None:
        """Keep a driver's mark that it is switching versions, or None when it is done.

        A driver that is killed while it has generation paused cannot tell its successor; the server can.
        Refuses a mark that is no text.
        """
        if not isinstance(switch, str | None):
            raise UsageError(f"a driver's mark must be text or null, not {type(switch).__name__}")
        self._delta_engine().switch = switch

    @_with_engine
    def delta_drop(self) -> None:
        """Close an update that was started, and drop what it staged. The weights stay."""
        self._delta_engine().drop_update()

    @_with_engine
    def delta_engine(self) -> dict[str, Any]:
        """Say which engine this is: `engine`, an id that each start of the engine core makes anew, and
        `salt`, of later requests. Refuses where the core lacks the plugin.

        vLLM's engine core answers for its workers; see `vllm_plugin.core`.
        """
        raise UsageError(NOT_LOADED)

    @_with_engine
    def delta_prove(self, update_info: Mapping[str, Any]) -> dict[str, str]:
        """Begin an update and verify its version, as `/start_weight_update` and `/update_weights` do.

        Without `switch` in `update_info`, the mark is `stay-paused` if generation is paused now, else
        `resume`. The engine core answers, as to `delta_engine`: with the `switch` that ranks keep.
        """
        raise UsageError(NOT_LOADED)

    @_with_engine
    def delta_pause(self) -> dict[str, str]:
        """Pause generation as `/pause?mode=keep&clear_cache=false` does, without the 20 ms that vLLM's front
        waits. The engine core answers, as to `delta_engine`.
        """
        raise UsageError(NOT_LOADED)

    @_with_engine
    def delta_resume(self) -> dict[str, str]:
        """Let generation go on, as `/resume` does, and remove a driver's mark. The engine core answers, as to
        `delta_engine`.
        """
        raise UsageError(NOT_LOADED)

    @_with_engine
    def delta_sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """Digest a part of the weights that this rank serves, for comparison with a manifest.

        Generation waits meanwhile, so a caller that wants all of them asks for one part after the other.

        Args:
            first: where to begin, in the schema's tensors.
            num_elements: stop with the tensor that brings this rank's part to so many.

        Returns:
            `serving`, `num_applied` (grows with every update: parts with different ones do not belong
            together), `next` (where to go on, None at the end), and `sums`: per name
            `[slice, 32 hex digits]` for each slice that this rank holds. Equal slices are equal lists. Names
            that vLLM calculates from are in `computed`, those that no rank holds in full in `unverified`;
            neither has sums.
        """
        return self._delta_engine().sums(first, num_elements)

    @_with_engine
    def delta_fits(self, header: str) -> dict[str, Any]:
        """Say whether the model's loader takes the tensors of a run, by tracing it while generation waits.

        `header` is the text of its `store.json`. Opens and changes nothing, and never raises: other ranks
        would be misunderstood. A model that vLLM quantized is not traced, and takes any names.

        Returns `failure`: None, or why the run would be refused here: `rank`, `kind`, `message`; and where it
        would not, `widened_apart`: as in the status, of this rank.
        """
        engine = self._delta_engine()
        try:
            schema = manifest_json.header_from_json(header.encode()).schema
            traced = engine.live.models.trace(schema)
            # What this rank serves in more bits does not depend on others.
            apart = WeightMap(schema, traced, [share(traced)]).widened_apart
        except Exception as exc:  # noqa: BLE001 - whatever a model's loader raises
            return {"failure": asdict(Failure.of(engine.rank, exc))}
        return {"failure": None, "widened_apart": apart}

    @_with_engine
    def delta_expect(self, method: str, args: Sequence[Any], expected: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless this engine answers as another one did. Of several data-parallel engines vLLM returns
        the first one's answers only, but the error of any.

        Each rank calls the method with `args`, and its answer must hold what is `expected` of it, and may
        hold more. Raises for all ranks as `Ranks.fail`; begins with `[engines-differ]`, or with the kind of
        what went wrong instead.
        """
        engine = self._delta_engine()
        rank, ranks = engine.rank, engine.ranks
        failure = None
        try:
            if method not in _COMPARED:
                raise UsageError(f"only the answers to {', '.join(_COMPARED)} are compared")
            # Past `_with_engine`, so that what is refused keeps its kind.
            found = getattr(type(self), method).__wrapped__(self, *args)
            differing = [
                f"{key} is {found[key]!r:.80}, not {value!r:.80}"
                for key, value in expected[rank].items()
                if found[key] != value
            ]
            if differing:
                failure = Failure(rank=rank, kind=EnginesDiffer.kind, message="; ".join(differing))
        except Exception as exc:  # noqa: BLE001  (an exception in one rank would confuse vLLM's replies)
            failure = Failure.of(rank, exc)
        try:
            failures = [each for each in ranks.gather(failure) if each is not None]
        except RanksLost as lost:
            failures = lost.failures
        if failures:
            ranks.fail(failures)

    @_with_engine
    def delta_fingerprint(self) -> dict[str, str]:
        """Digest the bits of each live parameter and buffer of this rank, and of a followed draft model's,
        which are called `draft.` and their name. Reads all of them.
        """
        return self._delta_engine().fingerprint()

    def delta_adapter(self, lora_int_id: int, path: str) -> dict[str, Any]:
        """Say whether this rank computes with what an adapter's folder has, bit for bit; needs no engine.

        `/v1/models` states both arguments of each version: `lora_int_id`, and the folder as `root`.
        Generation waits meanwhile. Returns as `adapter_slots.compare`.
        """
        try:
            return adapter_slots.compare(self, lora_int_id, path)
        except Exception as exc:  # noqa: BLE001  (an exception in one rank would confuse vLLM's replies)
            failure = Failure.of(getattr(self, "rank", 0), exc)
            return {"error": f"[{failure.kind}] {failure.message}"}

    def _delta_engine(self) -> DeltaWeightTransferEngine:
        engine = getattr(self, "weight_transfer_engine", None)
        assert isinstance(engine, DeltaWeightTransferEngine)
        return engine


def _map(updater: Updater) -> dict[str, Any]:
    """Summarise where weights go: number of `runtimes` (pieces of memory), of names that are `mapped`,
    `computed` (loaded in full by vLLM's loader), `partial` (held in part), `absent` (of no use here) and
    `wider` (served in more bits than the run stores), each with some of those. `widened_apart` lists
    what is wider where most is not.
    """
    mapped = updater.weights.map
    kinds = {
        "computed": mapped.computed,
        "partial": mapped.partial,
        "absent": mapped.absent,
        "wider": mapped.wider,
    }
    return {
        "runtimes": len(mapped.runtimes),
        "mapped": len(mapped.proved),
        **{f"num_{kind}": len(names) for kind, names in kinds.items()},
        **{kind: sorted(names)[:20] for kind, names in kinds.items()},
        "widened_apart": mapped.widened_apart,
    }

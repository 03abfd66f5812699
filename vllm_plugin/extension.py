"""What `--worker-extension-cls` mixes into vLLM's worker: methods for `/collective_rpc`.

All are prefixed `delta_`, since vLLM refuses an extension that hides an attribute of its worker.
Each rank answers for itself, and where the engine is not the `delta` engine answers `{"error": message}` to
everything: as `vllm_plugin.ranks` says, several ranks that raise put vLLM's replies out of step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import vllm

import patchstore
from patchstore.errors import EnginesDiffer
from patchstore.format import manifest_json
from patchstore.format.dtypes import alike
from vllm_plugin.engine import DeltaWeightTransferEngine
from vllm_plugin.prefixes import NOT_LOADED
from vllm_plugin.ranks import Failure, describe, gather, is_last
from vllm_plugin.registration import adopt
from vllm_plugin.serving import groups
from vllm_plugin.update import Updater

P = ParamSpec("P")
T = TypeVar("T")


def _with_engine(
    method: Callable[Concatenate["DeltaWorkerExtension", P], T],
) -> Callable[Concatenate["DeltaWorkerExtension", P], T | dict[str, str]]:
    """Answer what is wrong, and call nothing, where another weight transfer engine was started, or none."""

    @wraps(method)
    def answer(worker: "DeltaWorkerExtension", /, *args: P.args, **kwargs: P.kwargs) -> T | dict[str, str]:
        engine = getattr(worker, "weight_transfer_engine", None)
        if isinstance(engine, DeltaWeightTransferEngine):
            return method(worker, *args, **kwargs)
        return {
            "error": f"the weight transfer engine is {type(engine).__name__}; start vllm with "
            '--weight-transfer-config \'{"backend": "delta"}\''
        }

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
        the checkpoint that was loaded; `calculated` where vLLM quantised that), `required_keys` (names of the
        public keys that it was started to require, in the order of the alphabet), `store`, `run_id`, `held`
        (version or None), `parent`, `step` and `state_digest` (of the held version), `staged` (version or
        None), `update_open`, `switch` (see `delta_switch`), `half_applied`, `last_error` (None, or `rank`,
        `kind`, `message`), `timings` (seconds, of the last update), `staging_bytes` (of the device's memory,
        that staging took at most the last time), `map` (None, or see `_map`).
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
            "store": None if updater is None else updater.store.url,
            "run_id": None if updater is None else updater.header.run_id,
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
    def delta_prefetch(self, version: int, run_id: str | None = None) -> dict[str, Any]:
        """Begin to fetch and verify a version while generation goes on; call again until `is_done`.

        `update_weights` with that version is quick then. It also says what went wrong, if anything did:
        this never raises, since an exception in one rank would confuse vLLM's replies.

        Args:
            run_id: begin only if the open store holds this run, and nothing else is being staged. Without it
                what another driver had begun is dropped.

        Returns:
            `is_done`, and all keys of `delta_status`.
        """
        is_done = self._delta_engine().prefetch(version, run_id)
        return self.delta_status() | {"is_done": is_done}

    @_with_engine
    def delta_switch(self, switch: str | None) -> None:
        """Keep a driver's mark that it is switching versions, or None when it is done.

        A driver that is killed while it has generation paused cannot tell its successor; the server can.

        Raises:
            TypeError: the mark is no text; in all ranks.
        """
        if not isinstance(switch, str | None):
            raise TypeError(f"a driver's mark must be text or null, not {type(switch).__name__}")
        self._delta_engine().switch = switch

    @_with_engine
    def delta_prefixes(self, is_new: bool = False) -> dict[str, str]:
        """Say why later requests cannot be kept from keys and values that older weights computed.

        With patchstore's plugin vLLM's engine core answers instead, and asks no worker: `salt`, or `error` if
        it cannot either. With `is_new` it renews the salt. See `vllm_plugin.prefixes`.
        """
        return {"error": NOT_LOADED}

    @_with_engine
    def delta_pause(self, clear_cache: bool = False) -> dict[str, str]:
        """As `delta_prefixes`: the engine core pauses instead, as `/pause?mode=keep` does.

        Args:
            clear_cache: as vLLM's; refused of models that take images or sound.
        """
        return {"error": NOT_LOADED}

    @_with_engine
    def delta_sums(self, first: int, num_elements: int) -> dict[str, Any]:
        """Digest a part of the weights that this rank serves, for comparison with a manifest.

        Generation waits meanwhile, so a caller that wants all of them asks for one part after the other.

        Args:
            first: where to begin, in the schema's tensors.
            num_elements: stop with the tensor that brings this rank's part to so many.

        Returns:
            `held`, `num_applied` (grows with every update: parts with different ones do not belong together),
            `next` (where to go on, None at the end), and `sums`: per name, `[slice, 32 hex digits]` for each
            slice that this rank holds. Equal slices are equal lists. Names that vLLM calculates from are in
            `computed`, those that no rank holds in full in `unverified`; neither has sums.
        """
        return self._delta_engine().sums(first, num_elements)

    @_with_engine
    def delta_fits(self, header: str) -> dict[str, Any]:
        """Say whether the model's loader takes a run's tensors, by tracing it while generation waits.

        Opens and changes nothing, and never raises: other ranks would be misunderstood. A model that vLLM
        quantised is not traced, and takes any names.

        Args:
            header: the text of the run's `store.json`.

        Returns:
            `failure`: None, or why the run would be refused here: `rank`, `kind`, `message`.
        """
        engine = self._delta_engine()
        try:
            engine.live.trace(manifest_json.header_from_json(header.encode()).schema)
        except Exception as exc:  # noqa: BLE001 - whatever a model's loader raises
            return {"failure": asdict(Failure.of(engine.rank, exc))}
        return {"failure": None}

    @_with_engine
    def delta_expect(self, method: str, args: Sequence[Any], expected: Sequence[Mapping[str, Any]]) -> None:
        """Raise unless this engine answers as another one did. Of several data-parallel engines vLLM returns
        the first one's answers only, but the error of any.

        Args:
            method: `delta_status`, `delta_open`, `delta_prefetch` or `delta_sums`; each rank calls it with
                `args`.
            expected: for each rank, what its answer must hold; the answer may hold more.

        Raises:
            RuntimeError: it does not; in the last rank, for all of them. Begins with `[engines-differ]`, or
                with the kind of what went wrong instead.
        """
        rank = self._delta_engine().rank
        failure = None
        try:
            answers: dict[str, Callable[..., dict[str, Any]]] = {
                "delta_status": self.delta_status,
                "delta_open": self.delta_open,
                "delta_prefetch": self.delta_prefetch,
                "delta_sums": self.delta_sums,
            }
            found = answers[method](*args)
            differing = [
                f"{key} is {found[key]!r:.80}, not {value!r:.80}"
                for key, value in expected[rank].items()
                if found[key] != value
            ]
            if differing:
                failure = Failure(rank=rank, kind=EnginesDiffer.kind, message="; ".join(differing))
        except Exception as exc:  # noqa: BLE001  (an exception in one rank would confuse vLLM's replies)
            failure = Failure.of(rank, exc)
        failures = [each for each in gather(groups(), failure) if each is not None]
        if failures and is_last(groups()):
            raise RuntimeError(describe(failures))

    @_with_engine
    def delta_fingerprint(self) -> dict[str, str]:
        """Digest the bits of each live parameter and buffer of this rank, and of a followed draft model's,
        which are called `draft.` and their name. Reads all of them.
        """
        return self._delta_engine().fingerprint()

    def _delta_engine(self) -> DeltaWeightTransferEngine:
        engine = getattr(self, "weight_transfer_engine", None)
        assert isinstance(engine, DeltaWeightTransferEngine)
        return engine


def _map(updater: Updater) -> dict[str, Any]:
    """Summarise where weights go: number of `runtimes` (pieces of memory), of names that are `mapped`,
    `computed` (loaded in full by vLLM's loader), `partial` (held in part), `absent` (of no use here) and
    `wider` (served in more bits than the run stores), each with some of those, and whether the map
    `is_proved` by weights that vLLM itself had loaded. `widened_apart` lists what is wider where most is not.
    """
    mapped = updater.map
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
        "widened_apart": alike(mapped.wider) if mapped.is_widened_apart else "",
        "is_proved": updater.weights.is_map_proved,
    }

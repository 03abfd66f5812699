"""Every case of `python -m benchmarks`, and the test that must pass before its figures mean anything."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import (
    adapters,
    anchor_memory,
    anchors,
    apply,
    catch_up,
    chaos,
    context,
    encodings,
    fleet,
    fuzz_server,
    growth,
    history,
    join,
    kernels,
    mirror,
    native,
    publish,
    quantized,
    rank_bytes,
    rates,
    replay,
    replicate,
    retention,
    serving,
    shards,
    soak,
    staging_memory,
    stores,
    transports,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case; its code is `benchmarks/cases/NAME.py`."""

    name: str
    about: str
    gate: str
    """The test that proves what is measured."""
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Iterator[dict[str, Any]]]


CASES = (
    Case(
        name="adapters",
        about="From a step of an adapter to an answer of it, beside `save_pretrained` and a load by hand.",
        gate="tests/serve/test_adapter_server.py",
        arguments=adapters.arguments,
        run=adapters.run,
    ),
    Case(
        name="anchor-memory",
        about="Memory of each side while a whole model passes through each kind of store.",
        gate="tests/read/test_replay.py",
        arguments=anchor_memory.arguments,
        run=anchor_memory.run,
    ),
    Case(
        name="anchors",
        about="For how long `publish_patch` blocks around anchors, its own and those of a process beside it.",
        gate="tests/publish/test_compact_beside.py",
        arguments=anchors.arguments,
        run=anchors.run,
    ),
    Case(
        name="apply",
        about="Time to bring a served model to the next version, beside vLLM's own loaders.",
        gate="tests/vllm_plugin/update",
        arguments=apply.arguments,
        run=apply.run,
    ),
    Case(
        name="catch-up",
        about="What a reader needs that is many versions behind, with and without `patchstore compact`.",
        gate="tests/compact/test_compact.py",
        arguments=catch_up.arguments,
        run=catch_up.run,
    ),
    Case(
        name="chaos",
        about="Kill trainer, server and `patchstore follow` at any moment, and prove what is left.",
        gate="tests/test_chaos.py",
        arguments=chaos.arguments,
        run=chaos.run,
    ),
    Case(
        name="context",
        about="Kernels of the encoding `context`: a version coded and decoded, whole and a rank's part.",
        gate="tests/kernels/test_context.py",
        arguments=context.arguments,
        run=context.run,
    ),
    Case(
        name="encodings",
        about="Payload bytes per changed element on a recorded trace of optimiser steps.",
        gate="tests/encodings",
        arguments=encodings.arguments,
        run=encodings.run,
    ),
    Case(
        name="fleet",
        about="A rolling update of 100 simulated servers, some slow, failing, restarting: how late each is.",
        gate="tests/serve/test_rolling_update.py",
        arguments=fleet.arguments,
        run=fleet.run,
    ),
    Case(
        name="fuzz-server",
        about="Calls at random to a server of two ranks, and a proof of what it holds after each burst.",
        gate="tests/vllm_plugin/test_two_ranks.py",
        arguments=fuzz_server.arguments,
        run=fuzz_server.run,
    ),
    Case(
        name="growth",
        about="How the host's work grows with the number of tensors, up to the 91,000 of DeepSeek-V3.",
        gate="tests/encodings/test_index.py",
        arguments=growth.arguments,
        run=growth.run,
    ),
    Case(
        name="history",
        about="A run of many small tensors with a long history: log, resuming and publishing.",
        gate="tests/format/test_history.py",
        arguments=history.arguments,
        run=history.run,
    ),
    Case(
        name="join",
        about="A fresh `vllm serve` joins a run: how long it reads, and how long generation waits.",
        gate="tests/vllm_plugin/update/test_proved_map.py",
        arguments=join.arguments,
        run=join.run,
    ),
    Case(
        name="kernels",
        about="Kernels of a publication and of an update, beside floors of the same GPU and plain torch.",
        gate="tests/kernels/test_compare.py",
        arguments=kernels.arguments,
        run=kernels.run,
    ),
    Case(
        name="mirror",
        about="From a new version to a folder that has it, and what is fetched for that.",
        gate="tests/mirror/test_mirror.py",
        arguments=mirror.arguments,
        run=mirror.run,
    ),
    Case(
        name="native",
        about="vLLM's own weight transfers beside patchstore: the same server, the same changes.",
        gate="tests/vllm_plugin/test_server.py",
        arguments=native.arguments,
        run=native.run,
    ),
    Case(
        name="publish",
        about="How long `publish_patch` blocks, with anchors between the deltas, in bf16 and in FP8.",
        gate="tests/publish",
        arguments=publish.arguments,
        run=publish.run,
    ),
    Case(
        name="quantized",
        about="Publish the same steps in bf16 and in FP8, encoded in `context`, and count the bytes.",
        gate="tests/publish/test_quantized.py",
        arguments=quantized.arguments,
        run=quantized.run,
    ),
    Case(
        name="rank-bytes",
        about="Bytes per change of what each of many processes writes, beside those of one.",
        gate="tests/publish/group/test_layouts.py",
        arguments=rank_bytes.arguments,
        run=rank_bytes.run,
    ),
    Case(
        name="rates",
        about="What a step of AdamW changes at each learning rate, and the bytes of its version.",
        gate="tests/read/test_replay.py",
        arguments=rates.arguments,
        run=rates.run,
    ),
    Case(
        name="replay",
        about="Peak memory and time of rebuilding a version, for checkpoints of growing size.",
        gate="tests/read/test_replay.py",
        arguments=replay.arguments,
        run=replay.run,
    ),
    Case(
        name="replicate",
        about="How late a replica is over lines of several lengths, and what it asks for.",
        gate="tests/replicate/test_replicator.py",
        arguments=replicate.arguments,
        run=replicate.run,
    ),
    Case(
        name="retention",
        about="What a bucket takes from day to day, under several policies of retention.",
        gate="tests/retention/test_added_anchors.py",
        arguments=retention.arguments,
        run=retention.run,
    ),
    Case(
        name="serving",
        about="From the optimiser to an answer of the new weights, and how late tokens are around an update.",
        gate="tests/vllm_plugin/test_server.py",
        arguments=serving.arguments,
        run=serving.run,
    ),
    Case(
        name="shards",
        about="A trainer sharded over several ranks: each publishes its part, beside a gather.",
        gate="tests/publish/group/test_layouts.py",
        arguments=shards.arguments,
        run=shards.run,
    ),
    Case(
        name="soak",
        about="Thousands of versions while everything is killed and the store fails.",
        gate="tests/test_histories.py",
        arguments=soak.arguments,
        run=soak.run,
    ),
    Case(
        name="staging-memory",
        about="What staging takes of a GPU's memory, beside a server that took most of it.",
        gate="tests/vllm_plugin/test_device.py",
        arguments=staging_memory.arguments,
        run=staging_memory.run,
    ),
    Case(
        name="stores",
        about="Moving large and small objects through each client of S3, beside a folder.",
        gate="tests/stores/test_s3.py",
        arguments=stores.arguments,
        run=stores.run,
    ),
    Case(
        name="transports",
        about="From publish to served through each kind of store, part by part.",
        gate="tests/apply/test_replica.py",
        arguments=transports.arguments,
        run=transports.run,
    ),
)

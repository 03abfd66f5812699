"""Ranks publish together: every version is what the whole model was, in every layout."""

import os
import warnings
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from patchstore import Publisher, Replica, as_saved
from patchstore.bucket import history, notes
from patchstore.errors import PatchstoreError, Unsigned
from patchstore.publish import snapshot
from patchstore.quantization import FORMS
from patchstore.stores import layout, opened
from patchstore.stores.folder import FolderStore
from tests.support import saved_models, tied_models
from tests.support.interpreted import kernels
from tests.support.keys import key_pair
from tests.support.model_bits import Bits, Versions, bits_of, check, read
from tests.support.ranks import Published, Ranks, RanksOf

# Ranks wait for each other, and a busy machine is slow.
pytestmark = pytest.mark.timeout(600)


ROWS, COLUMNS, NORM = "a.up_proj.weight", "a.down_proj.weight", "a.norm.weight"
PLACEMENTS = {ROWS: Shard(0), COLUMNS: Shard(1), NORM: Replicate()}


def matrices(step: int) -> dict[str, torch.Tensor]:
    """The model at a step, the same on all ranks."""
    random = torch.Generator().manual_seed(step)
    return {
        ROWS: torch.randn(300, 256, generator=random).to(torch.bfloat16),
        COLUMNS: torch.randn(140, 500, generator=random).to(torch.bfloat16),
        NORM: torch.ones(7, dtype=torch.bfloat16),
    }


def _load(tensors: dict[str, DTensor], step: int, mesh: Any) -> None:
    for name, given in matrices(step).items():
        tensors[name].to_local().copy_(distribute_tensor(given, mesh, [PLACEMENTS[name]]).to_local())


def rounded(step: int, form: str) -> Bits:
    """Return what servers have of the model at a step."""
    found = matrices(step)
    for name in (ROWS, COLUMNS):
        found[name], found[FORMS[form].scale_name(name)] = FORMS[form].quantize(found[name])
    return bits_of(found, None)


def publish_rounded(rank: int, url: str, form: str, **options: Any) -> Versions:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: distribute_tensor(each, mesh, [PLACEMENTS[name]]) for name, each in matrices(0).items()}
    versions = []
    with Publisher(url, tensors, quantization=form, rank_timeout_s=120, **options) as publisher:
        for step in range(3):
            _load(tensors, step, mesh)
            versions.append((publisher.publish_patch(step).result().version, rounded(step, form)))
    return versions


def publish_rounded_by_kernels(rank: int, url: str, form: str) -> Versions:
    kernels("patchstore.publish.snapshot_gpu")
    with ExitStack() as patched:
        patched.enter_context(patch.object(snapshot, "have_kernels", lambda devices: True))
        for name in ("compare", "index_encode"):
            # Larger ones take minutes, where they are interpreted.
            patched.enter_context(patch.object(kernels(f"patchstore.kernels.{name}"), "BLOCK", 1024))
        return publish_rounded(rank, url, form, encoding="gap")


def one_is_not_finite(rank: int, url: str) -> tuple[str, str, int]:
    """Return what each rank hears of a NaN on rank 1, and the version that comes next."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: distribute_tensor(each, mesh, [PLACEMENTS[name]]) for name, each in matrices(0).items()}
    with Publisher(url, tensors, quantization="fp8-block", rank_timeout_s=120) as publisher:
        publisher.publish_patch(0).result()
        if rank == 1:
            tensors[ROWS].to_local()[50, 3] = float("nan")
        kind = message = ""
        try:
            publisher.publish_patch(1).result()
        except PatchstoreError as exc:
            kind, message = exc.kind, str(exc)
        _load(tensors, 2, mesh)
        dist.barrier()
        while True:
            try:
                return kind, message, publisher.publish_patch(2).result().version
            except PatchstoreError:
                # What was not told by the call before is told now.
                continue


def publish_saved(rank: int, url: str, folder: str, kinds: list[str], tied: bool) -> Versions:
    """Publish models that FSDP2 shards, each to a store of its own.

    Return what was saved of each before; of models with tied weights all tensors.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    found = []
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = (tied_models if tied else saved_models).build(kind)
            if rank == 0:
                model.save_pretrained(Path(folder) / kind)
            before = bits_of(model.state_dict())
            dist.barrier()
            for layer in () if tied else model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        with Publisher(f"{url}/{kind}", as_saved(model), rank_timeout_s=60) as publisher:
            version = publisher.publish_patch(0).result().version
        if not tied:
            saved = load_file(f"{folder}/{kind}/model.safetensors")
            # A tied head is not in the file; the run knows that it is tied.
            saved.setdefault("lm_head.weight", saved["model.embed_tokens.weight"])
            before = bits_of(saved)
        found.append((version, before))
    return found


def publish_masters(rank: int, url: str, folder: str) -> Versions:
    """Publish a model in float32 that FSDP2 shards; the first rank alone has the base checkpoint.

    Returns:
        The version, and the model in the dtypes of that checkpoint.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    base = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = saved_models.trained("DeepseekV3")
        if rank == 0:
            base, _ = saved_models.checkpoint(model, Path(folder))
            masters = load_file(f"{folder}/float32/model.safetensors")
            wide = ("e_score_correction_bias", "mlp.gate.weight")
            saved = {n: each if n.endswith(wide) else each.bfloat16() for n, each in masters.items()}
            save_file(saved, base / "model.safetensors")
        dist.barrier()
        expected = load_file(f"{folder}/base/model.safetensors")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    with Publisher(url, model, files=base, rank_timeout_s=60) as publisher:
        version = publisher.publish_patch(0).result().version
    return [(version, bits_of(expected, None))]


@pytest.mark.sample(7)
@pytest.mark.parametrize("encoding", ["gap", "context"])
@pytest.mark.parametrize(
    ("make", "num", "world"),
    [
        (jobs.tied, 3, False),
        (jobs.fsdp2, 2, False),
        (jobs.fsdp2, 3, False),
        (jobs.fsdp2, 4, False),
        (jobs.hsdp, 4, False),
        (jobs.fsdp2_and_tp, 4, False),
        (jobs.ddp, 2, True),
        (jobs.fsdp2, 3, True),
    ],
)
def test_each_version_has_the_bits_of_the_full_state_dict(
    published: Published, make: Any, num: int, world: bool, encoding: str
) -> None:
    options = {"anchor_every": 3, "encoding": encoding}
    manifests = published(num, jobs.train_and_publish, make, 5, options, world)
    assert [manifest.kind for manifest in manifests] == ["anchor", "delta", "delta", "anchor", "delta"]
    assert all(manifest.delta is not None for manifest in manifests[1:])


OTHER = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("num", "job", "argument"),
    [
        (2, jobs.experts, {"encoding": "gap", "anchor_every": 2}),
        pytest.param(2, jobs.experts, {"encoding": "context", "anchor_every": 2}, marks=OTHER),
        pytest.param(4, jobs.experts, {"encoding": "gap", "anchor_every": 2}, marks=OTHER),
        (4, jobs.experts, {"encoding": "context", "anchor_every": 2}),
        (4, jobs.strided, 7),
        pytest.param(4, jobs.strided, 8, marks=OTHER),
        pytest.param(4, jobs.strided, 5, marks=OTHER),
        (2, jobs.flat_ranges, {"anchor_every": 2}),
        (3, jobs.flat_ranges, {"anchor_every": 2}),
        (2, jobs.fused, {"anchor_every": 2}),
        (3, jobs.fused, {"anchor_every": 2}),
        # Blocks that lie on several ranks.
        (3, publish_rounded, "fp8-block"),
        (2, publish_rounded, "fp8-channel"),
        pytest.param(4, publish_rounded, "fp8-block", marks=OTHER),
    ],
)
def test_each_version_has_the_bits_of_all_ranks(
    published: Published, num: int, job: Any, argument: Any
) -> None:
    published(num, job, argument)


@pytest.mark.parametrize(("num", "form"), [(3, "fp8-block"), (2, "fp8-channel")])
def test_kernels_round_parts_as_the_whole(url: str, num: int, form: str) -> None:
    # In ranks of their own: those of other tests may have kernels that are not interpreted.
    with closing(Ranks(num)) as ranks:
        check(url, ranks.run(publish_rounded_by_kernels, url, form))


def test_ranks_that_change_different_shares_publish_in_one_encoding(published: Published) -> None:
    shares = [[1.0, 0.001], [0.001, 0.002], [0.0, 1.0], [0.0, 0.0], [0.003, 0.0]]
    manifests = published(2, jobs.unevenly, shares, {})
    found = [(each.delta.encoding, len(each.delta.payloads)) for each in manifests if each.delta]
    assert found == [("context", 2), ("gap", 2), ("context", 1), ("gap", 0), ("gap", 1)]


def test_ranks_store_the_model_where_their_changes_together_would_take_more(published: Published) -> None:
    # As AdamW does in fp32, where no step leaves a weight as it is.
    shares = [[1.0, 1.0], [1.0, 0.1], [1.0, 1.0], [0.6, 1.0], [1.0, 0.001], [0.01, 0.0]]
    manifests = published(2, jobs.unevenly, shares, {"dtype": None, "anchor_every": 3})
    assert [each.kind for each in manifests] == ["anchor", "delta", "anchor", "anchor", "delta", "delta"]
    assert all(each.num_bytes < 1.05 * 512 * 512 * 4 for each in manifests)


def test_every_third_version_of_ranks_is_an_anchor_also_if_only_changes_are_published(
    published: Published,
) -> None:
    manifests = published(2, jobs.change_in_turn)
    assert [(each.version, each.anchor is not None) for each in manifests] == [
        (i, i % 3 == 0) for i in range(15)
    ]


def test_as_many_calls_of_ranks_return_as_max_pending_says(ranks_of: RanksOf, url: str) -> None:
    assert ranks_of(2).run(jobs.calls_while_held, url, "gap") == [6, 6]


def test_each_rank_of_a_pipeline_publishes_its_layers(published: Published) -> None:
    manifests = published(3, jobs.stages, {})
    assert manifests[1].delta is not None
    assert len(manifests[1].delta.payloads) == 3


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_the_base_checkpoint_has_is_not_sent_between_ranks(
    ranks_of: RanksOf, url: str, tmp_path: Path, is_changed: bool
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    torch.manual_seed(0)
    tensors = {"one": torch.randn(40, 60).bfloat16(), "two": torch.randn(31).bfloat16()}
    if is_changed:
        tensors["changed"] = torch.randn(20, 30).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    results = ranks_of(3).run(jobs.from_checkpoint, url, str(folder), is_changed)
    check(url, [versions for versions, _ in results])
    assert any(pieces for _, pieces in results) == is_changed


@pytest.mark.exhaustive
def test_ranks_agree_on_anchors_whose_distance_is_auto(ranks_of: RanksOf, url: str) -> None:
    (first, _), (second, _) = ranks_of(2).run(partial(jobs.halves, num=30, anchor_every="auto"), url)
    assert first == second
    assert 2 < first.count("anchor") < 20


@pytest.mark.exhaustive
def test_one_rank_has_the_process_that_adds_anchors(ranks_of: RanksOf, url: str) -> None:
    found = ranks_of(2).run(partial(jobs.halves, num=6, anchor_every=2, compact=True), url)
    assert found == [(["anchor", *["delta"] * 5], leads) for leads in (True, False)]


def test_what_ranks_publish_behind_a_version_that_is_given_up_meanwhile_can_be_rebuilt(
    published: Published, url: str
) -> None:
    assert [each.version for each in published(2, jobs.go_back)] == [7, 8, 9]
    with opened(url) as store:
        assert notes.retirements(store).find(2) is not None
        assert history.read_manifest(store, 6).parent == 2
        assert list(store.list("reservations/")) == []


def test_versions_of_several_ranks_are_signed(published: Published, url: str, tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    versions = [each.version for each in published(2, jobs.train_and_sign, [str(private)] * 2, 3)]
    assert versions == [0, 1, 2]
    with opened(url) as store:
        for version in versions:
            Replica(store, {}, required_keys=public).update(version)
            assert len(list(store.list(layout.signature_prefix(version)))) == 1
        with pytest.raises(Unsigned):
            Replica(store, {}, required_keys=key_pair(tmp_path, "other")[1]).update(2)


def test_ranks_with_different_signers_publish_nothing(ranks_of: RanksOf, tmp_path: Path) -> None:
    one, other = (str(key_pair(tmp_path, name)[0]) for name in ("one", "other"))
    for number, keys in enumerate([[one, None], [None, one], [one, other]]):
        url = str(tmp_path / f"store-{number}")
        kinds = ranks_of(2).run(jobs.train_and_sign, url, keys, 1)
        assert all(isinstance(kind, str) for kind in kinds), kinds
        with opened(url) as store:
            assert history.read_header(store) is None


def test_a_number_without_a_scale_on_one_rank_is_told_to_all_and_the_next_call_goes_on(
    ranks_of: RanksOf, url: str
) -> None:
    found = ranks_of(3).run(one_is_not_finite, url)
    assert all("up_proj" in message for _, message, _ in found), found
    (version,) = {version for _, _, version in found}
    assert read(url, version) == rounded(2, "fp8-block")


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, len(saved_models.KINDS), 5))
def test_each_rank_publishes_its_part_of_the_saved_tensors(
    ranks_of: RanksOf, tmp_path: Path, first: int
) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    url, kinds = str(tmp_path / "stores"), list(saved_models.KINDS)[first : first + 5]
    results = ranks_of(2).run(publish_saved, url, str(tmp_path / "saved"), kinds, False)
    for number, kind in enumerate(kinds):
        check(f"{url}/{kind}", [[result[number]] for result in results])


def test_all_ranks_serve_the_dtypes_of_a_checkpoint_that_one_of_them_has(
    published: Published, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    (manifest,) = published(2, publish_masters, str(tmp_path))
    assert manifest.version == 0


def test_ranks_store_the_tied_name_that_is_saved(ranks_of: RanksOf, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.19")
    names = ["GPTNeoXForCausalLM", "ProphetNetForConditionalGeneration"]
    url, folder = str(tmp_path / "stores"), tmp_path / "saved"
    results = ranks_of(2).run(publish_saved, url, str(folder), names, True)
    for number, name in enumerate(names):
        check(f"{url}/{name}", [[result[number]] for result in results])
        header = history.read_header(FolderStore(Path(url) / name))
        saved = load_file(folder / name / "model.safetensors")
        assert header is not None and header.schema.by_name().keys() == saved.keys()


def test_of_several_ranks_the_one_that_commits_reports_figures(ranks_of: RanksOf, url: str) -> None:
    assert ranks_of(2).run(jobs.steps_reported, url) == [[0, 1, 2], []]

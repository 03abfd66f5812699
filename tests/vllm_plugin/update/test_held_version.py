"""Which version some weights are, found by their bits."""

from pathlib import Path

import pytest
import torch
from plain_ranks import Fused, equal, publish, schema_of, serves

from patchstore.bucket.notes import GRACE, utc_now
from patchstore.bucket.state_sums import Sums, by_name
from patchstore.errors import CorruptObject, VersionRetired
from patchstore.ops.compact.service import Compactor
from patchstore.ops.retention import Retention, collect, retire
from patchstore.read.host_cache import HostCache
from patchstore.read.run import Run
from patchstore.tensors.bits import bits
from patchstore.testing.faults import FaultyStore
from tests.format import bad_buckets, surgery
from vllm_plugin.live.identify import find_version, read_contents, read_folder


def test_what_is_served_already_is_recognised_by_its_bits(trainer, module, open_ranks):
    module.load_weights((n, t.clone()) for n, t in trainer.history[1].items())
    ranks = open_ranks(trainer, module)
    assert ranks.held == 1
    assert serves(ranks, trainer.history[1])
    # Also what is calculated, of which the live weights do not say from what.
    ranks.apply(3)
    assert serves(ranks, trainer.history[3])


@pytest.mark.parametrize("name", ["norm", "rate", "bias", "ab"])
def test_one_other_bit_is_not_the_version_and_is_left_alone(trainer, module, open_ranks, name):
    module.load_weights((n, t.clone()) for n, t in trainer.history[1].items())
    # Of `bias`, float32, no checkpoint in bfloat16 has this bit.
    bits(module.state_dict()[name])[2] ^= 1
    before = module.state()
    ranks = open_ranks(trainer, module)
    assert ranks.held is None
    assert equal(module.state(), before)
    ranks.apply(2)
    assert serves(ranks, trainer.history[2])


def test_versions_before_the_nearest_anchor_are_not_searched(new_trainer, tensors, open_ranks):
    often = new_trainer(tensors, dtype=None, anchor_every=2)
    for _ in range(5):
        often.step(density=1.0)
    for version, found in ((4, 4), (0, None)):
        module = Fused()
        module.load_weights((n, t.clone()) for n, t in often.history[version].items())
        assert open_ranks(often, module).held == found


def test_an_element_of_bool_that_torch_does_not_have_is_refused_where_single_tensors_are_read(tmp_path):
    objects = surgery.load(Path(__file__).parents[2] / "golden" / "v1-gap")
    case = next(case for case in bad_buckets.CASES if case.name == "anchor has an element of BOOL that is 2")
    case.change(objects)
    store = surgery.store_of(objects)
    run, cache = Run.open(store), HostCache(tmp_path / "cache")
    read_contents(run, 0, ["u8.weight"], cache)
    with pytest.raises(CorruptObject):
        read_contents(run, 0, ["bool.weight"], cache)


def test_a_truncated_checkpoint_file_is_named(tmp_path, trainer):
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CorruptObject, match=r"model\.safetensors"):
        read_folder(tmp_path, schema_of(trainer))


def test_a_folder_of_other_tensors_is_not_read(model, trainer, weights, new_trainer):
    assert read_folder(model, schema_of(trainer)) == {}
    whole = new_trainer(weights)
    whole.publish()
    found = read_folder(model, schema_of(whole))
    assert found.keys() == weights.keys()
    assert all(torch.equal(bits(found[name]), bits(weights[name])) for name in weights)


def test_a_version_is_found_by_its_total_where_all_names_are_known(trainer, tmp_path):
    reads, cache = FaultyStore(trainer.store), HostCache(tmp_path / "sums")
    run = Run.open(reads)
    for version in (3, 2):
        sums = by_name(run.schema, run.sums(run.manifest(version)))
        reads.calls.clear()
        assert find_version(run, sums, cache) == version
        assert find_version(run, sums | {"norm": Sums(1, 2)}, cache) is None
        assert not [key for _, key in reads.calls if key.startswith("states/")]
        # With some names alone, each candidate's sums say.
        del sums["rotary"]
        assert find_version(run, sums, cache) == version
        assert find_version(run, sums | {"norm": Sums(1, 2)}, cache) is None
    assert find_version(run, {}, cache) is None


def test_weights_that_are_almost_a_version_are_named(trainer, module, open_ranks, caplog):
    module.load_weights((n, t.clone()) for n, t in trainer.history[-1].items())
    with torch.no_grad():
        module.norm[0] += 1
    assert open_ranks(trainer, module).held is None
    assert "1 of 6 tensors differ from those of the newest one, version 3, such as 'norm'" in caplog.text


def test_other_weights_are_compared_with_no_version(trainer, module, open_ranks, caplog):
    module.load_weights((n, t + 1) for n, t in trainer.history[-1].items())
    assert open_ranks(trainer, module).held is None
    assert "differ from those" not in caplog.text


def test_a_retired_version_of_which_payloads_are_gone_is_served_and_not_called_damaged(
    new_trainer, tensors, open_ranks, tmp_path
):
    often = publish(new_trainer(tensors, dtype=None), 5)
    list(Compactor(often.store, anchor_every=4).compact())
    run, cache = Run.open(often.store), HostCache(tmp_path / "cache")
    sums = by_name(run.schema, run.sums(run.manifest(3)))
    retire(often.store, Retention(keep_last=1), dry_run=False)
    collect(often.store, dry_run=False, clock=lambda: utc_now() + GRACE)
    with pytest.raises(VersionRetired, match="nearest kept version is 4"):
        read_contents(run, 3, ["norm"], cache)
    assert find_version(run, sums, cache) == 3
    del sums["rotary"]
    assert find_version(run, sums, cache) is None
    module = Fused()
    module.load_weights((n, t.clone()) for n, t in often.history[3].items())
    ranks = open_ranks(often, module)
    assert ranks.held is None
    ranks.apply(4)
    assert serves(ranks, often.history[4])

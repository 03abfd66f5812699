"""Models that FSDP2 shards are published with the names and bits of the saved files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import saved_jobs
import saved_models
from test_layouts import check

from patchstore.format import history
from patchstore.stores.folder import FolderStore
from tests.support.ranks import Ranks

pytest.importorskip("transformers", minversion="5.19")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.timeout(600)


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(0, len(saved_models.KINDS), 5))
def test_each_rank_publishes_its_part_of_the_saved_tensors(
    ranks_of: Callable[[int], Ranks], tmp_path: Path, first: int
) -> None:
    url, kinds = str(tmp_path / "stores"), list(saved_models.KINDS)[first : first + 5]
    results = ranks_of(2).run(saved_jobs.publish, url, str(tmp_path / "saved"), kinds)
    for number, kind in enumerate(kinds):
        check(f"{url}/{kind}", [[result[number]] for result in results])


def test_all_ranks_serve_the_dtypes_of_a_checkpoint_that_one_of_them_has(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    url = str(tmp_path / "store")
    (manifest,) = check(url, ranks_of(2).run(saved_jobs.publish_masters, url, str(tmp_path)))
    assert manifest.version == 0


def test_ranks_store_the_tied_name_that_is_saved(ranks_of: Callable[[int], Ranks], tmp_path: Path) -> None:
    names = ["GPTNeoXForCausalLM", "ProphetNetForConditionalGeneration"]
    url, folder = str(tmp_path / "stores"), tmp_path / "saved"
    results = ranks_of(2).run(saved_jobs.publish_tied, url, str(folder), names)
    for number, name in enumerate(names):
        check(f"{url}/{name}", [[result[number]] for result in results])
        header = history.read_header(FolderStore(Path(url) / name))
        saved = safetensors.load_file(folder / name / "model.safetensors")
        assert header is not None and header.schema.by_name().keys() == saved.keys()

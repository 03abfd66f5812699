"""A draft model from the served checkpoint is updated with its target; one from elsewhere stays as it is."""

from itertools import pairwise

import pytest

pytestmark = pytest.mark.exhaustive

PROGRAM = "tiny_draft.py"

DRAFT = "model.layers.2."
NEWEST = "3"


def test_draft_and_target_are_those_of_a_fresh_start(found):
    updated, fresh = found["followed"][NEWEST], found["fresh"]
    assert updated["fingerprint"] == fresh["fingerprint"]
    assert updated["draft"] == fresh["draft"]
    assert updated["answers"] == fresh["answers"]


def test_the_draft_changes_with_every_version_and_is_in_the_fingerprint(found):
    states = [found["followed"][version] for version in ("start", "1", NEWEST)]
    for one, other in pairwise(states):
        assert one["answers"] != other["answers"]
        assert one["draft"].keys() == other["draft"].keys()
        assert not one["draft"].items() & other["draft"].items()
    for each in states:
        followed = {f"draft.{name}": bits for name, bits in each["draft"].items()}
        assert followed.items() <= each["fingerprint"].items()
        assert any(DRAFT in name for name in followed)


def test_what_draft_and_target_share_is_the_targets(found):
    # The checkpoint has other values under the draft's names, which vLLM leaves out.
    for each in (found["followed"][NEWEST], found["fresh"]):
        bits = each["fingerprint"]
        assert bits["draft.model.embed_tokens.weight"] == bits["model.embed_tokens.weight"]
        assert bits[f"draft.{DRAFT}shared_head.head.weight"] == bits["lm_head.weight"]
    mapped = found["followed"]["status"]["map"]
    assert mapped["absent"] == [f"{DRAFT}embed_tokens.weight", f"{DRAFT}shared_head.head.weight"]
    assert (mapped["num_computed"], mapped["num_partial"]) == (0, 0)


def test_a_fresh_start_is_recognised_with_its_draft(found):
    assert found["followed"]["start"] == found["followed"]["0"]


def test_a_draft_from_another_folder_stays_as_it_is_and_status_says_so(found):
    separate, fresh = found["separate"], found["fresh"]
    own = {name for name in fresh["draft"] if DRAFT in name and "shared_head.head" not in name}
    assert len(own) > 10
    for name in own:
        assert separate[NEWEST]["draft"][name] == separate["start"]["draft"][name] != fresh["draft"][name]
    target = {name: bits for name, bits in fresh["fingerprint"].items() if not name.startswith("draft.")}
    assert separate[NEWEST]["fingerprint"] == target
    for key in ("status_at_start", "status"):
        assert (separate[key]["draft"], found["followed"][key]["draft"]) == ("separate", "followed")

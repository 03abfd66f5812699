"""Real engines of FP8 checkpoints: each version is written in place, and equals a fresh start from it."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from programs import found_by

FORMS = ("fp8-block", "fp8-channel")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """What the engines of cases held, of which each runs once: see `quantized_engines`."""
    known: dict[str, dict[str, Any]] = {}

    def run(name: str, names: tuple[str, ...]) -> dict[str, Any]:
        if name not in known:
            known.update(found_by("quantized_engines.py", tmp_path_factory.mktemp("engines"), *names))
        return known[name]

    return run


def assert_followed(case: dict[str, Any], versions: list[int]) -> None:
    """Every update succeeded, the same version has the same bits, and the last has those of a fresh start."""
    assert "failed" not in case or isinstance(case["failed"], dict), case["failed"]
    states = [case[str(number)] for number in range(len(versions))]
    assert [state["refused"] for state in states] == [None] * len(versions)
    ranks = len(case["fresh"]["fingerprints"])
    assert [state["serving"] for state in states] == [[version] * ranks for version in versions]
    assert (states[-1]["map"]["num_computed"], states[-1]["map"]["num_partial"]) == (0, 0)
    bits = {version: state["fingerprints"] for version, state in zip(versions, states, strict=True)}
    assert [state["fingerprints"] for state in states] == [bits[version] for version in versions]
    assert len({str(each) for each in bits.values()}) == len(bits)
    assert states[-1]["fingerprints"] == case["fresh"]["fingerprints"]
    # As text, since a number that is none differs from itself.
    assert str(states[-1]["answers"]) == str(case["fresh"]["answers"])


@pytest.mark.parametrize("form", [pytest.param(FORMS[0], marks=pytest.mark.exhaustive), FORMS[1]])
def test_codes_and_scales_are_those_of_a_fresh_start_and_a_failed_update_leaves_them(found, form):
    case = found(form, (form,))
    assert case.get("refused") is None, case
    assert case["serving"] == [0], "the version that it was started from is known by its bits"
    assert case["form"] == form
    assert_followed(case, [1, 2, 3, 0, 3])
    assert len({str(case[number]["answers"]) for number in "0123"}) > 1
    failed = case["failed"]
    assert "made to fail" in failed["refused"]
    assert failed["serving"] == [3]
    assert (failed["fingerprints"], failed["answers"]) == (case["4"]["fingerprints"], case["4"]["answers"])


STARTS = ("dummy-", "two-", "dummy-two-")
KINDS = (*STARTS, *(f"{start}{kind}-" for start in ("", *STARTS) for kind in ("experts", "latent")))
MORE = tuple(kind + form for kind in KINDS for form in FORMS)
PAIRS = {
    "block-to-plain": r"serves weights that are not quantized: start vllm from a checkpoint of this run",
    "plain-to-block": r'serves FP8 .*\(fp8-block\): .*quantization="fp8-block"',
    "block-to-channel": r"\(fp8-block\), and this server serves FP8 .*\(fp8-channel\): start vllm from",
    "block-to-int8": "this server quantizes what it loads",
}
MADE = ("mxfp8", *(f"{start}gpt-oss" for start in ("", *STARTS)))
ALL = (*MORE, *MADE, *PAIRS, "made-up-cache")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE)
def test_ranks_experts_and_servers_without_weights_of_their_own_follow_too(found, name):
    case = found(name, ALL)
    assert set(case["serving"]) == ({None} if "dummy" in name else {0})
    assert_followed(case, [1, 2, 3, 0, 3])
    # In layers of experts, of which the latent model has one.
    layers = {"experts-fp8": 2, "latent-fp8": 1}.get(name.removeprefix("dummy-").rpartition("-")[0], 0)
    read = [case[number]["experts_read"] for number in "01234"]
    assert read == [None if "two-" in name else [[True] * layers]] * 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MADE)
def test_codes_and_scales_that_the_trainer_made_are_those_of_a_fresh_start(found, name):
    case = found(name, ALL)
    assert set(case["serving"]) == ({None} if "dummy" in name else {0})
    assert_followed(case, [1, 2, 3, 0, 3])
    if "two-" in name:
        return
    assert case["4"]["experts_read"] == [[True] * (2 if "gpt-oss" in name else 0)]
    failed = case["failed"]
    assert "made to fail" in failed["refused"]
    assert (failed["serving"], failed["fingerprints"]) == ([3], case["4"]["fingerprints"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAIRS)
def test_a_run_of_another_form_is_refused_with_both_and_what_to_do(found, name):
    refused = found(name, ALL)["refused"]
    assert "[schema-mismatch]" in refused
    assert re.search(PAIRS[name], refused), refused


@pytest.mark.exhaustive
def test_scales_of_an_fp8_cache_that_vllm_made_up_are_refused_at_start(found):
    failed = found("made-up-cache", ALL)["failed"]
    assert "--load-format dummy vLLM makes up the scales of an FP8 cache" in failed

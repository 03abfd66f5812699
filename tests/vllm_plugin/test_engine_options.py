"""Options that need no requests to be shown: dtypes, tied weights that are not, adapters beside experts."""

import pytest

pytestmark = pytest.mark.exhaustive

PROGRAM = "option_engines.py"

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["float16", "float32", "rounded", "untied-int8", "lora-beside-experts"])
def test_weights_and_answers_are_those_of_a_fresh_start(found, name):
    case = found[name]
    newest = case["2"]
    assert [case[version]["refused"] for version in "012"] == [None] * 3
    assert newest["serving"] == 2
    assert newest["fingerprint"] == case["fresh"]["fingerprint"] != case["0"]["fingerprint"]
    # As text, since a number that is none differs from itself.
    assert str(newest["answers"]) == str(case["fresh"]["answers"])


def test_the_status_tells_weights_that_another_dtype_widens_from_those_that_it_rounds(found):
    widened, rounded = found["float32"], found["float16"]
    assert (widened["2"]["map"]["mapped"], widened["2"]["map"]["num_computed"]) == (25, 0)
    assert (rounded["2"]["map"]["mapped"], rounded["2"]["map"]["num_computed"]) == (0, 25)
    # Rounded bits cannot say which version they are, so the first update loads an anchor.
    assert (widened["serving"], rounded["serving"]) == (0, None)


def test_the_status_names_each_weight_that_the_model_has_in_more_bits_than_the_run(found):
    mapped = found["rounded"]["2"]["map"]
    assert mapped["wider"] == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert (mapped["num_wider"], mapped["widened_apart"]) == (1, mapped["wider"][0].replace("1", "*"))
    assert found["float32"]["2"]["map"]["num_wider"] == 25
    assert found["float32"]["2"]["map"]["widened_apart"] == ""
    assert found["float16"]["2"]["map"]["num_wider"] == 0


def test_a_run_that_rounds_what_the_model_keeps_is_told_so_before_and_once_when_it_is_opened(found):
    (said,) = found["rounded"]["warned"]
    for text in (said, found["rounded"]["fits"]["widened_apart"]):
        assert "model.layers.*.mlp.gate.e_score_correction_bias" in text
    assert "files=" in said
    # As with all that is wider, which is meant.
    assert (found["float32"]["warned"], found["float32"]["fits"]["widened_apart"]) == ([], "")


@pytest.mark.parametrize("name", ["tied", "tied-float16", "tied-int8"])
def test_an_output_layer_that_is_no_longer_the_embedding_is_refused_by_name(found, name):
    case = found[name]
    followed, refused = case["1"], case["2"]
    assert (followed["refused"], followed["serving"]) == (None, 1)
    assert "[schema-mismatch]" in refused["refused"]
    assert f"{HEAD!r} than as {EMBEDDING!r}" in refused["refused"]
    assert refused["serving"] == 1
    assert refused["fingerprint"] == followed["fingerprint"]


def test_a_server_that_has_one_tensor_for_two_knows_the_version_in_which_they_were_equal(found):
    # The store's newest version differs from it only in the tensor that this server does not have.
    assert found["tied"]["serving"] == 1


def test_an_architecture_that_vllm_always_ties_is_refused_by_name_whatever_its_config_says(found):
    case = found["zamba"]
    assert case["serving"] is None
    for version in "012":
        assert "[schema-mismatch]" in case[version]["refused"]
        assert f"{HEAD!r} than as {EMBEDDING!r}" in case[version]["refused"]
        assert "vLLM has no second tensor for this architecture" in case[version]["refused"]
        assert (case[version]["serving"], case[version]["fingerprint"]) == (None, case["0"]["fingerprint"])


def test_experts_that_adapters_wrap_are_refused_with_options_that_help(found):
    refused = found["lora-experts"]["refused"]
    assert "[usage]" in refused
    assert "experts.base_layer" in refused
    # That this helps is shown by `lora-beside-experts`.
    assert "--lora-target-modules" in refused

"""After updates a model with an encoder and a decoder answers as a fresh start does, also in mid-answer."""

import json

import pytest

pytestmark = pytest.mark.exhaustive

PROGRAM = "tiny_whisper.py"


def test_answers_about_a_sound_are_those_of_a_fresh_start(found):
    fresh = found["fresh"]
    assert {version: found["followed"][version] for version in fresh} == fresh
    for one, other, again in fresh.values():
        assert one == again != other
    assert len({json.dumps(each) for each in fresh.values()}) == 3


def test_an_answer_that_is_being_written_is_continued_from_what_newer_weights_hear(found):
    running, (continued, _), kept = found["followed"]["running"], found["continued"], found["num_kept"]
    (old, _), (new, _) = found["fresh"]["0"][0], found["fresh"]["3"][0]
    assert running[:kept] == old[:kept]
    assert running[kept:] == continued[: len(running) - kept]
    assert running not in (old, new)

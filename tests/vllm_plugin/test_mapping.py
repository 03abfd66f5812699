"""What ranks conclude from each other's shares: the same in all of them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from patchstore.bucket.records import Schema, TensorSpec
from patchstore.errors import StateMismatch
from patchstore.tensors.state_digest import Sums
from vllm_plugin.map.mapping import RankSlices, SliceSums, WeightMap, share
from vllm_plugin.map.provenance import Runtime, Trace
from vllm_plugin.map.regions import Region, View

SCHEMA = Schema(
    tensors=tuple(TensorSpec(name=name, dtype="BF16", shape=(4, 6)) for name in ("u", "v", "w", "x")), tied={}
)
WHOLE = View(offset=0, shape=(24,), strides=(1,))
UPPER = View(offset=0, shape=(12,), strides=(1,))
LOWER = View(offset=12, shape=(12,), strides=(1,))
LEFT = View(offset=0, shape=(4, 3), strides=(6, 1))
RIGHT = View(offset=3, shape=(4, 3), strides=(6, 1))
MIDDLE = View(offset=6, shape=(12,), strides=(1,))


def traced(
    copied: Mapping[str, tuple[int, View]],
    computed: Mapping[frozenset[str], set[int]] | None = None,
) -> Trace:
    """A trace of one rank: name -> runtime and slice; names that are calculated -> the runtimes written."""
    memory = torch.zeros(24, dtype=torch.bfloat16).untyped_storage()
    return Trace(
        runtimes=tuple(Runtime(names=(f"p{i}",), storage=memory, dtype=torch.bfloat16) for i in range(4)),
        regions={
            name: ((index, Region(source=view, target=View.contiguous(view.shape))),)
            for name, (index, view) in copied.items()
        },
        computed=tuple((names, frozenset(written)) for names, written in (computed or {}).items()),
        uncovered={},
    )


def agreed(*traces: Trace) -> list[WeightMap]:
    """Every rank's map."""
    shares = [share(each) for each in traces]
    return [WeightMap(SCHEMA, each, shares) for each in traces]


@pytest.mark.parametrize("views", [(WHOLE,), (UPPER, LOWER), (LEFT, RIGHT), (WHOLE, WHOLE)])
def test_slices_that_make_up_a_tensor_prove_it(views):
    for mapped in agreed(*(traced({"u": (0, view)}) for view in views)):
        assert (mapped.proved, mapped.partial, mapped.absent) == ({"u"}, frozenset(), {"v", "w", "x"})


@pytest.mark.parametrize(
    "views", [(UPPER,), (LEFT, LEFT), (UPPER, MIDDLE), (UPPER, RIGHT), (WHOLE, LEFT), (UPPER, LOWER, LEFT)]
)
def test_slices_that_leave_out_a_part_or_overlap_prove_nothing(views):
    for mapped in agreed(*(traced({"u": (0, view)}) for view in views)):
        assert (mapped.proved, mapped.partial) == (frozenset(), {"u"})


def test_a_slice_that_one_rank_holds_twice_is_told_once():
    twice = tuple((i, Region(source=WHOLE, target=WHOLE)) for i in (0, 1))
    trace = traced({})
    trace = Trace(runtimes=trace.runtimes, regions={"u": twice}, computed=(), uncovered={})
    assert share(trace) == RankSlices(slices={"u": (WHOLE,)}, computed=())
    (mapped,) = agreed(trace)
    assert (mapped.proved, mapped.regions["u"]) == ({"u"}, twice)


def test_what_one_rank_calculates_no_rank_copies():
    first, second = agreed(
        traced({"u": (0, WHOLE), "v": (1, UPPER)}),
        traced({"u": (0, WHOLE)}, {frozenset({"v"}): {2}}),
    )
    for mapped in (first, second):
        assert mapped.computed == {"v"}
        assert mapped.proved == {"u"}
        assert mapped.regions.keys() == {"u"}
    # Each knows which of its own memory the loader writes.
    assert first.groups == ((frozenset({"v"}), frozenset({1})),)
    assert second.groups == ((frozenset({"v"}), frozenset({2})),)


def test_names_that_are_calculated_together_anywhere_are_loaded_together_everywhere():
    ranks = [
        traced({}, {frozenset({"u", "v"}): {0}}),
        traced({}, {frozenset({"x"}): {1}, frozenset({"v", "w"}): {2}}),
        traced({"w": (3, WHOLE)}),
    ]
    together = frozenset({"u", "v", "w"})
    for order in permutations(range(3)):
        maps = agreed(*(ranks[i] for i in order))
        for i, mapped in zip(order, maps, strict=True):
            # In one order, since the loader writes while it goes.
            assert [names for names, _ in mapped.groups] == [together, frozenset({"x"})]
            written = {0: [{0}, set()], 1: [{2}, {1}], 2: [{3}, set()]}[i]
            assert [set(indices) for _, indices in mapped.groups] == written


def wide(trace: Trace, *indices: int) -> Trace:
    """The same trace of a model that has these runtimes in float32."""
    return replace(
        trace,
        runtimes=tuple(
            replace(each, dtype=torch.float32) if index in indices else each
            for index, each in enumerate(trace.runtimes)
        ),
    )


def test_what_a_rank_has_in_more_bits_among_what_it_serves_is_listed():
    every = traced({name: (index, WHOLE) for index, name in enumerate("uvwx")})
    (some,), (all_of_them,), (none,) = (agreed(wide(every, *indices)) for indices in ([2], range(4), []))
    assert (some.wider, some.widened_apart) == ({"w"}, "w")
    # As with --dtype float32, which is meant.
    assert (all_of_them.wider, all_of_them.widened_apart) == (set("uvwx"), "")
    assert (none.wider, none.widened_apart) == (frozenset(), "")


def test_a_stage_of_a_pipeline_in_float32_is_no_exception_among_what_other_stages_serve():
    first, last = agreed(
        wide(traced({"u": (0, WHOLE)}), 0), wide(traced({"v": (1, WHOLE), "w": (2, WHOLE)}), 1, 2)
    )
    assert (first.wider, first.widened_apart) == ({"u"}, "")
    assert (last.wider, last.widened_apart) == ({"v", "w"}, "")


def told(mapped: WeightMap, *slices: tuple[str, View, Sums]) -> SliceSums:
    numbers = [mapped.number(name, view) for name, view, _ in slices]
    sums = np.array([each for _, _, each in slices], dtype=np.uint64).reshape(-1, 2)
    return SliceSums(np.array(numbers, dtype=np.int64), sums)


def total(mapped: WeightMap, *every: SliceSums) -> dict[str, Sums]:
    sums, is_told = mapped.total(every)
    return {
        spec.name: Sums(*each)
        for spec, each, is_one in zip(mapped.schema.tensors, sums.tolist(), is_told, strict=True)
        if is_one
    }


def test_each_slice_is_added_once_however_many_ranks_hold_it():
    mapped = agreed(*(traced({"u": (0, view), "v": (1, WHOLE)}) for view in (UPPER, LOWER)))[0]
    one = told(mapped, ("u", UPPER, Sums(1, 10)), ("v", WHOLE, Sums(5, 50)))
    other = told(mapped, ("u", LOWER, Sums(2**64 - 1, 20)), ("v", WHOLE, Sums(5, 50)))
    assert total(mapped, one, other) == {"u": Sums(0, 30), "v": Sums(5, 50)}
    assert total(mapped, one, other) == total(mapped, other, one)
    assert total(mapped, told(mapped)) == {}


def test_copies_that_differ_are_refused_within_a_rank_and_between_ranks():
    mapped = agreed(traced({"u": (0, WHOLE)}), traced({"u": (0, WHOLE)}))[0]
    one, other = ("u", WHOLE, Sums(1, 10)), ("u", WHOLE, Sums(1, 11))
    for every in ([told(mapped, one), told(mapped, other)], [told(mapped, one, other), told(mapped)]):
        with pytest.raises(StateMismatch, match="'u'"):
            mapped.total(every)


def test_names_of_which_a_part_is_missing_are_not_added_up():
    mapped = agreed(traced({"u": (0, UPPER), "v": (1, WHOLE)}))[0]
    slices = ("u", UPPER, Sums(1, 1)), ("v", WHOLE, Sums(2, 2))
    assert total(mapped, told(mapped, *slices)) == {"v": Sums(2, 2)}

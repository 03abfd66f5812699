"""Affine regions against what they mean: explicit lists of positions."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_plugin.map.regions import (
    Region,
    View,
    boxed,
    compose,
    is_nested,
    locate,
    normal,
    onto,
    outside,
    overlap,
    pieces,
    positions,
)

CPU = torch.device("cpu")

exact = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def listed(view: View) -> list[int]:
    """Every position of a view, by counting up its indices."""
    found = [view.offset]
    for n, s in zip(view.shape, view.strides, strict=True):
        found = [position + j * s for position in found for j in range(n)]
    return found


def pairs(*regions: Region) -> list[tuple[int, int]]:
    """(source, target) of every element, in ascending order."""
    return sorted(
        pair for region in regions for pair in zip(listed(region.source), listed(region.target), strict=True)
    )


def digits(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


sizes = st.integers(0, 4)


@st.composite
def any_views(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> View:
    """Views with arbitrary strides: they may repeat positions."""
    if shape is None:
        shape = tuple(draw(st.lists(sizes, max_size=4)))
    strides = tuple(draw(st.integers(0, 12)) for _ in shape)
    return View(offset=draw(st.integers(0, 9)), shape=shape, strides=strides)


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...], *, is_stepped: bool = True) -> View:
    """What a chain of view operations makes of a contiguous tensor of this shape."""
    tensor = torch.empty(shape, device="meta")
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["permute", "narrow", "step", "split", "flatten"]))
        if kind == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif tensor.dim() and kind in ("narrow", "step"):
            dim = draw(st.integers(0, tensor.dim() - 1))
            start = draw(st.integers(0, max(0, tensor.shape[dim] - 1)))
            stop = draw(st.integers(start, tensor.shape[dim]))
            by = draw(st.integers(2, 3)) if kind == "step" and is_stepped else 1
            tensor = tensor[(slice(None),) * dim + (slice(start, stop, by),)]
        elif kind == "split" and any(n and n % 2 == 0 for n in tensor.shape):
            dim = next(k for k, n in enumerate(tensor.shape) if n and n % 2 == 0)
            tensor = tensor.unflatten(dim, (2, tensor.shape[dim] // 2))
        elif kind == "flatten" and tensor.is_contiguous() and tensor.numel():
            tensor = tensor.view(-1)
    return View.of(tensor)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(1, 6), max_size=4)))


@st.composite
def copies(draw: st.DrawFn) -> Region:
    """A slice of one tensor onto anything of its shape."""
    source = draw(slices(draw(shapes())))
    return Region(source=source, target=draw(any_views(source.shape)))


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> View:
    """A box of a contiguous tensor."""
    steps, offset, box = digits(shape), 0, []
    for n, s in zip(shape, steps, strict=True):
        low = draw(st.integers(0, n - 1))
        box.append(draw(st.integers(1, n - low)))
        offset += low * s
    return View(offset=offset, shape=tuple(box), strides=steps)


@st.composite
def fillings(draw: st.DrawFn, shape: tuple[int, ...], count: int = 3) -> list[Region]:
    """What was copied into boxes of a tensor, from anywhere."""
    goals = [draw(boxes(shape)) for _ in range(draw(st.integers(0, count)))]
    return [Region(source=draw(any_views(goal.shape)), target=goal) for goal in goals]


@exact
@given(any_views())
def test_positions_are_listed_in_the_order_of_their_indices(view: View) -> None:
    assert positions(view, CPU).tolist() == listed(view)
    if view.num_elements:
        assert view.end == max(listed(view)) + 1


@exact
@given(copies())
def test_a_normal_region_maps_the_same_elements(region: Region) -> None:
    found = normal(region)
    assert pairs(*found) == pairs(region)
    for part in found:
        assert all(n > 1 for n in part.source.shape)
        assert list(part.source.strides) == sorted(part.source.strides, reverse=True)


@exact
@given(any_views())
def test_a_repeated_source_becomes_a_region_a_copy(view: View) -> None:
    region = Region(source=view, target=View(offset=3, shape=view.shape, strides=digits(view.shape)))
    found = normal(region)
    assert pairs(*found) == pairs(region)
    assert all(s > 0 for part in found for s in part.source.strides)


@exact
@given(any_views())
def test_nested_views_hold_no_position_twice(view: View) -> None:
    if view.num_elements and is_nested(view):
        assert len(set(listed(view))) == view.num_elements


@exact
@given(shapes().flatmap(slices))
def test_a_slice_of_a_tensor_is_nested(view: View) -> None:
    assert view.num_elements == 0 or is_nested(view)


@exact
@given(copies(), st.data(), st.sampled_from([torch.int32, torch.int64]))
def test_positions_are_located_where_the_region_says(region, data, dtype):
    asked = sorted(data.draw(st.sets(st.integers(0, 1500), max_size=40) | st.just(set(range(1500)))))
    for part in normal(region):
        goes = dict(pairs(part))
        inside, mask, target = locate(part, torch.tensor(asked, dtype=dtype))
        kept = asked[inside]
        if mask is not None:
            kept = [position for position, is_held in zip(kept, mask.tolist(), strict=True) if is_held]
        assert kept == [position for position in asked if position in goes]
        assert target.tolist() == [goes[position] for position in kept]
        assert target.dtype == torch.int64


@exact
@given(copies(), st.integers(1, 30))
def test_pieces_are_small_and_together_the_region(region: Region, limit: int) -> None:
    found = list(pieces(region, limit))
    assert all(0 < part.num_elements <= limit for part in found)
    assert pairs(*found) == pairs(region)


@exact
@given(st.lists(any_views(), max_size=4))
def test_views_overlap_where_a_position_is_there_twice(views: list[View]) -> None:
    every = [position for view in views for position in listed(view)]
    assert overlap(views) == (len(set(every)) < len(every))


@exact
@given(shapes().flatmap(lambda shape: st.lists(slices(shape), max_size=4)))
def test_slices_of_one_tensor_overlap_where_a_position_is_there_twice(views: list[View]) -> None:
    every = [position for view in views for position in listed(view)]
    assert overlap(views) == (len(set(every)) < len(every))


@exact
@given(st.data())
def test_a_copy_of_copies_comes_from_where_the_elements_were_first(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    held = data.draw(fillings(shape))
    wanted = data.draw(slices(shape))
    goal = data.draw(any_views(wanted.shape))
    found = compose(wanted, held, shape)
    assert found is not None
    index = View(offset=0, shape=wanted.shape, strides=digits(wanted.shape))
    origins: dict[int, list[int]] = {}
    for region in held:
        for source, target in pairs(region):
            origins.setdefault(target, []).append(source)
    expected = sorted(
        (source, at)
        for position, at in zip(listed(wanted), listed(index), strict=True)
        for source in origins.get(position, [])
    )
    assert pairs(*found) == expected
    goes = dict(zip(listed(index), listed(goal), strict=True))
    assert pairs(*(onto(part, goal) for part in found)) == sorted((s, goes[at]) for s, at in expected)


@exact
@given(st.data())
def test_repeated_elements_of_a_copy_come_from_one_place(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    held = data.draw(fillings(shape, 1))
    once = data.draw(slices(shape))
    dim, times = data.draw(st.integers(0, len(once.shape))), data.draw(st.integers(1, 3))
    wanted = View(
        offset=once.offset,
        shape=(*once.shape[:dim], times, *once.shape[dim:]),
        strides=(*once.strides[:dim], 0, *once.strides[dim:]),
    )
    found = compose(wanted, held, shape)
    assert found is not None
    origins = {target: source for region in held for source, target in pairs(region)}
    assert pairs(*found) == sorted(
        (origins[position], at) for at, position in enumerate(listed(wanted)) if position in origins
    )


def test_a_copy_that_takes_too_many_regions_is_not_described() -> None:
    column = Region(
        source=View(offset=0, shape=(4096, 3), strides=(3, 1)),
        target=View(offset=0, shape=(4096, 3), strides=(3, 1)),
    )
    # Every fifth element of rows of three starts somewhere else in each row.
    assert compose(View(offset=0, shape=(2400,), strides=(5,)), [column], (4096, 3)) is None


@exact
@given(st.data())
def test_boxes_of_a_target_are_the_region(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    target = data.draw(slices(shape))
    region = Region(source=data.draw(any_views(target.shape)), target=target)
    found = boxed(region, shape)
    assert found is not None
    assert pairs(*found) == pairs(region)
    for box in found:
        assert box.target.strides == digits(shape)
        indices = [box.target.offset // s % n for n, s in zip(shape, digits(shape), strict=True)]
        assert all(i + m <= n for i, m, n in zip(indices, box.target.shape, shape, strict=True))


@exact
@given(st.data())
def test_what_is_outside_a_box_is_what_it_does_not_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    held = data.draw(boxes(shape))
    region = Region(source=data.draw(any_views(held.shape)), target=held)
    box = data.draw(boxes(shape))
    covered = set(listed(box))
    expected = [pair for pair in pairs(region) if pair[1] not in covered]
    assert pairs(*outside(region, box, shape)) == expected


def test_a_region_of_nothing_has_no_normal_form() -> None:
    nothing = View(offset=0, shape=(0, 4), strides=(4, 1))
    assert normal(Region(source=nothing, target=nothing)) == []
    assert list(pieces(Region(source=nothing, target=nothing), 8)) == []
    assert not overlap([nothing, nothing])
    assert compose(nothing, [], (0, 4)) == []


def test_positions_past_two_to_the_31_are_located() -> None:
    far = 2**31
    region = Region(
        source=View(offset=far, shape=(2, 3), strides=(10, 1)),
        target=View(offset=1, shape=(2, 3), strides=(3, 1)),
    )
    inside, mask, target = locate(region, torch.tensor([7, far, far + 4, far + 12, far + 13]))
    assert inside == slice(1, 4)
    assert mask is not None
    assert mask.tolist() == [True, False, True]
    assert target.tolist() == [1, 6]

"""Offsets, shards, segments, runs and tiles, for any sizes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_zero.sharding import FlatLayout, Run, Segment, WholeLayout, runs, tiles


@st.composite
def layouts(draw: st.DrawFn, kinds: Sequence[type[FlatLayout]] = (FlatLayout,)) -> FlatLayout:
    kind, numels = draw(st.sampled_from(kinds)), draw(st.lists(st.integers(0, 60), max_size=8))
    shards = draw(st.sampled_from([1, 2, 3, 4, 7, 8]))
    return kind(tuple(numels), shards, shards * draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 8, 16])))


BOTH = FlatLayout, WholeLayout


def all_segments(layout: FlatLayout) -> list[tuple[int, Segment]]:
    return [(rank, segment) for rank in range(layout.shards) for segment in layout.segments(rank)]


@given(layouts(BOTH))
def test_segments_cover_each_parameter_once(layout: FlatLayout) -> None:
    covered: list[list[int]] = [[] for _ in layout.numels]
    for _, segment in all_segments(layout):
        covered[segment.param] += range(segment.param_start, segment.param_start + segment.numel)
    assert covered == [list(range(numel)) for numel in layout.numels]


@given(layouts(BOTH))
def test_a_segment_lies_where_its_parameter_does(layout: FlatLayout) -> None:
    for rank, segment in all_segments(layout):
        start, stop = layout.shard_range(rank)
        assert 0 <= segment.start < segment.stop <= stop - start
        assert start + segment.start == layout.offsets[segment.param] + segment.param_start


@given(layouts(BOTH))
def test_segments_of_a_rank_are_in_order_and_disjoint(layout: FlatLayout) -> None:
    for rank in range(layout.shards):
        segments = layout.segments(rank)
        assert all(a.stop <= b.start and a.param < b.param for a, b in itertools.pairwise(segments))


@given(layouts())
def test_parameters_are_aligned_and_do_not_overlap(layout: FlatLayout) -> None:
    assert all(offset % layout.align == 0 for offset in layout.offsets)
    ends = [offset + numel for offset, numel in zip(layout.offsets, layout.numels, strict=True)]
    assert all(end <= start < end + layout.align for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert layout.numel == sum(layout.numels)


@given(layouts())
def test_padding_is_small(layout: FlatLayout) -> None:
    end = max((o + n for o, n in zip(layout.offsets, layout.numels, strict=True)), default=0)
    assert end <= layout.padded_numel < max(end, 1) + layout.multiple


@given(layouts(BOTH))
def test_shards_are_equal(layout: FlatLayout) -> None:
    assert layout.padded_numel % layout.multiple == 0
    assert layout.padded_numel == layout.shards * layout.shard_numel
    assert layout.shard_numel > 0
    ranges = [layout.shard_range(rank) for rank in range(layout.shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == layout.padded_numel
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


def loads(layout: FlatLayout) -> list[int]:
    """Elements in each shard, with the gaps that alignment leaves."""
    sizes = [[-(-s.numel // layout.align) * layout.align for s in layout.segments(r)] for r in range(layout.shards)]
    return [sum(of_rank) for of_rank in sizes]


@given(layouts([WholeLayout]))
def test_whole_parameters_lie_in_one_shard_without_gaps(layout: FlatLayout) -> None:
    assert isinstance(layout, WholeLayout)
    for rank in range(layout.shards):
        segments = layout.segments(rank)
        assert all(s.param_start == 0 and s.numel == layout.numels[s.param] for s in segments)
        assert all(layout.owners[s.param] == rank for s in segments)
        starts = [s.start for s in segments]
        assert all(start % layout.align == 0 for start in [*starts, *layout.offsets])
        assert starts[:1] in ([], [0])
        assert all(a.stop <= b.start < a.stop + layout.align for a, b in itertools.pairwise(segments))


@given(layouts([WholeLayout]))
def test_whole_parameters_are_balanced(layout: FlatLayout) -> None:
    assert isinstance(layout, WholeLayout)
    of_ranks, sizes = loads(layout), [-(-n // layout.align) * layout.align for n in layout.numels]
    total, fullest, largest = sum(of_ranks), max(of_ranks), max(sizes, default=0)
    assert fullest * layout.shards <= total + (layout.shards - 1) * largest
    assert fullest <= layout.shard_numel < max(fullest, 1) + layout.multiple // layout.shards * layout.align
    if total:
        assert layout.imbalance == fullest * layout.shards / total - 1
    for index, size in enumerate(sizes):
        if size * layout.shards > total:  # more than a fair share
            assert [s.param for s in layout.segments(layout.owners[index])] == [index]


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    """Ascending segments, some of them adjacent."""
    pieces = draw(st.lists(st.tuples(st.sampled_from([0, 0, 3]), st.integers(1, 9)), max_size=12))
    segments, position = [], 0
    for index, (gap, numel) in enumerate(pieces):
        segments.append(Segment(index, position + gap, numel, 0))
        position += gap + numel
    return segments


keys = st.lists(st.sampled_from([None, "a", "b"]), min_size=12, max_size=12)


def joined(before: Run, after: Run, chosen: Sequence[str | None]) -> bool:
    """Whether one run could have held both."""
    last, first = before.segments[-1], after.segments[0]
    return last.stop == first.start and chosen[last.param] == chosen[first.param]


@given(segment_lists(), keys)
def test_runs_hold_every_chosen_segment_once(segments: list[Segment], chosen: list[str | None]) -> None:
    found = list(runs(segments, lambda s: chosen[s.param]))
    assert [s for run in found for s in run.segments] == [s for s in segments if chosen[s.param] is not None]
    for run in found:
        assert len({chosen[s.param] for s in run.segments}) == 1
        assert (run.start, run.stop) == (run.segments[0].start, run.segments[-1].stop)
        assert run.stop - run.start == sum(s.numel for s in run.segments)


@given(segment_lists(), keys)
def test_runs_are_maximal(segments: list[Segment], chosen: list[str | None]) -> None:
    found = list(runs(segments, lambda s: chosen[s.param]))
    assert not any(joined(a, b, chosen) for a, b in itertools.pairwise(found))


@given(segment_lists(), st.integers(1, 20))
def test_pieces_of_a_run_cover_it_and_know_their_segments(segments: list[Segment], limit: int) -> None:
    for run in runs(segments, lambda _: True):
        pieces = list(run.cut(limit))
        assert [i for piece in pieces for i in range(piece.start, piece.stop)] == [*range(run.start, run.stop)]
        for piece in pieces:
            assert 0 < piece.numel <= limit
            inside = [
                s for s in run.segments if not {*range(s.start, s.stop)}.isdisjoint(range(piece.start, piece.stop))
            ]
            assert list(piece.segments) == inside


@given(segment_lists(), st.integers(1, 20))
def test_tiles_are_bounded_and_keep_the_order(segments: list[Segment], limit: int) -> None:
    found = list(tiles(segments, limit))
    assert [s for tile in found for s in tile] == segments
    assert all(len(tile) == 1 or sum(s.numel for s in tile) <= limit for tile in found)


@given(segment_lists(), st.integers(1, 20))
def test_tiles_are_as_large_as_they_may_be(segments: list[Segment], limit: int) -> None:
    found = list(tiles(segments, limit))
    for tile, following in itertools.pairwise(found):
        assert sum(s.numel for s in tile) + following[0].numel > limit

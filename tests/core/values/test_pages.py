"""Pages: what goes in comes out; what is damaged is refused in words, never read wrongly, never a crash."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookback.core.aggregation.runs import Run, make_run, match_rows, merge_runs
from lookback.core.errors import StateError
from lookback.core.values import pages
from lookback.core.values.keys import Keys, number_keys
from lookback.core.values.pages import PAGE_VERSION, decode_page, encode_page

INT64 = st.integers(-(2**63), 2**63 - 1)


def objects(values: list[object]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@given(
    st.one_of(
        st.lists(INT64).map(lambda v: np.array(v, dtype=np.int64)),
        st.lists(INT64).map(lambda v: np.sort(np.array(v, dtype=np.int64))),
        st.lists(st.integers(-(10**38), 10**38)).map(objects),
        st.lists(st.text()).map(objects),
        st.lists(st.booleans()).map(lambda v: np.array(v, dtype=bool)),
        st.lists(st.floats()).map(lambda v: np.array(v, dtype=np.float64)),
        st.lists(st.floats(width=32)).map(lambda v: np.array(v, dtype=np.float32)),
    )
)
def test_arrays_come_back(array: np.ndarray) -> None:
    nothing, back = decode_page(encode_page([None, array]), "here")
    assert nothing is None
    assert back is not None
    assert back.dtype == array.dtype
    assert np.array_equal(back, array, equal_nan=array.dtype.kind == "f")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(page: bytes) -> None:
    with pytest.raises(StateError, match="page 7"):
        decode_page(page, "page 7")


@given(st.data())
def test_a_damaged_page_is_refused_or_harmless(data: st.DataObject) -> None:
    page = bytearray(
        make_run(*number_keys(Keys(np.arange(50), np.zeros(50, dtype=np.int64))), np.arange(50), np.arange(50)).encode()
    )
    for _ in range(data.draw(st.integers(1, 4))):
        page[data.draw(st.integers(0, len(page) - 1))] = data.draw(st.integers(0, 255))
    # Any other exception than a StateError, a crash or a hang, fails the test.
    with contextlib.suppress(StateError):
        Run.decode(bytes(page[: data.draw(st.integers(0, len(page)))]), "page 7")


def test_c8_a_page_of_another_layout_says_what_to_do() -> None:
    page = bytearray(encode_page([]))
    page[4] = PAGE_VERSION + 1
    with pytest.raises(
        StateError, match=f"layout version {PAGE_VERSION + 1}, this release reads version {PAGE_VERSION}; go on with"
    ):
        decode_page(bytes(page), "run:1")


def test_runs_merge_in_order_of_arrival_and_drop_what_is_below_the_floor() -> None:
    keys = Keys(np.array([2, 1, 1]), np.zeros(3, dtype=np.int64))
    first = make_run(*number_keys(keys), np.array([5, 3, 9]), np.array([50, 30, 90]))
    second = make_run(*number_keys(keys), np.array([5, 3, 1]), np.array([51, 31, 11]))
    merged = merge_runs([first, second], floor=3)
    assert merged.keys.low.tolist() == [1, 2]
    assert merged.starts.tolist() == [0, 3, 5]
    assert merged.times.tolist() == [3, 3, 9, 5, 5]
    assert merged.values is not None
    assert merged.values.tolist() == [30, 31, 90, 50, 51]


def test_a_row_of_nan_is_removed_as_any_other() -> None:
    keys = Keys(np.array([1, 1]), np.zeros(2, dtype=np.int64))
    run = make_run(*number_keys(keys), np.array([4, 4]), np.array([float("nan"), 1.0]))
    is_found, held = match_rows(run, keys.take(np.array([0])), np.array([4]), np.array([float("nan")]))
    assert held.tolist() == [0]
    assert is_found.tolist() == [True, False]


def test_one_row_goes_for_each_that_is_removed() -> None:
    keys = Keys(np.array([1, 1, 2]), np.zeros(3, dtype=np.int64))
    run = make_run(*number_keys(keys), np.array([4, 4, 4]), None)
    is_found, held = match_rows(run, keys.take(np.array([0, 2])), np.array([4, 5]), None)
    assert held.tolist() == [0]
    left = run.take(~is_found)
    assert left.times.tolist() == [4, 4]
    assert left.keys.low.tolist() == [1, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(1_000, dtype=np.int64) ** 5, np.arange(1_000) % 3 == 0, np.arange(1_000) / 7,
        objects([f"text {at}" for at in range(1_000)]), objects([10**30 + at for at in range(1_000)]),
    ],
)  # fmt: skip
def test_an_array_of_more_than_reading_takes_is_written_in_parts(
    array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MAX_BYTES", 500)
    monkeypatch.setattr(pages, "_MAX_ROWS", 300)
    first, back, nothing = decode_page(encode_page([array[:2], array, None]), "here")
    assert first is not None
    assert back is not None
    assert back.dtype == array.dtype
    assert (len(first), list(back), nothing) == (2, list(array), None)


def test_a_part_without_its_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_MAX_ROWS", 300)
    page = encode_page([np.arange(500)])
    (first, _) = pages._encode_array(np.arange(500))
    cut = page[:8] + first
    for damaged in (cut, cut[:6] + b"\1\0" + first):
        with pytest.raises(StateError, match="damaged"):
            decode_page(damaged, "here")

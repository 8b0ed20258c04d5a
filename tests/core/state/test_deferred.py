"""Events that wait for the history of their keys: pages in the order in which they were added, and none that is left behind."""

from __future__ import annotations

import json

from lookback.core.state.deferred import Deferred


class Store(dict[str, bytes]):
    """Pages in a dict; a page that is not there cannot be removed."""

    def put(self, name: str, page: bytes) -> None:
        self[name] = page

    def remove(self, name: str) -> None:
        del self[name]


def reopened(deferred: Deferred, store: Store) -> Deferred:
    again = Deferred.from_json(json.loads(json.dumps(deferred.counts)))
    again.use_store(store)
    return again


def test_pages_are_read_in_their_order_whether_saved_or_not() -> None:
    deferred, store = Deferred(), Store()
    deferred.use_store(store)
    deferred.add("a", b"1", 2)
    deferred.add("b", b"2", 1)
    deferred.save()
    for one in (deferred, reopened(deferred, store)):
        one.add("a", b"3", 5)
        assert (list(one.read("a")), list(one.read("b")), list(one.read("c"))) == ([b"1", b"3"], [b"2"], [])
        assert (one.events, one.counts["a"]) == (8, (2, 7))


def test_pages_that_are_dropped_leave_the_store_and_their_names() -> None:
    deferred, store = Deferred(), Store()
    deferred.use_store(store)
    deferred.add("a", b"1", 1)
    deferred.add("a", b"2", 1)
    deferred.save()
    # Twice before a save, with a page in between that was never stored.
    deferred.drop("a")
    deferred.add("a", b"3", 1)
    deferred.drop("a")
    deferred.add("a", b"4", 1)
    deferred.save()
    assert list(reopened(deferred, store).read("a")) == [b"4"]
    assert list(store.values()) == [b"4"]
    deferred.drop("a")
    deferred.drop("b")
    deferred.save()
    assert (store, deferred.counts, deferred.events) == ({}, {}, 0)

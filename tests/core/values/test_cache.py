"""The cache of decoded pages: bounded, and no reason for a page to stay."""

from __future__ import annotations

import gc

from lookback.core.values.cache import Cache


class Item:
    def __init__(self) -> None:
        self.evicted = 0

    def evict(self) -> None:
        self.evicted += 1


def test_the_least_recently_used_items_go_first() -> None:
    cache, items = Cache(100), [Item(), Item(), Item()]
    for item in items:
        cache.hold(item, 40)
    assert [item.evicted for item in items] == [1, 0, 0]
    cache.hold(items[1], 50)
    cache.hold(items[0], 10)
    assert cache.bytes == 100
    cache.hold(items[0], 20)
    assert [item.evicted for item in items] == [1, 0, 1]
    assert list(cache.list_items()) == [(items[1], 50), (items[0], 20)]
    # The last one stays, whatever its size.
    cache.hold(items[2], 1_000)
    assert [item.evicted for item in items] == [2, 1, 1]
    assert cache.bytes == 1_000
    cache.forget(items[2])
    cache.forget(items[2])
    assert (cache.bytes, list(cache.list_items())) == (0, [])


def test_an_item_that_takes_no_memory_is_not_held() -> None:
    cache, item = Cache(100), Item()
    cache.hold(item, 40)
    cache.hold(item, 0)
    assert (cache.bytes, list(cache.list_items())) == (0, [])


def test_an_item_that_nobody_else_holds_is_gone() -> None:
    cache, items = Cache(100), [Item(), Item()]
    for item in items:
        cache.hold(item, 40)
    del items[0], item
    gc.collect()
    assert cache.bytes == 40
    assert [held for held, _ in cache.list_items()] == items
    cache.hold(items[0], 100)
    assert items[0].evicted == 0

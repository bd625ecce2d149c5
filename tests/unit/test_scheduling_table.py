"""Tables, of which older versions stay what they were."""

import gc
import random
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.scheduling.table import Table

CHANGES = st.lists(st.tuples(st.integers(0, 1_000), st.sampled_from("abcde"), st.integers()), max_size=30)


@given(st.dictionaries(st.sampled_from("abc"), st.integers()), CHANGES, st.booleans())
def test_every_version_stays_what_it_was_whichever_is_changed(start, changes, reads_often):
    tables, models = [Table(start)], [dict(start)]
    for which, key, value in changes:
        which %= len(tables)
        tables.append(tables[which].with_entry(key, value))
        models.append({**models[which], key: value})
        if reads_often:
            assert list(tables[which].items()) == list(models[which].items())
    order = list(range(len(tables)))
    random.Random(len(changes)).shuffle(order)
    for which in order:
        assert list(tables[which].items()) == list(models[which].items()), "order counts, too"
        assert tables[which] == models[which]
        assert len(tables[which]) == len(models[which])


def test_a_table_does_not_share_the_dictionary_that_it_was_made_from():
    start = {"a": 1}
    table = Table(start)
    start["a"] = 2
    assert table["a"] == 1
    with pytest.raises(KeyError):
        table["b"]


def test_a_long_history_leaves_nothing_behind_and_is_let_go_without_recursion():
    class Value:
        pass

    first = Table({"a": Value()})
    value = weakref.ref(first["a"])
    table = first
    for _ in range(50_000):
        table = table.with_entry("a", Value())
    assert value() is not None, "the first one is kept, and so is what it holds"
    del first
    gc.collect()
    assert value() is None

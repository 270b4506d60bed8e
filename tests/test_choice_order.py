"""Which declared choices are passed over because one that failed was no larger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_vmem_guard.choice_order import passed_over


@pytest.mark.parametrize(("choices", "index", "failed", "expected"), [
    ([{"b": 4}, {"b": 2}, {"b": 1}], 1, [0], None),
    ([{"b": 4}, {"b": 8}, {"b": 1}], 1, [0], 0),
    ([{"b": (4, 4)}, {"b": (4, 2)}, {"b": (2, 4)}, {"b": (2, 2)}], 2, [0, 1], None),
    ([{"b": (4, 2)}, {"b": (4, 4)}, {"b": (2, 2)}], 1, [0], 0),
    ([{"parts": 1}, {"parts": 2}, {"parts": 4}], 1, [0], None),
    ([{"parts": 2}, {"parts": 1}, {"parts": 4}], 1, [0], 0),
    ([{"b": 4, "mode": "a"}, {"b": 8, "mode": "b"}, {"b": 2, "mode": "a"}], 1, [0], None),
    ([{"b": 4}, {"b": 4, "c": 1}], 1, [0], None),
    ([{"b": None}, {"b": 8}], 1, [0], None),
])
def test_which_choices_count_as_no_smaller(choices, index, failed, expected):
    assert passed_over(choices, index, failed) == expected


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=2, max_size=6), st.data())
def test_what_is_passed_over_is_at_least_as_large_in_every_block(blocks, data):
    choices = [{"q": q, "k": k} for q, k in (*blocks, (1, 1))]
    index = data.draw(st.integers(1, len(choices) - 1))
    failed = range(index)
    other = passed_over(choices, index, failed)
    larger = [i for i in failed if all(choices[index][n] >= choices[i][n] for n in "qk")]
    assert other == (larger[0] if larger else None)

"""Random kernels: every split that is accepted gives the same bits."""

from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from random_kernels import function, kernels
from split_support import NewAxis, Refused, Split, apply_splits, find_pallas_calls, integers, interpreted_call

from jax_vmem_guard.splitting.program import INTERNAL


def splits(spec):
    """Every k of the axis of the rows, two of the others, a new axis, and two axes together."""
    rows = spec.axis("a")
    yield from (((rows, k),) for k in (2, 3, 4) if spec.block % k == 0)
    yield from (((axis, 2),) for axis in range(len(spec.grid)) if axis != rows)
    yield ((NewAxis(0, 0), 2),)
    yield ((NewAxis(0, 1), 2),)
    yield (NewAxis(0, 1), 2), (rows, 2)


def agree(spec, counts):
    """Splits the kernel in every way that is accepted and compares; counts what came of it."""
    fun, shapes = function(spec)
    args = [integers(i, *shape, dtype=np.int32) for i, shape in enumerate(shapes)]
    program = jax.make_jaxpr(fun)(*args)
    path = find_pallas_calls(program)[0].path
    want = None
    for axes in splits(spec):
        try:
            changed = apply_splits(program, {path: Split(axes=axes)})
        except Refused as refused:
            assert INTERNAL not in refused.reason, (refused.reason, spec)
            assert "rebuil" not in refused.reason, (refused.reason, spec)
            counts["refused: " + refused.reason.split(": ", 1)[-1][:60]] += 1
            continue
        if want is None:
            want = interpreted_call(program, *args)
        np.testing.assert_array_equal(interpreted_call(changed, *args), want, err_msg=f"{axes} of {spec}")
        counts["accepted"] += 1


def search(examples, accepted):
    counts = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))
    @given(kernels())
    def check(spec):
        agree(spec, counts)

    check()
    print(counts.most_common(30))
    assert counts["accepted"] >= accepted, counts
    return counts


def test_accepted_splits_of_random_kernels_are_right():
    """At least 200 accepted splits of random kernels, none of which changes a bit."""
    search(examples=115, accepted=200)


@pytest.mark.long
def test_accepted_splits_of_many_random_kernels_are_right():
    """The long mode: at least 2,000 accepted splits."""
    search(examples=1200, accepted=2000)

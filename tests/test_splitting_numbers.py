"""Split kernels against the unsplit ones, in interpret mode."""

import pytest
from library_kernels import SMALL
from split_support import floats, integers, same, split, traced


def arguments(case, make):
    return [make(i, *shape.shape, dtype=shape.dtype) for i, shape in enumerate(case.shapes)]


#: Their floating-point sums are over the split block's own columns: XLA:CPU picks another order for another shape.
ROUNDED = {"softmax": 1e-6, "layernorm": 1e-6}


@pytest.mark.parametrize("name", SMALL)
def test_library_kernels_give_the_same_bits_on_integers(name):
    """Each kernel, split in two along its axis, gives the same bits on integer-valued data."""
    case = SMALL[name]
    args = arguments(case, integers)
    program = traced(case.fun, *args)
    assert same(program, split(program, (case.axis, 2), name=case.kernel), *args, tolerance=ROUNDED.get(name, 0.0))


@pytest.mark.parametrize("name", ["flash dq", "splash dkv", "gmm", "ops matmul, rows", "softmax", "rope"])
def test_library_kernels_agree_on_floats(name):
    """On data that rounds, the split kernel stays within rounding of the unsplit one."""
    case = SMALL[name]
    args = arguments(case, floats)
    program = traced(case.fun, *args)
    assert same(program, split(program, (case.axis, 2), name=case.kernel), *args, tolerance=2e-6)

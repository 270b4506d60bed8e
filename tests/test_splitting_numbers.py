"""Split kernels against the unsplit ones, in interpret mode."""

import jax
import jax.extend.core
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
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


@pytest.mark.parametrize("name", ["matmul, rows", "layernorm"])
def test_simulated_memory_agrees(name, monkeypatch):
    """In the mode that simulates a TPU's memory, with NaN where nothing was written and races detected."""
    simulated = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    pallas_call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda *args, **kwargs: pallas_call(*args, **kwargs, interpret=simulated))
    case = SMALL[name]
    args = arguments(case, integers)
    program = traced(lambda *a: case.fun(*a), *args)  # a new function: JAX remembers traces
    changed = split(program, (case.axis, 2), name=case.kernel)
    results = [jax.jit(jax.extend.core.jaxpr_as_fun(p))(*args)[0] for p in (program, changed)]
    assert np.array_equal(*results) and not np.isnan(results[1]).any()

"""Split kernels against the unsplit ones, in interpret mode."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from library_kernels import SMALL
from split_support import floats, integers, refusal, rows_call, same, split, traced


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


def stacked(axis):
    """Columns halves stacked along a new dimension and taken apart again in the other order."""
    def kernel(x_ref, o_ref):
        left, right = x_ref[:, :64], x_ref[:, 64:]
        first, second = jnp.unstack(jnp.stack([left, right * 2, left + right], axis=axis) + 1, axis=axis)[1:]
        o_ref[...] = jnp.concatenate([first, second], axis=1)
    return rows_call(kernel)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_values_stacked_along_a_new_dimension_are_split_along_the_others(axis):
    """`stack` and `unstack` pass a part on, before and behind their own dimension."""
    data = integers(0, 32, 128)
    program = traced(stacked(axis), data)
    assert same(program, split(program, (0, 2)), data)


def test_rows_stacked_out_of_order_are_not_split():
    """Rows picked one by one and stacked along the split dimension are another order of rows."""
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.stack([x_ref[i, :] for i in range(16)][::-1], axis=0)

    assert "`stack` runs along the split dimension" in refusal(rows_call(kernel), [integers(0, 32, 128)], (0, 2))

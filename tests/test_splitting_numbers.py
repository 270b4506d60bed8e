"""Split kernels against the unsplit ones, in interpret mode."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from library_kernels import SMALL
from split_support import NewAxis, floats, integers, refusal, rows_call, same, split, traced

#: Splitting is allowed only on versions of JAX that pass these.
pytestmark = pytest.mark.compat


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

    # `stack` is a `concatenate` up to jax 0.9.
    assert "` runs along the split dimension" in refusal(rows_call(kernel), [integers(0, 32, 128)], (0, 2))


def looked_up(table, x):
    """Blocks of rows in the order of a table, equal neighbours added up: no grid axis moves along the rows by itself."""
    def kernel(table_ref, x_ref, o_ref):
        step = pl.program_id(0)

        @pl.when((step == 0) | (table_ref[step] != table_ref[jnp.maximum(step - 1, 0)]))
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        rows = table_ref[step] * 16 + jax.lax.broadcasted_iota(jnp.int32, (16, 128), 0)
        o_ref[...] += jnp.where(rows % 3 == 0, x_ref[...], 1)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(4,), in_specs=[pl.BlockSpec((16, 128), lambda i, table: (i, 0))],
        out_specs=pl.BlockSpec((16, 128), lambda i, table: (table[i], 0)))
    return pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct((32, 128), x.dtype))(table, x)


def prefix_sums(x):
    """Blocks of rows added up from step to step in scratch."""
    def kernel(x_ref, o_ref, acc_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            acc_ref[...] = jnp.zeros_like(acc_ref)

        acc_ref[...] += x_ref[...]
        o_ref[...] = acc_ref[...]

    spec = pl.BlockSpec((16, 128), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(4,), in_specs=[spec], out_specs=spec,
                          scratch_shapes=[pltpu.VMEM((16, 128), x.dtype)],
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


@pytest.mark.parametrize("parts", [2, 4])
def test_rows_that_a_table_orders_are_cut_by_running_the_grid_once_per_part(parts):
    """A new outermost axis cuts a dimension whose block index is looked up, while the old axis accumulates."""
    data = jnp.array([1, 1, 0, 0], jnp.int32), integers(0, 64, 128)
    program = traced(looked_up, *data)
    assert same(program, split(program, (NewAxis(0, 0), parts)), *data)


def test_blocks_that_carry_scratch_along_their_own_axis_are_cut_across_it():
    """The grid axis cannot be split, for scratch crosses it; the j-th parts of all blocks are a run of their own."""
    data = integers(0, 64, 128)
    program = traced(prefix_sums, data)
    assert "carry values" in refusal(prefix_sums, [data], (0, 2))
    assert same(program, split(program, (NewAxis(0, 0), 2)), data)

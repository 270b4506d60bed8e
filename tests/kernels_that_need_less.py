"""Kernels that run out of scoped VMEM and can do with less: by one buffer for a window, or by a color."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import array


def matmul_relu(x, w):
    """A matmul whose left block stays while the right ones pass by: (rows, k) x (k, columns)."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.maximum(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32), 0)

    (rows, k), columns = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel, grid=(rows // 128, columns // 128),
        in_specs=[pl.BlockSpec((128, k), lambda i, j: (i, 0)), pl.BlockSpec((k, 128), lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32), name="matmul_relu")(x, w)


def bytes_through(x, rows):
    """int8 blocks of `rows` rows pass through; the result has few rows of each."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:32, :]

    steps = x.shape[0] // rows
    return pl.pallas_call(
        kernel, grid=(steps,), in_specs=[pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((32, x.shape[1]), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((32 * steps, x.shape[1]), x.dtype), name="bytes_through")(x)


def prefetched(which, table, x, block):
    """Adds the page of `table` that a prefetched scalar names to every block of `x`."""
    def kernel(which_ref, table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[...]

    columns = x.shape[1]
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(x.shape[0] // block,),
        in_specs=[pl.BlockSpec((None, block, columns), lambda i, which_ref: (which_ref[0], 0, 0)),
                  pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0))],
        out_specs=pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0)))
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                          name="prefetched")(which, table, x)


def dynamic_grid(steps, x, block):
    """Doubles the first `steps` blocks of `x`."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(steps[0],), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="dynamic_grid")(x)


def squeezed(x, w):
    """Batched rows times a weight per batch, the batch dimension squeezed out of the blocks."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    batch, rows, columns = x.shape
    return pl.pallas_call(
        kernel, grid=(batch, rows // 256),
        in_specs=[pl.BlockSpec((None, 256, columns), lambda b, i: (b, i, 0)),
                  pl.BlockSpec((None, 256, columns), lambda b, i: (b, 0, 0))],
        out_specs=pl.BlockSpec((None, 256, columns), lambda b, i: (b, i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="squeezed")(x, w)


def weight_kept(x, w):
    """Blocks of `x` pass by a whole weight whose index map the compiler cannot prove to be constant."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] + w_ref[0:1, :]

    rows, columns = x.shape
    steps = rows // 64
    return pl.pallas_call(
        kernel, grid=(steps,),
        in_specs=[pl.BlockSpec((64, columns), lambda i: (i, 0)),
                  pl.BlockSpec(w.shape, lambda i: (lax.div(i, jnp.int32(steps)), 0))],
        out_specs=pl.BlockSpec((64, columns), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="weight_kept")(x, w)


def add_whole(x, y):
    """Two whole arrays in, one out, no grid."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="add_whole")(x, y)


def sum_and_difference(x, y):
    """Two whole arrays in, two out, no grid."""
    def kernel(x_ref, y_ref, sum_ref, difference_ref):
        sum_ref[...] = x_ref[...] + y_ref[...]
        difference_ref[...] = x_ref[...] - y_ref[...]

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=(out, out), name="sum_and_difference")(x, y)


def gather_rows(rows, table):
    """Rows of a whole table, by prefetched scalars."""
    def kernel(rows_ref, table_ref, o_ref):
        i = pl.program_id(0)
        o_ref[...] = table_ref[pl.ds(pl.multiple_of(rows_ref[i] * 8, 8), 8), :]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(rows.shape[0],),
        in_specs=[pl.BlockSpec(table.shape, lambda i, rows_ref: (0, 0))],
        out_specs=pl.BlockSpec((8, table.shape[1]), lambda i, rows_ref: (i, 0)))
    return pl.pallas_call(kernel, grid_spec=spec, name="gather_rows",
                          out_shape=jax.ShapeDtypeStruct((8 * rows.shape[0], table.shape[1]), table.dtype))(rows, table)


def scaled_in_place(x, scale):
    """Writes over its first operand block by block; scale is whole."""
    def kernel(x_ref, scale_ref, o_ref):
        o_ref[...] = x_ref[...] * scale_ref[0:1, :]

    spec = pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // 256,), in_specs=[spec, pl.BlockSpec(scale.shape, lambda i: (0, 0))],
                          out_specs=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="scaled_in_place",
                          input_output_aliases={0: 0})(x, scale)


def i32(*shape):
    return array(*shape, dtype=jnp.int32)


def i8(*shape):
    return array(*shape, dtype=jnp.int8)

"""Kernels that run out of scoped VMEM and can do with less: by one buffer for a window, or by a color.

`modes` are the pipeline modes of a kernel's windows in order, inputs first; `interpret` runs the kernel on a CPU.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import array

DEFAULT = (None,) * 4


def matmul_relu(x, w, modes=DEFAULT, interpret=False):
    """A matmul whose left block stays while the right ones pass by: (rows, k) x (k, columns)."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = jnp.maximum(jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32), 0)

    (rows, k), columns = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel, grid=(rows // 128, columns // 128),
        in_specs=[pl.BlockSpec((128, k), lambda i, j: (i, 0), pipeline_mode=modes[0]),
                  pl.BlockSpec((k, 128), lambda i, j: (0, j), pipeline_mode=modes[1])],
        out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j), pipeline_mode=modes[2]),
        out_shape=jax.ShapeDtypeStruct((rows, columns), jnp.float32), name="matmul_relu", interpret=interpret)(x, w)


def bytes_through(x, rows, modes=DEFAULT, interpret=False):
    """int8 blocks of `rows` rows pass through; the result has a few rows of each."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[:32, :]

    steps = x.shape[0] // rows
    return pl.pallas_call(
        kernel, grid=(steps,),
        in_specs=[pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0), pipeline_mode=modes[0])],
        out_specs=pl.BlockSpec((32, x.shape[1]), lambda i: (i, 0), pipeline_mode=modes[1]), interpret=interpret,
        out_shape=jax.ShapeDtypeStruct((32 * steps, x.shape[1]), x.dtype), name="bytes_through")(x)


def pages(which, table, x, modes=DEFAULT, interpret=False):
    """Adds to every block of `x` the page of `table` that a prefetched scalar names; the page dimension is squeezed."""
    def kernel(which_ref, table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[...]

    _, block, columns = table.shape
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(x.shape[0] // block,),
        in_specs=[pl.BlockSpec((None, block, columns), lambda i, which_ref: (which_ref[i], 0, 0),
                               pipeline_mode=modes[0]),
                  pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0), pipeline_mode=modes[1])],
        out_specs=pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0), pipeline_mode=modes[2]))
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="pages",
                          interpret=interpret)(which, table, x)


def one_page(which, table, x):
    """`pages`, but the same page for every block."""
    def kernel(which_ref, table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] + table_ref[...]

    _, block, columns = table.shape
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(x.shape[0] // block,),
        in_specs=[pl.BlockSpec((None, block, columns), lambda i, which_ref: (which_ref[0], 0, 0)),
                  pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0))],
        out_specs=pl.BlockSpec((block, columns), lambda i, which_ref: (i, 0)))
    return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(which, table, x)


def dynamic_grid(steps, x, block=1024, modes=DEFAULT, interpret=False):
    """Doubles the first `steps` blocks of `x`."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(
        kernel, grid=(steps[0],), name="dynamic_grid", interpret=interpret,
        in_specs=[pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0), pipeline_mode=modes[0])],
        out_specs=pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0), pipeline_mode=modes[1]),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def squeezed(x, w, modes=DEFAULT, interpret=False):
    """Batched rows times a block of weights for each batch; the batch dimension is squeezed out of the blocks."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] * w_ref[...]

    (batch, rows, columns), block = x.shape, w.shape[1]
    return pl.pallas_call(
        kernel, grid=(batch, rows // block), name="squeezed", interpret=interpret,
        in_specs=[pl.BlockSpec((None, block, columns), lambda b, i: (b, i, 0), pipeline_mode=modes[0]),
                  pl.BlockSpec((None, block, columns), lambda b, i: (b, 0, 0), pipeline_mode=modes[1])],
        out_specs=pl.BlockSpec((None, block, columns), lambda b, i: (b, i, 0), pipeline_mode=modes[2]),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, w)


def weight_kept(x, w, modes=DEFAULT, interpret=False):
    """Blocks of `x` pass by a whole weight whose index map the compiler cannot prove to be constant."""
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] + w_ref[0:1, :]

    columns, steps = x.shape[1], x.shape[0] // 64
    return pl.pallas_call(
        kernel, grid=(steps,), name="weight_kept", interpret=interpret,
        in_specs=[pl.BlockSpec((64, columns), lambda i: (i, 0), pipeline_mode=modes[0]),
                  pl.BlockSpec(w.shape, lambda i: (lax.div(i, jnp.int32(steps)), 0), pipeline_mode=modes[1])],
        out_specs=pl.BlockSpec((64, columns), lambda i: (i, 0), pipeline_mode=modes[2]),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, w)


def in_place(x, y, block=512, target=lambda i: (i, 0), modes=DEFAULT, interpret=False):
    """Adds `y` to `x` and writes over `x`, at block `target(i)` in step `i`."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    shape = (block, x.shape[1])
    return pl.pallas_call(
        kernel, grid=(x.shape[0] // block,), name="in_place", interpret=interpret, input_output_aliases={0: 0},
        in_specs=[pl.BlockSpec(shape, lambda i: (i, 0), pipeline_mode=modes[0]),
                  pl.BlockSpec(shape, lambda i: (i, 0), pipeline_mode=modes[1])],
        out_specs=pl.BlockSpec(shape, target, pipeline_mode=modes[2]),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)


def in_pieces(rows, step):
    """Runs `step` for every 8 rows: the code of a whole array at once would take long to compile."""
    def piece(i, _):
        step(pl.ds(pl.multiple_of(i * 8, 8), 8))
        return 0

    lax.fori_loop(0, rows // 8, piece, 0)


def add_whole(x, y):
    """Two whole arrays in, one out, no grid."""
    def kernel(x_ref, y_ref, o_ref):
        def step(at):
            o_ref[at, :] = x_ref[at, :] + y_ref[at, :]

        in_pieces(x.shape[0], step)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="add_whole")(x, y)


def sum_and_difference(x, y):
    """Two whole arrays in, two out, no grid."""
    def kernel(x_ref, y_ref, sum_ref, difference_ref):
        def step(at):
            sum_ref[at, :] = x_ref[at, :] + y_ref[at, :]
            difference_ref[at, :] = x_ref[at, :] - y_ref[at, :]

        in_pieces(x.shape[0], step)

    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=(out, out), name="sum_and_difference")(x, y)


def gather_rows(rows, table):
    """Groups of eight rows of a whole table, chosen by prefetched scalars."""
    def kernel(rows_ref, table_ref, o_ref):
        first = pl.multiple_of(rows_ref[pl.program_id(0)] * 8, 8)
        o_ref[...] = table_ref[pl.ds(first, 8), :]

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(rows.shape[0],),
        in_specs=[pl.BlockSpec(table.shape, lambda i, rows_ref: (0, 0))],
        out_specs=pl.BlockSpec((8, table.shape[1]), lambda i, rows_ref: (i, 0)))
    out = jax.ShapeDtypeStruct((8 * rows.shape[0], table.shape[1]), table.dtype)
    return pl.pallas_call(kernel, grid_spec=spec, name="gather_rows", out_shape=out)(rows, table)


def scaled_in_place(x, scale):
    """Writes over its first operand block by block; `scale` is whole."""
    def kernel(x_ref, scale_ref, o_ref):
        o_ref[...] = x_ref[...] * scale_ref[0:1, :]

    spec = pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))
    whole = pl.BlockSpec(scale.shape, lambda i: (0, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // 256,), in_specs=[spec, whole], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="scaled_in_place",
                          input_output_aliases={0: 0})(x, scale)


def i32(*shape):
    return array(*shape, dtype=jnp.int32)


def i8(*shape):
    return array(*shape, dtype=jnp.int8)


def wide(chip):
    """Columns are this many times wider on chips whose default limit is 32 MiB, so that the kernels fail there too."""
    return 2 if chip in ("v6e", "tpu7x") else 1


#: name -> (kernel, arguments for a width). Each needs more than the chip's default limit, and less with one buffer for
#: some of its windows. Arrays are too large for XLA to place them in VMEM by itself, which would help too.
BUFFERED = {
    "matmul_relu": (matmul_relu, lambda s: (array(8192, 8192 * s), array(8192 * s, 8192))),
    "bytes_through": (lambda x: bytes_through(x, x.shape[0] // 2), lambda s: (i8(20480 * s, 1024),)),
    "pages": (pages, lambda s: (i32(64), array(64, 512, 1536 * s), array(32768, 1536 * s))),
    "dynamic_grid": (dynamic_grid, lambda s: (i32(1), array(32768, 1536 * s))),
    "squeezed": (squeezed, lambda s: (array(32, 1024, 3072 * s), array(32, 256, 3072 * s))),
    "weight_kept": (weight_kept, lambda s: (array(32768, 1024 * s), array(2304, 1024 * s))),
    "in_place": (in_place, lambda s: (array(32768, 2048 * s), array(32768, 2048 * s))),
}


def copy_whole(x):
    """A whole array in, a whole array out, no grid."""
    def kernel(x_ref, o_ref):
        def step(at):
            o_ref[at, :] = x_ref[at, :]

        in_pieces(x.shape[0], step)

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="copy_whole")(x)


#: The same for kernels that take an operand or result whole.
COLORED = {
    "copy_whole": (copy_whole, lambda s: (array(2560 * s, 1024),)),
    "add_whole": (add_whole, lambda s: (array(1536 * s, 1024), array(1536 * s, 1024))),
    "sum_and_difference": (sum_and_difference, lambda s: (array(1280 * s, 1024), array(1280 * s, 1024))),
    "gather_rows": (gather_rows, lambda s: (i32(4096), array(5120 * s, 1024))),
    "weight_kept": (weight_kept, lambda s: (array(512, 1024 * s), array(2304, 1024 * s))),
    "scaled_in_place": (scaled_in_place, lambda s: (array(1024, 1024 * s), array(4096, 1024 * s))),
}

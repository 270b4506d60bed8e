"""Kernels that a split would break: each is refused, with the reason it prints."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from library_kernels import flash_attention, matmul
from split_support import NewAxis, integers, refusal, rows_call

ROWS, COLUMNS, BLOCK = 32, 128, 16
X = integers(0, ROWS, COLUMNS)


def body(compute, **options):
    """A kernel on blocks of rows that stores `compute(x)`."""
    def kernel(x_ref, o_ref):
        o_ref[...] = compute(x_ref[...])

    return rows_call(kernel, **options)


def call(kernel, *, inputs=1, in_maps=None, out_map=lambda i: (i, 0), out_rows=ROWS, grid=(ROWS // BLOCK,), scratch=(),
         block=(BLOCK, COLUMNS), out_block=None, **options):
    """A kernel with its own index maps."""
    maps = in_maps or [lambda i: (i, 0)] * inputs
    fun = pl.pallas_call(
        kernel, grid=grid, in_specs=[pl.BlockSpec(block, m) for m in maps],
        out_specs=pl.BlockSpec(out_block or block, out_map), scratch_shapes=scratch,
        out_shape=jax.ShapeDtypeStruct((out_rows, COLUMNS), jnp.float32), **options)
    return lambda x: fun(*[x] * len(maps))


VMEM_BLOCK = pltpu.VMEM((BLOCK, COLUMNS), jnp.float32)


def accumulate(x_ref, o_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...]


def carried_scratch(x_ref, o_ref, s_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        s_ref[...] = jnp.zeros_like(s_ref)

    s_ref[...] += x_ref[...]
    o_ref[...] = s_ref[...]


def late_init(x_ref, o_ref, s_ref):
    @pl.when(pl.program_id(1) == 1)
    def _():
        s_ref[...] = x_ref[...]

    o_ref[...] = s_ref[...]


def half_init(x_ref, o_ref, s_ref):
    s_ref[:, :64] = x_ref[:, :64]
    o_ref[...] = s_ref[...]


def masked_init(x_ref, o_ref, s_ref):
    pl.store(s_ref, (slice(None), slice(None)), x_ref[...], mask=x_ref[...] > 0) if hasattr(pl, "store") else \
        pltpu.store(s_ref, x_ref[...], mask=x_ref[...] > 0)
    o_ref[...] = s_ref[...]


def added_to(x_ref, o_ref, s_ref):
    s_ref[...] += x_ref[...]
    o_ref[...] = s_ref[...]


def counter(x_ref, o_ref, n_ref):
    @pl.when(pl.program_id(0) == 0)
    def _():
        n_ref[0] = 0

    n_ref[0] += 1
    o_ref[...] = x_ref[...] * n_ref[0].astype(jnp.float32)


def init_by_data(x_ref, o_ref, s_ref):
    @pl.when(x_ref[0, 0] > 0)
    def _():
        s_ref[...] = x_ref[...]

    o_ref[...] = s_ref[...]


def init_in_while(x_ref, o_ref, s_ref):
    def one(i, _):
        s_ref[...] = x_ref[...]

    lax.fori_loop(0, pl.program_id(0), one, None)
    o_ref[...] = s_ref[...]


def halves(x_ref, o_ref):
    o_ref[:BLOCK // 2, :] = x_ref[BLOCK // 2:, :]
    o_ref[BLOCK // 2:, :] = x_ref[:BLOCK // 2, :]


def row_loop(x_ref, o_ref):
    def one(i, total):
        total = total + x_ref[pl.ds(i, 1), :]
        o_ref[pl.ds(i, 1), :] = total
        return total

    lax.fori_loop(0, BLOCK, one, jnp.zeros((1, COLUMNS), jnp.float32))


def chunk_sums(x_ref, o_ref, s_ref):
    s_ref[...] = jnp.zeros_like(s_ref)

    def one(i, _):
        s_ref[...] += x_ref[pl.ds(i * 8, 8), :]
        o_ref[pl.ds(i * 8, 8), :] = s_ref[...]

    lax.fori_loop(0, BLOCK // 8, one, None)


def chunks_backwards(x_ref, o_ref):
    def one(i, _):
        o_ref[pl.ds((1 - i) * 8, 8), :] = x_ref[pl.ds(i * 8, 8), :]

    lax.fori_loop(0, BLOCK // 8, one, None)


def three_chunks(x_ref, o_ref):
    def one(i, _):
        o_ref[pl.ds(i * 8, 8), :] = x_ref[pl.ds(i * 8, 8), :]

    lax.fori_loop(0, 3, one, None)


def single_row(x_ref, o_ref):
    o_ref[...] = x_ref[...] + x_ref[3, :][None, :]


def scalar_read(x_ref, o_ref):
    o_ref[...] = x_ref[...] * x_ref[0, 0]


def while_on_data(x_ref, o_ref):
    def go(c):
        return jnp.max(c) < 100

    o_ref[...] = lax.while_loop(go, lambda c: c + 1, x_ref[...])


def condition_on_block(x_ref, o_ref):
    x = x_ref[...]
    o_ref[...] = lax.cond(jnp.sum(x) > 0, lambda: x, lambda: -x)


def partial_store(x_ref, o_ref):
    o_ref[...] = x_ref[...]
    o_ref[:4, :] = jnp.zeros((4, COLUMNS), jnp.float32)


def transposed_mix(x):
    return x.reshape(COLUMNS, BLOCK).T


def random_bits(x_ref, o_ref):
    pltpu.prng_seed(pl.program_id(0))
    o_ref[...] = x_ref[...] + pltpu.prng_random_bits((BLOCK, COLUMNS)).astype(jnp.float32)


def manual_copy(x_ref, o_ref, s_ref, sem):
    copy = pltpu.make_async_copy(x_ref.at[pl.ds(pl.program_id(0) * BLOCK, BLOCK)], s_ref, sem)
    copy.start()
    copy.wait()
    o_ref[...] = s_ref[...]


def manual_copy_call(x):
    return pl.pallas_call(
        manual_copy, grid=(ROWS // BLOCK,), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0)), scratch_shapes=[VMEM_BLOCK, pltpu.SemaphoreType.DMA],
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))(x)


def copy_to_any(x_ref, o_ref, sem):
    copy = pltpu.make_async_copy(x_ref, o_ref.at[pl.ds(pl.program_id(0) * BLOCK, BLOCK)], sem)
    copy.start()
    copy.wait()


def copy_to_any_call(x):
    return pl.pallas_call(
        copy_to_any, grid=(ROWS // BLOCK,), in_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(memory_space=pl.ANY), scratch_shapes=[pltpu.SemaphoreType.DMA],
        out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))(x)


def printing(x_ref, o_ref):
    pl.debug_print("step")
    o_ref[...] = x_ref[...]


def waiting(x_ref, o_ref):
    pl.delay(10)
    o_ref[...] = x_ref[...]


def writes_input(x_ref, o_ref):
    x_ref[...] = x_ref[...] + 1
    o_ref[...] = x_ref[...]


def table_call(kernel, in_map, out_map):
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(ROWS // BLOCK,), in_specs=[pl.BlockSpec((BLOCK, COLUMNS), in_map)],
        out_specs=pl.BlockSpec((BLOCK, COLUMNS), out_map))
    fun = pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))
    return lambda x: fun(jnp.asarray([1, 0], jnp.int32), x)


def table_copy(table_ref, x_ref, o_ref):
    o_ref[...] = x_ref[...]


def copy(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def resident_call(x):
    """One row block under an outer axis: the output stays in place and adds up over it."""
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += x_ref[...]

    return pl.pallas_call(kernel, grid=(2, 1), in_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda o, i: (i, 0))],
                          out_specs=pl.BlockSpec((BLOCK, COLUMNS), lambda o, i: (i, 0)),
                          out_shape=jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32))(x)


def alias_revisited(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda o, i: (i, 0))
    return pl.pallas_call(kernel, grid=(2, 2), in_specs=[spec], out_specs=spec, input_output_aliases={0: 0},
                          out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))(x)


def two_lengths(x):
    """Two arrays that end in different sub-steps of the last block."""
    def kernel(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]
        p_ref[...] = x_ref[...]

    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(2,), in_specs=[spec], out_specs=[spec, spec],
                          out_shape=[jax.ShapeDtypeStruct((32, COLUMNS), jnp.float32),
                                     jax.ShapeDtypeStruct((20, COLUMNS), jnp.float32)])(x)


def runs_past(x):
    """A grid with a step wholly outside the array."""
    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    return pl.pallas_call(copy, grid=(3,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))(x)


def dynamic_grid(x, n):
    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
    return pl.pallas_call(copy, grid=(n,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))(x)


def vmapped(x):
    return jax.vmap(body(lambda v: v + 1))(jnp.stack([x, x]))


def scan_of_rows(x_ref, o_ref):
    _, rows = lax.scan(lambda c, row: (c + row, c + row), jnp.zeros((COLUMNS,), jnp.float32), x_ref[...])
    o_ref[...] = rows


def gathered(x_ref, o_ref):
    o_ref[...] = jnp.take(x_ref[...], jnp.arange(BLOCK)[::-1], axis=0)


def reshaped_ref(x_ref, o_ref):
    o_ref[...] = x_ref.reshape(BLOCK // 2, 2 * COLUMNS)[...].reshape(BLOCK, COLUMNS)


def bitcast_ref(x_ref, o_ref):
    o_ref[...] = x_ref.bitcast(jnp.int32)[...].astype(jnp.float32)


def captured_row_mask(x_ref, o_ref):
    turned = lax.broadcasted_iota(jnp.int32, (BLOCK, COLUMNS), 0).reshape(COLUMNS, BLOCK).T
    o_ref[...] = x_ref[...] + turned.astype(jnp.float32)


ROW_AXIS = ((0, 2),)
REFUSED = {
    # along the split dimension
    "cumsum of rows": (body(lambda v: jnp.cumsum(v, axis=0)), ROW_AXIS, "`cumsum` runs along the split dimension"),
    "cummax of rows": (body(lambda v: lax.cummax(v, axis=0)), ROW_AXIS, "`cummax` runs along"),
    "roll of rows": (body(lambda v: pltpu.roll(v, 1, 0)), ROW_AXIS, "`roll` runs along"),
    "strided roll": (body(lambda v: pltpu.roll(v, 1, 1, stride=1, stride_axis=0)), ROW_AXIS, "`roll` runs along"),
    "rows reversed": (body(lambda v: lax.rev(v, (0,))), ROW_AXIS, "`rev` runs along"),
    "rows sorted": (body(lambda v: lax.sort(v, dimension=0)), ROW_AXIS, "`sort` runs along"),
    "halves swapped": (body(lambda v: jnp.concatenate([v[8:], v[:8]], 0)), ROW_AXIS, "`concatenate` runs along"),
    "rows shifted by padding": (body(lambda v: jnp.pad(v[:-1], ((1, 0), (0, 0)))), ROW_AXIS, "split dimension"),
    "rows gathered": (rows_call(gathered), ROW_AXIS, "has no rule for a part"),
    "scan over rows": (rows_call(scan_of_rows), ROW_AXIS, "`scan` stacks its results"),
    # over the whole block
    "maximum of the block": (body(lambda v: v - jnp.max(v)), ROW_AXIS, "a read needs it"),
    "sum of columns": (body(lambda v: v + jnp.sum(v, 0, keepdims=True)), ROW_AXIS, "a read needs it"),
    "mean over the block": (body(lambda v: v / jnp.mean(jnp.abs(v))), ROW_AXIS, "a read needs it"),
    "argmax of columns": (body(lambda v: v + jnp.argmax(v, 0)[None, :].astype(v.dtype)), ROW_AXIS, "a read needs it"),
    "x times its transpose": (body(lambda v: jnp.dot(jnp.dot(v, v.T), v)), ROW_AXIS, "a read needs it"),
    "contraction over the rows": (body(lambda v: jnp.dot(v, jnp.dot(v.T, v))), ROW_AXIS, "a read needs it"),
    "while on the block's maximum": (rows_call(while_on_data), ROW_AXIS, "a read needs it"),
    "condition on the block's sum": (rows_call(condition_on_block), ROW_AXIS, "a read needs it"),
    # single rows, parts by constants, mixed orders
    "first row": (body(lambda v: v + v[:1]), ROW_AXIS, "a read needs it"),
    "one row read": (rows_call(single_row), ROW_AXIS, "a read needs it"),
    "one scalar read": (rows_call(scalar_read), ROW_AXIS, "a read needs it"),
    "halves by constant slices": (rows_call(halves), ROW_AXIS, "takes a part of a dimension that is split"),
    "rows in a loop": (rows_call(row_loop), ROW_AXIS, "carries values from chunk to chunk"),
    "chunks that add up": (call(chunk_sums, scratch=[pltpu.VMEM((8, COLUMNS), jnp.float32)]), ROW_AXIS, "stays whole"),
    "chunks written backwards": (rows_call(chunks_backwards), ROW_AXIS, "takes a part of a dimension that is split"),
    "three chunks in two parts": (rows_call(three_chunks, rows=48, block=24), ROW_AXIS, "does not divide by 2"),
    "first rows overwritten": (rows_call(partial_store), ROW_AXIS, "takes a part of a dimension that is split"),
    "reshape and transpose": (body(transposed_mix), ROW_AXIS, "mixes the split dimension"),
    "rows interleaved": (body(lambda v: jnp.swapaxes(v.reshape(2, BLOCK // 2, COLUMNS), 0, 1).reshape(v.shape)), ROW_AXIS,
                         "mixes the split dimension"),
    "iota of rows turned into columns": (rows_call(captured_row_mask), ROW_AXIS, "mixes the split"),
    "reference reshaped": (rows_call(reshaped_ref), ROW_AXIS, "bitcast, reshape or transpose"),
    "reference bitcast": (rows_call(bitcast_ref), ROW_AXIS, "bitcast, reshape or transpose"),
    # carried from step to step
    "output adds up": (call(accumulate, out_map=lambda i: (0, 0), out_rows=BLOCK), ROW_AXIS, "no output is cut"),
    "scratch adds up": (call(carried_scratch, scratch=[VMEM_BLOCK]), ROW_AXIS, "may carry values along grid axis 0"),
    "scratch initialised late": (call(late_init, grid=(2, 2), in_maps=[lambda i, j: (i, 0)], out_map=lambda i, j: (i, 0),
                                      scratch=[VMEM_BLOCK]), ROW_AXIS, "may carry values"),
    "scratch half initialised": (call(half_init, scratch=[VMEM_BLOCK]), ROW_AXIS, "may carry values"),
    "scratch never initialised": (call(added_to, scratch=[VMEM_BLOCK]), ROW_AXIS, "may carry values"),
    "scratch initialised by a mask": (call(masked_init, scratch=[VMEM_BLOCK]), ROW_AXIS, "may carry values"),
    "scratch initialised by data": (call(init_by_data, scratch=[VMEM_BLOCK]), ROW_AXIS, ""),
    "scratch initialised in a loop that may not run": (call(init_in_while, scratch=[VMEM_BLOCK]), ROW_AXIS,
                                                       "may carry values"),
    "counter in SMEM": (call(counter, scratch=[pltpu.SMEM((1,), jnp.int32)]), ROW_AXIS, "may carry values"),
    "output resident under an outer axis": (lambda x: resident_call(x[:BLOCK]), ((1, 2),),
                                            "may carry values along grid axis 1"),
    # index maps
    "output index shifted": (call(copy, out_map=lambda i: ((i + 1) % 2, 0)), ROW_AXIS, "index arithmetic"),
    "output index halved": (call(copy, out_map=lambda i: (i // 2, 0)), ROW_AXIS, "index arithmetic"),
    "output on the diagonal": (call(copy, block=(BLOCK, 64), out_map=lambda i: (i, i)), ROW_AXIS,
                               "uses grid axis 0 in 2 dimensions"),
    "output looked up in a table": (table_call(table_copy, lambda i, t: (i, 0), lambda i, t: (t[i], 0)), ROW_AXIS,
                                    "looks its block up in a prefetched table"),
    "input looked up in a table": (table_call(table_copy, lambda i, t: (t[i], 0), lambda i, t: (i, 0)), ROW_AXIS,
                                   "looks its block up in a prefetched table"),
    "input reached by arithmetic": (call(copy, in_maps=[lambda i: (1 - i, 0)]), ROW_AXIS, "index arithmetic"),
    "size computed at run time": (lambda x: dynamic_grid(x, jnp.sum(x[0] * 0).astype(jnp.int32) + 2), ROW_AXIS,
                                  "computed at run time"),
    "axis that vmap added": (vmapped, ROW_AXIS, "one that `vmap` added"),
    "arrays of different lengths": (two_lengths, ((0, 4),), "end in different steps"),
    "grid that runs past the array": (runs_past, ROW_AXIS, "ends before the last step"),
    # shared arrays and effects
    "shared array, shifted map": (call(lambda x, y, o: o.__setitem__(..., x[...] + y[...]), inputs=2,
                                       in_maps=[lambda i: (1 - i, 0), lambda i: (i, 0)], input_output_aliases={0: 0}),
                                  ROW_AXIS, "index arithmetic"),
    "shared array, whole input": (call(lambda x, y, o: o.__setitem__(..., y[...] + jnp.max(x[...])), inputs=2,
                                       input_output_aliases={0: 0}), ROW_AXIS, "not cut alike"),
    "shared array visited again": (alias_revisited, ((1, 2),), "visited again by grid axis 0"),
    "store into an input": (rows_call(writes_input), ROW_AXIS, "writes into input"),
    "random bits": (rows_call(random_bits), ROW_AXIS, "`prng_seed` has no rule"),
    "copy by hand": (manual_copy_call, ROW_AXIS, "has no rule"),
    "copy by hand to the output": (copy_to_any_call, ROW_AXIS, ""),
    "printing": (rows_call(printing), ROW_AXIS, "has no rule"),
    "waiting": (rows_call(waiting), ROW_AXIS, "has no rule"),
    # axes that are not there
    "contracted axis of a matmul": (lambda x: matmul(x, x.T, (16, 64, 16)), ((2, 2),), "no output is cut"),
    "key axis of flash attention": (lambda x: flash_attention(256, 128)(*[jnp.tile(x, (8, 1))[None, None]] * 3),
                                    ((3, 2),), "no block moves"),
    "head axis of flash attention": (lambda x: flash_attention(256, 128)(*[jnp.tile(x, (8, 1))[None, None]] * 3),
                                     ((1, 2),), "does not divide by 2"),
    "an axis the grid lacks": (body(lambda v: v), ((3, 2),), "the grid has 1 axes"),
    "a block the parts do not divide": (body(lambda v: v), ((0, 3),), "which 3 parts do not divide"),
    "a new axis where blocks move over a ragged end": (body(lambda v: v, rows=ROWS + 8), ((NewAxis(0, 0), 2),),
                                                       "moves with the grid over an array that ends inside a block"),
    "a new axis along a reduced dimension": (body(lambda v: v - jnp.max(v, 1, keepdims=True)), ((NewAxis(0, 1), 2),),
                                             "a read needs it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_proved_is_refused_with_its_reason(name):
    """The kernel is refused along this axis, and the reason says what stood in the way."""
    fun, axes, reason = REFUSED[name]
    said = refusal(fun, (X,), *axes)
    assert reason in said and len(said) > 20

"""Programs that compile in a tenth of a second, whether their kernels fit or not: large windows, little code."""


import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import array, lower_with

ROWS, COLUMNS = 32768, 1024
ARRAY = array(ROWS, COLUMNS)  # 128 MiB: too much for XLA to keep in VMEM by itself


def touch(x, block, name="touch"):
    """A kernel with windows of `block` KiB x 4 for input and output, of which it reads and writes eight rows."""
    def kernel(x_ref, o_ref):
        o_ref[:8, :] = x_ref[:8, :] * 2

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // block,), in_specs=[spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name=name)(x)


def fits(x):
    """0.5 MiB of windows."""
    return touch(x, 32, name="fits")


def needs_more(x):
    """32 MiB of windows: more than the default limit of v5e, less than the chip."""
    return touch(x, 2048, name="needs_more")


def needs_much_more(x):
    """64 MiB of windows."""
    return touch(x, 4096, name="needs_much_more")


def hopeless(x):
    """160 MiB of scratch, more than any chip has, which no remedy makes smaller."""
    def kernel(x_ref, o_ref, scratch):
        i = pl.program_id(0)
        scratch[pl.ds(i * 8, 8), :] = x_ref[...]
        rows = scratch[pl.ds(((i * 7) % 4) * 8, 8), :]
        o_ref[...] = rows - jnp.sum(rows, axis=1, keepdims=True)  # every column needs all others: nothing to split

    spec = pl.BlockSpec((8, COLUMNS), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(4,), in_specs=[spec], out_specs=spec,
                          scratch_shapes=[pltpu.VMEM((40960, COLUMNS), jnp.float32)],
                          out_shape=jax.ShapeDtypeStruct((32, COLUMNS), jnp.float32), name="hopeless")(x)


def mixed(x):
    """Three kernels, two of which do not fit, one of these in a loop."""
    y = jax.lax.fori_loop(0, 3, lambda _, c: needs_more(c), x)
    return fits(y) + needs_much_more(jnp.sin(x))


def no_kernel(x):
    return jnp.tanh(x).sum(axis=1)


def lower(fun, number, chip="v5e"):
    """A lowering of its own for each number."""
    def numbered(x):
        return fun(x + number)

    numbered.__name__ = f"{fun.__name__}_{number}"
    return lower_with(jax.jit(numbered), ARRAY, chip=chip)


def changes_of(repairs) -> dict[str, list]:
    """Program -> what was changed in it."""
    return {repair.program: [(c.kernel, c.remedy, repr(c.data)) for c in repair.changes] for repair in repairs}



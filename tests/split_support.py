"""Splits kernels of traced programs and runs both programs in interpret mode."""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from jax_vmem_guard.interpret import interpreted
from jax_vmem_guard.remedies.splitting import NewAxis, Refused, Split, apply_splits, find_pallas_calls

__all__ = ["NewAxis", "Refused", "Split", "apply_splits", "find_pallas_calls"]


def integers(seed, *shape, dtype=jnp.float32, low=-3, high=4):
    """Integer-valued data: sums and products of it are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(low, high, shape), dtype)


def floats(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def traced(fun, *args):
    return jax.make_jaxpr(fun)(*args)


def run(closed_jaxpr, *args):
    """The program's results, its kernels interpreted."""
    fun = jax.extend.core.jaxpr_as_fun(interpreted(closed_jaxpr))
    return [np.asarray(x) for x in jax.jit(fun)(*jax.tree.leaves(args))]


def call_named(closed_jaxpr, name=""):
    """The first kernel whose name holds `name`."""
    return next(site for site in find_pallas_calls(closed_jaxpr) if name in site.name)


def split(closed_jaxpr, *axes, name=""):
    """The program with one kernel split along (axis, k) pairs."""
    return apply_splits(closed_jaxpr, {call_named(closed_jaxpr, name).path: Split(axes=axes)})


def same(closed_jaxpr, changed, *args, tolerance=0.0):
    """Whether both programs give the same results: bit by bit, or within `tolerance` of the largest value."""
    before, after = run(closed_jaxpr, *args), run(changed, *args)
    assert len(before) == len(after)
    for want, got in zip(before, after, strict=True):
        assert want.shape == got.shape and want.dtype == got.dtype
        if tolerance == 0.0:
            np.testing.assert_array_equal(got, want)
        else:
            scale = max(1.0, float(np.max(np.abs(want.astype(np.float64)), initial=0.0)))
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), atol=tolerance * scale, rtol=0)
    return True


def refusal(fun, args, *axes, name=""):
    """The reason why a split is refused; fails where it is accepted."""
    try:
        split(traced(fun, *args), *axes, name=name)
    except Refused as refused:
        return refused.reason
    raise AssertionError(f"the split {axes} was accepted")


def rows_call(kernel, rows=32, columns=128, block=16, dtype=jnp.float32, inputs=1, out_dtype=None, **options):
    """A function of `inputs` arrays (rows, columns) that runs `kernel` on blocks of rows."""
    spec = pl.BlockSpec((block, columns), lambda i: (i, 0))
    call = pl.pallas_call(kernel, grid=(-(-rows // block),), in_specs=[spec] * inputs, out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct((rows, columns), out_dtype or dtype), **options)
    return lambda *arrays: call(*arrays)


def interpreted_call(closed_jaxpr, *args):
    """The program's first result, its kernels interpreted, compiled fast rather than well."""
    fun = jax.extend.core.jaxpr_as_fun(interpreted(closed_jaxpr))
    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    compiled = jax.jit(fun).lower(*args).compile(compiler_options=options)
    return np.asarray(compiled(*args)[0])

"""Functions with declared choices, and programs that hold them, for chips where only a small block fits.

On v4, which has 16 MiB, `add` of float32 rows of 4096 needs 48 MiB with blocks of 512 rows, 24 with 256, 12 with 128.
"""

import functools

import jax
import jax.numpy as jnp
from kernels_on_chips import add, array, lower_with

import jax_vmem_guard as vmem_guard

ARRAY = array(8192, 4096)
LARGE, MIDDLE, SMALL = 512, 256, 128
blocked_add = vmem_guard.tunable(add, block=[LARGE, MIDDLE, SMALL])


def compile_guarded(fun, *arguments, chip="v4", policy=None, compiler_options=None, **options):
    lowered = lower_with(vmem_guard.jit(fun, policy=policy, **options), *arguments, chip=chip)
    return lowered.compile(compiler_options=compiler_options)


def choices_taken(repair):
    """Index of the choice for each declared function a repair changed."""
    return [change.data["choice"] for change in repair.changes if change.remedy in ("tunable", "fallback")]


def _doubling(x, block):
    @jax.custom_vjp
    def double(x):
        return add(x, x, block=block, name="forward")

    double.defvjp(lambda x: (double(x), None), lambda _, g: (add(g, g, block=block, name="backward"),))
    return double(x)


#: A kernel of one's own with a kernel for its gradient; one choice for both.
doubling = vmem_guard.tunable(_doubling, block=[LARGE, SMALL])


def under_grad(x):
    return jax.grad(lambda y: jnp.sum(jnp.sin(doubling(y))))(x)


def under_vmap(x):
    return jax.vmap(lambda y: blocked_add(y, y))(x.reshape(2, 4096, 4096))


def under_scan(x):
    return jax.lax.scan(lambda c, _: (blocked_add(c, c), None), x, None, length=3)[0]


def under_grad_of_scan(x):
    def loss(y):
        return jnp.sum(jnp.cos(jax.lax.scan(lambda c, _: (jnp.sin(doubling(c)), None), y, None, length=2)[0]))

    return jax.grad(loss)(x)


def under_cond(x):
    return jax.lax.cond(x[0, 0] > 0, lambda y: blocked_add(y, y), lambda y: y * 2, x)


def under_remat(x):
    return jax.grad(lambda y: jnp.sum(jnp.sin(jax.checkpoint(lambda z: jnp.sin(doubling(z)))(y))))(x)


def under_nested_jit(x):
    return jax.jit(lambda y: jax.jit(lambda z: blocked_add(z, z))(y))(x)


def under_vmap_of_grad(x):
    one = jax.grad(lambda y: jnp.sum(jnp.sin(doubling(y))))
    return jax.vmap(one)(x.reshape(2, 4096, 4096))


TRANSFORMED = (under_grad, under_vmap, under_scan, under_grad_of_scan, under_cond, under_remat, under_nested_jit,
               under_vmap_of_grad)


@functools.partial(jax.jit, static_argnames="rows")
def with_static_rows(x, *, rows):
    return blocked_add(x[:rows], x[:rows])

"""Kernels that do not fit v4's 16 MiB compile there once they are split: the real compiler says so."""

import jax
import jax.extend.core
import jax.numpy as jnp
import kernels_on_chips
import pytest
from jax.experimental import pallas as pl
from library_kernels import LARGE
from split_support import NewAxis, Split, apply_splits, find_pallas_calls, traced

#: The smallest splits that fit v4, found by trying 2, 4, 8, ...
FITTING = {
    "flash forward": {"_flash": ((2, 4),)},
    "flash dq": {"_flash_attention_kernel": ((2, 8),), "dkv": ((2, 8),), "dq": ((2, 8),)},
    "splash forward": {"splash": ((1, 4),)},
    "splash dq": {"fwd": ((1, 4),), "dkv": ((0, 4),), "dq": ((1, 4),)},
    "gmm": {"kernel": ((0, 8),)},
    "ops matmul": {"matmul": ((0, 4), (1, 4))},
    "matmul": {"matmul": ((0, 2), (1, 4))},
    "softmax": {"rows": ((0, 8),)},
    "layernorm": {"rows": ((0, 4),)},
    "rope": {"rows": ((0, 4),)},
}
QUICK = ("gmm", "softmax", "layernorm", "splash forward")


def compiled(closed_jaxpr, shapes, chip):
    """The executable for a chip that is not here; the compiler's error where it does not fit."""
    sharding = jax.sharding.SingleDeviceSharding(kernels_on_chips.device(chip))
    args = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s in shapes]
    return jax.jit(jax.extend.core.jaxpr_as_fun(closed_jaxpr)).lower(*args).compile()


def fits_once_split(name, chip="v4", most=16 << 20):
    case = LARGE[name]
    program = traced(case.fun, *case.shapes)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem|memory"):
        compiled(program, case.shapes, chip)
    splits = {site.path: Split(axes=next(axes for part, axes in FITTING[name].items() if part in site.name))
              for site in find_pallas_calls(program)}
    used = kernels_on_chips.used_by_kernels(compiled(apply_splits(program, splits), case.shapes, chip))
    assert used and max(used) <= most


@pytest.mark.parametrize("name", QUICK)
def test_split_kernels_compile_where_they_ran_out_of_memory(name):
    """Out of memory on v4; split, it compiles and uses less than 16 MiB."""
    fits_once_split(name)


def test_above_the_capacity_of_tpu7x():
    """A softmax that needs 79.8 MiB, more than tpu7x has at any limit, fits its default limit once split."""
    fits_once_split("softmax", chip="tpu7x", most=32 << 20)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FITTING if name not in QUICK])
def test_more_split_kernels_compile_where_they_ran_out_of_memory(name):
    """The same for kernels whose first compile takes long."""
    fits_once_split(name)


def test_a_kernel_without_a_grid_compiles_once_it_has_one():
    """A kernel on whole arrays of 48 MiB gets a grid and fits v4."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    shapes = [jax.ShapeDtypeStruct((4096, 1024), jnp.float32)] * 2
    program = traced(lambda x, y: pl.pallas_call(kernel, out_shape=shapes[0])(x, y), *shapes)
    (site,) = find_pallas_calls(program)
    assert site.grid == ()
    changed = apply_splits(program, {site.path: Split(axes=((NewAxis(0, 1), 4), (NewAxis(0, 0), 4)))})
    assert max(kernels_on_chips.used_by_kernels(compiled(changed, shapes, "v4"))) <= 16 << 20

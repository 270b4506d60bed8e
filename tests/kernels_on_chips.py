"""Compiles small kernels for chips that are not here, and reads back what scoped VMEM they use."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental import topologies

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.remedies import MODULE_REMEDIES

MiB = 1 << 20
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.cache
def device(chip):
    return topologies.get_topology_desc(platform="tpu", topology_name=chip_named(chip).topology).devices[0]


def lower_with(jitted, *arguments, chip="v5e"):
    """A jitted function lowered for a chip."""
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    return jitted.lower(*[jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments])


def lower(fun, *arguments, chip="v5e"):
    """`fun` lowered for a chip: a `_jax.Program`."""
    computation = lower_with(jax.jit(fun), *arguments, chip=chip)._lowering
    # Other tests may have put the guard in the way: here the compiler speaks for itself.
    return _jax.Program(computation, inspect.unwrap(type(computation).compile))


def only_kernel(program):
    """The record of the one kernel a program has."""
    (kernel,) = read_kernels(program.module)
    return kernel


def with_changes(program, *changes):
    """A copy of a program's module with changes made to all its kernels."""
    def change(_, config):
        for one in changes:
            MODULE_REMEDIES[one.remedy].apply(config, one)
        return True

    return custom_call.edit(program.module, change)


def used_by_kernels(executable):
    """Scoped VMEM bytes of every kernel, or fusion around one, in an executable."""
    text = executable.as_text() if hasattr(executable, "as_text") else executable.hlo_modules()[0].to_string()
    used = []
    for instruction in re.split(r"\n\s+(?:ROOT )?%", text):
        if "tpu_custom_call" in instruction:
            size = re.search(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"0","size":"(\d+)"',
                             instruction)
            used.append(int(size.group(1)) if size else 0)
    return used


def add(x, y, block=256, name="add"):
    """Elementwise sum of two (rows, columns) arrays in blocks of `block` rows."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // block,), in_specs=[spec, spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name=name)(x, y)


def add_in_place(x, y, block=256):
    """`add` that writes over its first operand."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(kernel, grid=(x.shape[0] // block,), in_specs=[spec, spec], out_specs=spec,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), input_output_aliases={0: 0})(x, y)


def copy_whole(x):
    """A kernel without a grid: the whole array in, the whole array out."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

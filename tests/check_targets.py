"""Targets that the tests of `check` name: programs of every kind of fate."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def scale_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2


def scale(x, rows=None):
    """x * 2 by a kernel with blocks of `rows` rows (all of them if None); an elementwise block is cheap to compile."""
    rows = rows or x.shape[0]
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(scale_kernel, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=block,
                          out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), name="scale")(x)


def array(rows, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((rows, 1024), dtype)


def small():
    """Two windows of 64 KiB, twice each: fits everywhere."""
    return scale, (array(64), 16)


def large():
    """Two windows of 8 MiB, twice each: 32 MiB."""
    return scale, (array(4096), 2048)


def several():
    yield scale, (array(64), 16)
    yield scale, (array(4096), 2048)


def named():
    return {"little": (scale, (array(64), 16)), "much": (scale, (array(4096),), {"rows": 2048})}


def aborts():
    """libtpu ends the process on a CHECK when a cumsum gets almost no scoped VMEM."""

    def total(x):
        return jnp.cumsum(x, axis=0)

    return jax.jit(total, compiler_options={"xla_tpu_scoped_vmem_limit_kib": "1"}), (array(4096),)


def eats_memory():
    def hungry(x):
        kept = []
        while True:
            kept.append(np.ones((1 << 24,), np.uint8))
            if len(kept) > 4096:
                return x

    return hungry, (array(64),)


def never_ends():
    def endless(x):
        threading.Event().wait()

    return endless, (array(64),)


def mixed_fates():
    """Good programs with bad ones between them."""
    yield small()
    yield aborts()
    yield large()
    yield never_ends()
    yield eats_memory()
    yield small()


def sharded():
    """Four devices of this machine stand for four chips."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))
    return _sharded_over(mesh), (jax.ShapeDtypeStruct((256, 1024), jnp.float32,
                                                      sharding=NamedSharding(mesh, PartitionSpec("x"))),)


def sharded_on(devices):
    """Built for the topology's own chips."""
    mesh = Mesh(np.array(devices[:4]), ("x",))
    return _sharded_over(mesh), (jax.ShapeDtypeStruct((256, 1024), jnp.float32,
                                                      sharding=NamedSharding(mesh, PartitionSpec("x"))),)


def sharded_abstractly():
    """A mesh without devices, in the `shard_map` and in the arguments' shardings."""
    mesh = jax.sharding.AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    return _sharded_over(mesh), (jax.ShapeDtypeStruct((256, 1024), jnp.float32,
                                                      sharding=NamedSharding(mesh, PartitionSpec("x"))),)


def _sharded_over(mesh):
    return jax.shard_map(scale, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False)


def asks_the_chip():
    """As many rows as a sixteenth of the chip's VMEM holds."""

    def scale_by_chip(x):
        rows = pltpu.get_tpu_info().vmem_capacity_bytes // 16 // (x.shape[1] * 4)
        return scale(x, rows)

    return scale_by_chip, (array(16384),)


def chooses_by_device_kind():
    """A kernel of JAX's that looks up its blocks by the kind of `jax.devices()[0]`."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def shape(*dimensions, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    return ragged_paged_attention, (
        shape(16, 8, 128), shape(8, 16, 4, 128), shape(2, dtype=jnp.int32), shape(2, 4, dtype=jnp.int32),
        shape(3, dtype=jnp.int32), shape(1, dtype=jnp.int32))


def interpreted():
    def scale_here(x):
        return pl.pallas_call(scale_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
                              name="scale")(x)

    return scale_here, (array(64),)


def breaks():
    def broken(x):
        raise ZeroDivisionError("the target's own fault")

    return broken, (array(64),)


def wrong():
    return 7

"""A training script that nobody adapted: everything a script may do with `jit` before and while it trains.

Run by the tests of `rehearse`, on four CPU devices. Its last line says that it got there.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import device_put, devices, jit, lax, make_mesh, shard_map  # bound before any rehearsal is there
from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention
from jax.sharding import AxisType, NamedSharding, PartitionSpec

BLOCK = int(sys.argv[1])
BLOCKS = BlockSizes(block_q=BLOCK, block_k_major=BLOCK, block_k=BLOCK, block_b=1)
KEY = jax.random.key(0)
x = jax.random.normal(KEY, (1, 1, BLOCK, 128), jnp.bfloat16)


def attend(x):
    return flash_attention(x, x, x, causal=True, block_sizes=BLOCKS)


def loss(scale, x):
    return jnp.mean(attend(x * scale).astype(jnp.float32) ** 2)


@jit
def forward(x):
    return attend(x)


@functools.partial(jit, donate_argnums=0)
def accumulate(scale, batches):
    """Gradient accumulation: the kernel and its transpose inside a scan. XLA attention has no backward blocks here."""

    def one(total, batch):
        return total + jnp.mean(attend(batch * lax.stop_gradient(scale)).astype(jnp.float32)), None

    total, _ = lax.scan(one, jnp.float32(0), batches)
    return scale - 0.1 * total.astype(scale.dtype)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.mix = nnx.Linear(128, 128, rngs=rngs, dtype=jnp.bfloat16)

    def __call__(self, x):
        return attend(self.mix(x))


@nnx.jit
def apply(model, x):
    return model(x).sum()


forward(x).block_until_ready()
compiled = jit(lambda x: attend(x) + 1).lower(x).compile()  # ahead of time
compiled(x).block_until_ready()
print("accumulated", float(accumulate(jnp.bfloat16(1), jnp.stack([x, x]))))
print("nnx", float(apply(Model(nnx.Rngs(0)), x)))
mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
batch = device_put(jnp.concatenate([x] * 4), NamedSharding(mesh, PartitionSpec("data")))
sharded = jit(shard_map(attend, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"),
                        check_vma=False))(batch)
np.testing.assert_allclose(np.asarray(sharded[2], np.float32), np.asarray(forward(x)[0], np.float32))
print("eager", float(jnp.sum(attend(x)[0, 0, 0])))
assert len(devices()) == 4
print("the last line")

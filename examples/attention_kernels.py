"""JAX's own attention kernels with blocks that are too large for some chips: a target for `jax-vmem-guard check`.

    jax-vmem-guard check examples/attention_kernels.py:cases --topology v4 --topology v5e --topology v6e --html vmem.html
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import flash_attention as flash
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

BLOCK, HEADS, LENGTH, HEAD_DIM = 2048, 2, 4096, 128


def _shape(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def flash_attention(q, k, v):
    sizes = flash.BlockSizes(block_q=BLOCK, block_k_major=BLOCK, block_k=BLOCK, block_b=1)
    return flash.flash_attention(q, k, v, causal=True, block_sizes=sizes)


def splash_attention(q, k, v):
    sizes = splash.BlockSizes(
        block_q=BLOCK, block_kv=BLOCK, block_kv_compute=BLOCK, block_q_dkv=BLOCK, block_kv_dkv=BLOCK,
        block_kv_dkv_compute=BLOCK, block_q_dq=BLOCK, block_kv_dq=BLOCK)
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
    return splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)(q, k, v)


def splash_attention_gradient(q, k, v):
    def loss(q, k, v):
        return splash_attention(q, k, v).astype(jnp.float32).sum()

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


def cases():
    """Flash and splash attention with blocks of 2048, and ragged paged attention with its default blocks."""
    qkv = (_shape(1, HEADS, LENGTH, HEAD_DIM),) * 3
    yield flash_attention, qkv
    yield splash_attention, tuple(_shape(*x.shape[1:]) for x in qkv)
    yield splash_attention_gradient, tuple(_shape(*x.shape[1:]) for x in qkv)
    yield ragged_paged_attention, (
        _shape(128, 32, HEAD_DIM), _shape(256, 128, 16, HEAD_DIM), _shape(8, dtype=jnp.int32),
        _shape(8, 32, dtype=jnp.int32), _shape(9, dtype=jnp.int32), _shape(1, dtype=jnp.int32))

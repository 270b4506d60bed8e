"""Kernels of JAX's own libraries and a few of our own, at any size: (function, arguments, kernel name, axis)."""

import importlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")
megablox = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
ops_matmul = importlib.import_module("jax.experimental.pallas.ops.tpu.matmul")
splash = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel")
splash_mask = importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, the shapes of its arguments, and the kernel and axis that a test splits."""

    fun: Any
    shapes: tuple[Any, ...]
    kernel: str
    axis: Any


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def flash_attention(length, block, causal=True, grad=False, chunk=None, segments=False):
    sizes = dict.fromkeys(("block_q", "block_k_major", "block_k", "block_q_major_dkv", "block_k_major_dkv",
                           "block_k_dkv", "block_q_dkv", "block_k_major_dq", "block_k_dq", "block_q_dq"), block)
    if chunk is not None:
        sizes |= {"block_k": chunk, "block_k_dkv": chunk, "block_k_dq": chunk, "block_q_dkv": chunk}
    blocks = flash.BlockSizes(block_b=1, **sizes)

    def fun(q, k, v):
        ids = flash.SegmentIds(*(jnp.arange(length)[None] // (length // 3 + 1),) * 2) if segments else None
        return flash.flash_attention(q, k, v, segment_ids=ids, causal=causal, block_sizes=blocks)

    if grad:
        forward = fun

        def fun(q, k, v):
            return jax.grad(lambda *a: forward(*a).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v)

    return fun


def flash_case(length, block, kernel="_flash_attention_kernel", axis=2, **options):
    return Case(fun=flash_attention(length, block, grad=kernel != "_flash_attention_kernel", **options),
                shapes=(array(1, 1, length, 128),) * 3, kernel=kernel, axis=axis)


def splash_attention(length, block, grad=False):
    mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((length, length)) for _ in range(2)])
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
             "block_q_dq", "block_kv_dq")
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=splash.BlockSizes(**dict.fromkeys(names, block)))
    return jax.grad(lambda *a: kernel(*a).sum(), argnums=(0, 1, 2)) if grad else kernel


def splash_case(length, block, kernel, axis, grad):
    return Case(fun=splash_attention(length, block, grad=grad), shapes=(array(2, length, 128),) * 3, kernel=kernel,
                axis=axis)


def gmm_case(m, k, n, tiling, transpose_rhs=False):
    def fun(lhs, rhs):
        sizes = jnp.asarray([m // 4, m // 2 - 3, m - m // 4 - m // 2 + 3], jnp.int32)
        return megablox.gmm(lhs, rhs, sizes, tiling=tiling, transpose_rhs=transpose_rhs)

    return Case(fun=fun, shapes=(array(m, k), array(3, *((n, k) if transpose_rhs else (k, n)))), kernel="kernel", axis=0)


def ops_matmul_case(m, k, n, block, block_k, axis):
    def fun(x, y):
        return ops_matmul.matmul(x, y, block_shape=block, block_k=block_k)

    return Case(fun=fun, shapes=(array(m, k), array(k, n)), kernel="matmul", axis=axis)


def matmul_kernel(x_ref, y_ref, o_ref, acc_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        o_ref[...] = acc_ref[...].astype(o_ref.dtype)


def matmul(x, y, block):
    bm, bk, bn = block
    return pl.pallas_call(
        matmul_kernel, grid=(x.shape[0] // bm, y.shape[1] // bn, x.shape[1] // bk),
        in_specs=[pl.BlockSpec((bm, bk), lambda i, j, k: (i, k)), pl.BlockSpec((bk, bn), lambda i, j, k: (k, j))],
        out_specs=pl.BlockSpec((bm, bn), lambda i, j, k: (i, j)), name="matmul",
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)])(x, y)


def matmul_case(m, k, n, block, axis):
    return Case(fun=lambda x, y: matmul(x, y, block), shapes=(array(m, k), array(k, n)), kernel="matmul", axis=axis)


def rows_case(kernel, rows, columns, block, dtype=jnp.float32):
    spec = pl.BlockSpec((block, columns), lambda i: (i, 0))

    def fun(x):
        return pl.pallas_call(kernel, grid=(-(-rows // block),), in_specs=[spec], out_specs=spec, name="rows",
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    return Case(fun=fun, shapes=(array(rows, columns, dtype=dtype),), kernel="rows", axis=0)


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    o_ref[...] = (e / jnp.sum(e, axis=-1, keepdims=True)).astype(o_ref.dtype)


def layernorm_kernel(x_ref, o_ref):
    x = x_ref[...].astype(jnp.float32)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    centred = x - mean
    o_ref[...] = (centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-6)).astype(o_ref.dtype)


def rope_case(length, width, block):
    def kernel(x_ref, o_ref):
        rows = pl.program_id(0) * block + jax.lax.broadcasted_iota(jnp.int32, (block, width // 2), 0)
        frequency = jnp.exp(jax.lax.broadcasted_iota(jnp.int32, (block, width // 2), 1).astype(jnp.float32)
                            * np.float32(-9.2 / (width // 2)))
        angle = rows.astype(jnp.float32) * frequency
        left, right = x_ref[:, :width // 2], x_ref[:, width // 2:]
        o_ref[:, :width // 2] = left * jnp.cos(angle) - right * jnp.sin(angle)
        o_ref[:, width // 2:] = right * jnp.cos(angle) + left * jnp.sin(angle)

    return rows_case(kernel, length, width, block)


SMALL = {
    "flash forward": flash_case(512, 256),
    "flash forward, not causal": flash_case(512, 256, causal=False),
    "flash forward, segments": flash_case(512, 256, segments=True),
    "flash forward, one step": flash_case(256, 256),
    "flash dq": flash_case(512, 256, kernel="_flash_attention_dq_kernel"),
    "flash dkv": flash_case(512, 256, kernel="_flash_attention_dkv_kernel"),
    "flash dkv, chunked": flash_case(1024, 512, kernel="_flash_attention_dkv_kernel", chunk=256),
    "splash forward": splash_case(512, 256, "splash_mha_fwd", 1, False),
    "splash forward with residuals": splash_case(512, 256, "splash_mha_fwd", 1, True),
    "splash dq": splash_case(512, 256, "splash_mha_dq", 1, True),
    "splash dkv": splash_case(512, 256, "splash_mha_dkv", 0, True),
    "gmm": gmm_case(256, 128, 256, (128, 128, 256)),
    "gmm, transposed": gmm_case(256, 128, 256, (128, 128, 256), transpose_rhs=True),
    "ops matmul, rows": ops_matmul_case(256, 256, 256, (128, 128), 128, 0),
    "ops matmul, columns": ops_matmul_case(256, 256, 512, (128, 256), 128, 1),
    "matmul, rows": matmul_case(64, 128, 256, (32, 64, 128), 0),
    "matmul, columns": matmul_case(64, 128, 512, (32, 64, 256), 1),
    "softmax": rows_case(softmax_kernel, 64, 128, 32),
    "layernorm": rows_case(layernorm_kernel, 64, 128, 32),
    "rope": rope_case(64, 256, 32),
}

BF16 = jnp.bfloat16

#: Too large for v4's 16 MiB as they stand.
LARGE = {
    "flash forward": flash_case(4096, 2048),
    "flash dq": flash_case(2048, 2048, kernel="_flash_attention_dq_kernel"),
    "flash dkv": flash_case(2048, 2048, kernel="_flash_attention_dkv_kernel"),
    "splash forward": splash_case(4096, 2048, "splash_mha_fwd", 1, False),
    "splash dq": splash_case(2048, 2048, "splash_mha_dq", 1, True),
    "splash dkv": splash_case(2048, 2048, "splash_mha_dkv", 0, True),
    "gmm": gmm_case(512, 2048, 2048, (512, 2048, 2048)),
    "ops matmul": ops_matmul_case(2048, 2048, 2048, (2048, 2048), 1024, 1),
    "matmul": matmul_case(2048, 2048, 2048, (1024, 2048, 1024), 1),
    "softmax": rows_case(softmax_kernel, 2048, 8192, 512),
    "layernorm": rows_case(layernorm_kernel, 4096, 4096, 1024, dtype=BF16),
    "rope": rope_case(4096, 1024, 2048),
}

"""Kernels whose need is measured: JAX's own at several block sizes, and small ones of many kinds.

Each family is a function `(**sizes) -> (fun, [(shape, dtype), ...])` with the sizes it is measured at. Families marked
`held_back` were chosen before the model of `spills.py` was first fitted and are never used to fit it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

bf16, f32, i32, i8 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.int8
Arrays = list[tuple[tuple[int, ...], Any]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of kernel: how to build it, and the sizes at which it is measured."""

    name: str
    build: Callable[..., tuple[Callable[..., Any], Arrays]]
    sizes: tuple[dict[str, Any], ...]
    held_back: bool


FAMILIES: dict[str, Family] = {}


def family(*sizes: dict[str, Any], held_back: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        FAMILIES[build.__name__] = Family(name=build.__name__, build=build, sizes=sizes, held_back=held_back)
        return build
    return register


def call(body: Any, out: Any, grid: tuple[int, ...], ins: Any, outs: Any, scratch: Any = (), **options: Any) -> Any:
    return pl.pallas_call(body, out_shape=out, grid=grid, in_specs=ins, out_specs=outs, scratch_shapes=list(scratch),
                          **options)


def rows_of(block: int, *rest: int) -> pl.BlockSpec:
    """A block of rows, whole in all other dimensions."""
    return pl.BlockSpec((block, *rest), lambda i: (i,) + (0,) * len(rest))


def whole(*shape: int) -> pl.BlockSpec:
    """The same whole array in every step."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def dot(a: Any, b: Any, contract: tuple[int, int] = (1, 0)) -> Any:
    return lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=f32)


# ---- JAX's own


@family(*({"block": b} for b in (128, 256, 512, 1024, 2048)))
def jax_flash(block: int, length: int = 2048, heads: int = 2, depth: int = 128) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    sizes = flash.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)
    return (lambda q, k, v: flash.flash_attention(q, k, v, causal=True, block_sizes=sizes),
            [((1, heads, length, depth), bf16)] * 3)


@family(*({"block": b} for b in (128, 256, 384, 512, 1024)))
def jax_flash_grad(block: int, heads: int = 2, depth: int = 128) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    length = 2048 if 2048 % block == 0 else block * 4
    sizes = flash.BlockSizes(
        block_q=block, block_k_major=block, block_k=block, block_b=1, block_q_major_dkv=block,
        block_k_major_dkv=block, block_k_dkv=block, block_q_dkv=block, block_k_major_dq=block, block_k_dq=block,
        block_q_dq=block)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return flash.flash_attention(q, k, v, causal=True, block_sizes=sizes).sum(dtype=f32)

    return jax.grad(loss, argnums=(0, 1, 2)), [((1, heads, length, depth), bf16)] * 3


def _splash(block: int, compute: int, length: int, heads: int, fused: bool, grad: bool) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    sizes = {"block_q": block, "block_kv": block, "block_kv_compute": compute}
    if grad:
        sizes |= {"block_q_dkv": block, "block_kv_dkv": block, "block_kv_dkv_compute": compute}
        sizes |= {"use_fused_bwd_kernel": True} if fused else {"block_q_dq": block, "block_kv_dq": block}
    attend = kernel.make_splash_mha(mask=mask, block_sizes=kernel.BlockSizes(**sizes), head_shards=1, q_seq_shards=1)
    if grad:
        return jax.grad(lambda q, k, v: attend(q, k, v).sum(dtype=f32), argnums=(0, 1, 2))
    return lambda q, k, v: attend(q, k, v)


@family({"block": 128}, {"block": 256}, {"block": 512}, {"block": 1024}, {"block": 2048, "compute": 1024})
def jax_splash(block: int, compute: int | None = None, length: int = 2048, heads: int = 2) -> Any:
    return _splash(block, compute or block, length, heads, False, False), [((heads, length, 128), bf16)] * 3


@family({"block": 128}, {"block": 256}, {"block": 512}, {"block": 1024}, {"block": 512, "fused": True})
def jax_splash_grad(block: int, fused: bool = False, length: int = 2048, heads: int = 2) -> Any:
    return _splash(block, block, length, heads, fused, True), [((heads, length, 128), bf16)] * 3


@family(*({"pages_per_block": n} for n in (1, 2, 4, 8, 16)))
def jax_paged(pages_per_block: int, batch: int = 8, heads: int = 16, kv_heads: int = 2, page: int = 64) -> Any:
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return (lambda q, k, v, n, p: paged_attention(q, k, v, n, p, pages_per_compute_block=pages_per_block),
            [((batch, heads, 128), bf16), ((kv_heads, 256, page, 128), bf16), ((kv_heads, 256, page, 128), bf16),
             ((batch,), i32), ((batch, 16), i32)])


@family({"pages": 4, "queries": 16}, {"pages": 8, "queries": 32}, {"pages": 8, "queries": 64},
        {"pages": 16, "queries": 128}, {"pages": 32, "queries": 128})
def jax_ragged_paged(pages: int, queries: int, heads: int = 16, kv_heads: int = 4, tokens: int = 1024) -> Any:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def fun(q: Any, kv: Any, lengths: Any, indices: Any, starts: Any, count: Any) -> Any:
        return ragged_paged_attention(q, kv, lengths, indices, starts, count, num_kv_pages_per_block=pages,
                                      num_queries_per_block=queries, vmem_limit_bytes=None)

    return fun, [((tokens, heads, 128), bf16), ((512, 16, 2 * kv_heads, 128), bf16), ((16,), i32), ((16, 32), i32),
                 ((17,), i32), ((1,), i32)]


GMM_TILES = ({"m": 128, "k": 128, "n": 128}, {"m": 256, "k": 512, "n": 512}, {"m": 512, "k": 512, "n": 1024},
             {"m": 512, "k": 1024, "n": 1024}, {"m": 1024, "k": 1024, "n": 1024})


@family(*GMM_TILES)
def jax_gmm(m: int, k: int, n: int) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return (lambda a, b, s: gmm(a, b, s, preferred_element_type=bf16, tiling=(m, k, n)),
            [((2048, 2048), bf16), ((4, 2048, 2048), bf16), ((4,), i32)])


@family(*GMM_TILES)
def jax_tgmm(m: int, k: int, n: int) -> Any:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return (lambda a, b, s: tgmm(a, b, s, preferred_element_type=bf16, tiling=(m, k, n)),
            [((2048, 2048), bf16), ((2048, 2048), bf16), ((4,), i32)])


# ---- fitted


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def layernorm_grad(rows: int, columns: int = 2048) -> Any:
    def body(x, w, g, dx, dw, db):
        @pl.when(pl.program_id(0) == 0)
        def _():
            dw[...] = jnp.zeros_like(dw)
            db[...] = jnp.zeros_like(db)
        v, grad = x[...].astype(f32), g[...].astype(f32)
        mean = v.mean(-1, keepdims=True)
        inverse = lax.rsqrt(((v - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
        normal = (v - mean) * inverse
        scaled = grad * w[...]
        dw[...] += (grad * normal).sum(0, keepdims=True)
        db[...] += grad.sum(0, keepdims=True)
        dx[...] = (inverse * (scaled - scaled.mean(-1, keepdims=True)
                              - normal * (scaled * normal).mean(-1, keepdims=True))).astype(bf16)

    def fun(x, w, g):
        return call(body, (struct(x.shape, bf16), struct((1, columns), f32), struct((1, columns), f32)),
                    (x.shape[0] // rows,), [rows_of(rows, columns), whole(1, columns), rows_of(rows, columns)],
                    [rows_of(rows, columns), whole(1, columns), whole(1, columns)])(x, w, g)
    return fun, [((4096, columns), bf16), ((1, columns), f32), ((4096, columns), bf16)]


@family({"rows": 128, "kv": 256}, {"rows": 256, "kv": 512}, {"rows": 512, "kv": 512})
def looped_attention(rows: int, kv: int, length: int = 2048, depth: int = 128) -> Any:
    """Online softmax with a loop over keys that lie whole in VMEM."""
    def body(q, k, v, o):
        query = q[0]

        def step(i, carry):
            acc, m, total = carry
            s = dot(query, k[0, pl.ds(i * kv, kv)], (1, 1))
            top = jnp.maximum(m, s.max(-1, keepdims=True))
            p, keep = jnp.exp(s - top), jnp.exp(m - top)
            acc = acc * keep + dot(p.astype(bf16), v[0, pl.ds(i * kv, kv)])
            return acc, top, total * keep + p.sum(-1, keepdims=True)
        start = (jnp.zeros((rows, depth), f32), jnp.full((rows, 1), -1e30, f32), jnp.zeros((rows, 1), f32))
        acc, _, total = lax.fori_loop(0, length // kv, step, start)
        o[0] = (acc / total).astype(bf16)

    def fun(q, k, v):
        block = pl.BlockSpec((1, rows, depth), lambda h, i: (h, i, 0))
        all_ = pl.BlockSpec((1, length, depth), lambda h, i: (h, 0, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], length // rows), [block, all_, all_], block)(q, k, v)
    return fun, [((2, length, depth), bf16)] * 3


@family({"rows": 256, "columns": 256}, {"rows": 512, "columns": 512})
def swiglu_grad(rows: int, columns: int) -> Any:
    def body(gate, up, g, d_gate, d_up):
        a, b, grad = gate[...].astype(f32), up[...].astype(f32), g[...].astype(f32)
        s = jax.nn.sigmoid(a)
        d_gate[...] = (grad * b * s * (1 + a * (1 - s))).astype(bf16)
        d_up[...] = (grad * a * s).astype(bf16)

    def fun(*arrays):
        block = pl.BlockSpec((rows, columns), lambda i, j: (i, j))
        return call(body, (struct((2048, 2048), bf16),) * 2, (2048 // rows, 2048 // columns), [block] * 3,
                    [block] * 2)(*arrays)
    return fun, [((2048, 2048), bf16)] * 3


@family({"rows": 256, "k": 512}, {"rows": 512, "k": 1024}, {"rows": 512, "k": 2048})
def matmul_bias_gelu(rows: int, k: int, columns: int = 512) -> Any:
    def body(x, w, b, o, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.broadcast_to(b[...], acc.shape)
        acc[...] += dot(x[...], w[...])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o[...] = jax.nn.gelu(acc[...]).astype(bf16)

    def fun(x, w, b):
        return call(body, struct((2048, 2048), bf16), (2048 // rows, 2048 // columns, 4096 // k),
                    [pl.BlockSpec((rows, k), lambda i, j, s: (i, s)),
                     pl.BlockSpec((k, columns), lambda i, j, s: (s, j)),
                     pl.BlockSpec((1, columns), lambda i, j, s: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j, s: (i, j)), [pltpu.VMEM((rows, columns), f32)])(x, w, b)
    return fun, [((2048, 4096), bf16), ((4096, 2048), bf16), ((1, 2048), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512, "columns": 1024})
def residual_norm(rows: int, columns: int = 2048) -> Any:
    """The sum of two inputs and its norm, both stored."""
    def body(x, r, w, total, normal):
        v = x[...].astype(f32) + r[...].astype(f32)
        total[...] = v.astype(bf16)
        normal[...] = (v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-6) * w[...]).astype(bf16)

    def fun(x, r, w):
        return call(body, (struct(x.shape, bf16),) * 2, (x.shape[0] // rows,),
                    [rows_of(rows, columns)] * 2 + [whole(1, columns)], [rows_of(rows, columns)] * 2)(x, r, w)
    return fun, [((4096, columns), bf16), ((4096, columns), bf16), ((1, columns), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def softmax_two_results(rows: int, columns: int = 1024) -> Any:
    def body(x, p, lse):
        v = x[...].astype(f32)
        top = v.max(-1, keepdims=True)
        e = jnp.exp(v - top)
        total = e.sum(-1, keepdims=True)
        p[...] = (e / total).astype(bf16)
        lse[...] = top + jnp.log(total)

    def fun(x):
        return call(body, (struct(x.shape, bf16), struct((x.shape[0], 1), f32)), (x.shape[0] // rows,),
                    [rows_of(rows, columns)], [rows_of(rows, columns), rows_of(rows, 1)])(x)
    return fun, [((4096, columns), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512, "columns": 512})
def token_shift(rows: int, columns: int = 1024) -> Any:
    """Each row mixed with the one before it, gated."""
    def body(x, w, o):
        v = x[...].astype(f32)
        before = jnp.where(lax.broadcasted_iota(i32, v.shape, 0) == 0, 0.0, pltpu.roll(v, 1, 0))
        mixed = v + (before - v) * w[...]
        o[...] = (mixed * jax.nn.sigmoid(mixed)).astype(bf16)

    def fun(x, w):
        return call(body, struct(x.shape, bf16), (x.shape[0] // rows,), [rows_of(rows, columns), whole(1, columns)],
                    rows_of(rows, columns))(x, w)
    return fun, [((4096, columns), bf16), ((1, columns), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def retention(rows: int, depth: int = 128, length: int = 2048) -> Any:
    """Scores weighted by a decay that is computed from positions, then summed over values."""
    def body(q, k, v, o):
        i = lax.broadcasted_iota(i32, (rows, rows), 0) - lax.broadcasted_iota(i32, (rows, rows), 1)
        weight = jnp.where(i >= 0, jnp.exp(i.astype(f32) * -0.03), 0.0)
        o[0] = dot((dot(q[0], k[0], (1, 1)) * weight).astype(bf16), v[0]).astype(bf16)

    def fun(q, k, v):
        block = pl.BlockSpec((1, rows, depth), lambda h, i: (h, i, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], length // rows), [block] * 3, block)(q, k, v)
    return fun, [((4, length, depth), bf16)] * 3


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def layernorm_matmul(rows: int, columns: int = 512, depth: int = 1024) -> Any:
    def body(x, g, w, o):
        v = x[...].astype(f32)
        v = v - v.mean(-1, keepdims=True)
        normal = v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-6) * g[...]
        o[...] = dot(normal.astype(bf16), w[...]).astype(bf16)

    def fun(x, g, w):
        return call(body, struct((2048, 2048), bf16), (2048 // rows, 2048 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)), whole(1, depth),
                     pl.BlockSpec((depth, columns), lambda i, j: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, g, w)
    return fun, [((2048, depth), bf16), ((1, depth), f32), ((depth, 2048), bf16)]


@family({"rows": 128, "columns": 256}, {"rows": 256, "columns": 512}, {"rows": 512, "columns": 256})
def int8_matmul(rows: int, columns: int, depth: int = 1024) -> Any:
    """int8 weights made bf16 on the way, one scale for each column, after the sum."""
    def body(x, w, s, o):
        o[...] = (dot(x[...], w[...].astype(bf16)) * s[...]).astype(bf16)

    def fun(x, w, s):
        return call(body, struct((1024, 2048), bf16), (1024 // rows, 2048 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                     pl.BlockSpec((depth, columns), lambda i, j: (0, j)),
                     pl.BlockSpec((1, columns), lambda i, j: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, w, s)
    return fun, [((1024, depth), bf16), ((depth, 2048), i8), ((1, 2048), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 256, "columns": 1024})
def three_best(rows: int, columns: int = 512) -> Any:
    """The three largest of each row, one after the other."""
    def body(x, o):
        v = x[...]
        best = []
        for _ in range(3):
            top = v.max(-1, keepdims=True)
            best.append(top)
            v = jnp.where(v == top, -jnp.inf, v)
        o[...] = jnp.concatenate(best + [best[-1]], -1)

    def fun(x):
        return call(body, struct((4096, 4), f32), (4096 // rows,), [rows_of(rows, columns)], rows_of(rows, 4))(x)
    return fun, [((4096, columns), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def adamw(rows: int, columns: int = 1024) -> Any:
    """bf16 parameters, f32 moments, three results."""
    def body(p, g, m, v, p_out, m_out, v_out):
        grad = g[...].astype(f32)
        first = 0.9 * m[...] + 0.1 * grad
        second = 0.99 * v[...] + 0.01 * grad * grad
        p_out[...] = (p[...].astype(f32) * 0.999 - 1e-3 * first * lax.rsqrt(second + 1e-8)).astype(bf16)
        m_out[...] = first
        v_out[...] = second

    def fun(p, g, m, v):
        block = rows_of(rows, columns)
        return call(body, (struct(p.shape, bf16), struct(p.shape, f32), struct(p.shape, f32)), (p.shape[0] // rows,),
                    [block] * 4, [block] * 3)(p, g, m, v)
    return fun, [((4096, columns), bf16), ((4096, columns), bf16), ((4096, columns), f32), ((4096, columns), f32)]


@family({"rows": 128, "columns": 512}, {"rows": 256, "columns": 1024}, {"rows": 512, "columns": 512})
def capped_attention(rows: int, columns: int, depth: int = 128) -> Any:
    """All keys at once: capped scores, a bias by distance, softmax."""
    def body(q, k, v, o):
        s = 20.0 * jnp.tanh(dot(q[0], k[0], (1, 1)) * 0.05)
        far = (lax.broadcasted_iota(i32, s.shape, 0) - lax.broadcasted_iota(i32, s.shape, 1)).astype(f32)
        s = s - 0.02 * jnp.abs(far)
        p = jnp.exp(s - s.max(-1, keepdims=True))
        o[0] = (dot(p.astype(bf16), v[0]) / p.sum(-1, keepdims=True)).astype(bf16)

    def fun(q, k, v):
        block = pl.BlockSpec((1, rows, depth), lambda h, i: (h, i, 0))
        keys = pl.BlockSpec((1, columns, depth), lambda h, i: (h, 0, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], 1024 // rows), [block, keys, keys], block)(q, k, v)
    return fun, [((2, 1024, depth), bf16), ((2, columns, depth), bf16), ((2, columns, depth), bf16)]


@family({"rows": 128, "columns": 256}, {"rows": 256, "columns": 512}, {"rows": 512, "columns": 512})
def gated_matmul(rows: int, columns: int, depth: int = 1024) -> Any:
    def body(x, gate, up, o):
        o[...] = (jax.nn.gelu(dot(x[...], gate[...])) * dot(x[...], up[...])).astype(bf16)

    def fun(x, gate, up):
        weights = pl.BlockSpec((depth, columns), lambda i, j: (0, j))
        return call(body, struct((2048, 2048), bf16), (2048 // rows, 2048 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)), weights, weights],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, gate, up)
    return fun, [((2048, depth), bf16), ((depth, 2048), bf16), ((depth, 2048), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 256, "columns": 1024})
def matmul_softmax(rows: int, columns: int = 512, depth: int = 512) -> Any:
    def body(x, w, o):
        o[...] = jax.nn.softmax(dot(x[...], w[...]), axis=-1).astype(bf16)

    def fun(x, w):
        return call(body, struct((2048, columns), bf16), (2048 // rows,), [rows_of(rows, depth), whole(depth, columns)],
                    rows_of(rows, columns))(x, w)
    return fun, [((2048, depth), bf16), ((depth, columns), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512, "columns": 512})
def running_logsumexp(rows: int, columns: int = 1024) -> Any:
    """Over blocks of columns, the running maximum and sum in scratch."""
    def body(x, o, top, total):
        @pl.when(pl.program_id(1) == 0)
        def _():
            top[...] = jnp.full_like(top, -1e30)
            total[...] = jnp.zeros_like(total)
        v = x[...].astype(f32)
        best = jnp.maximum(top[...], v.max(-1, keepdims=True))
        total[...] = total[...] * jnp.exp(top[...] - best) + jnp.exp(v - best).sum(-1, keepdims=True)
        top[...] = best

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o[...] = top[...] + jnp.log(total[...])

    def fun(x):
        return call(body, struct((2048, 1), f32), (2048 // rows, 8192 // columns),
                    [pl.BlockSpec((rows, columns), lambda i, j: (i, j))], pl.BlockSpec((rows, 1), lambda i, j: (i, 0)),
                    [pltpu.VMEM((rows, 1), f32)] * 2)(x)
    return fun, [((2048, 8192), bf16)]


@family({"batch": 2, "rows": 128}, {"batch": 4, "rows": 256}, {"batch": 8, "rows": 128})
def batched_attention(batch: int, rows: int, depth: int = 64) -> Any:
    def body(q, k, v, o):
        s = jnp.einsum("bqd,bkd->bqk", q[...], k[...], preferred_element_type=f32)
        p = jax.nn.softmax(s * 0.125, axis=-1).astype(bf16)
        o[...] = jnp.einsum("bqk,bkd->bqd", p, v[...], preferred_element_type=f32).astype(bf16)

    def fun(q, k, v):
        return call(body, struct(q.shape, bf16), (q.shape[0] // batch,), [rows_of(batch, rows, depth)] * 3,
                    rows_of(batch, rows, depth))(q, k, v)
    return fun, [((32, rows, depth), bf16)] * 3


@family({"rows": 256, "kv": 256}, {"rows": 512, "kv": 256}, {"rows": 512, "kv": 512})
def outer_products(rows: int, kv: int, depth: int = 128) -> Any:
    """Weights of a softmax turned around and applied to two operands: what a backward pass does."""
    def body(q, k, g, dk, dv):
        p = jnp.exp(dot(q[0], k[0], (1, 1)) * 0.1)
        dv[0] = dot(p.astype(bf16), g[0], (0, 0)).astype(bf16)
        ds = p * (p - p.sum(-1, keepdims=True))
        dk[0] = dot(ds.astype(bf16), q[0], (0, 0)).astype(bf16)

    def fun(q, k, g):
        block = pl.BlockSpec((1, rows, depth), lambda h: (h, 0, 0))
        keys = pl.BlockSpec((1, kv, depth), lambda h: (h, 0, 0))
        return call(body, (struct(k.shape, bf16),) * 2, (q.shape[0],), [block, keys, block], [keys, keys])(q, k, g)
    return fun, [((4, rows, depth), bf16), ((4, kv, depth), bf16), ((4, rows, depth), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512})
def row_statistics(rows: int, columns: int = 1024) -> Any:
    """Mean, variance, extremes of each row and the standardised rows."""
    def body(x, stats, o):
        v = x[...].astype(f32)
        mean = v.mean(-1, keepdims=True)
        variance = ((v - mean) ** 2).mean(-1, keepdims=True)
        top, low = v.max(-1, keepdims=True), v.min(-1, keepdims=True)
        stats[...] = jnp.concatenate([mean, variance, top, low], -1)
        o[...] = ((v - mean) / (jnp.sqrt(variance) + 1e-3)).astype(bf16)

    def fun(x):
        return call(body, (struct((x.shape[0], 4), f32), struct(x.shape, bf16)), (x.shape[0] // rows,),
                    [rows_of(rows, columns)], [rows_of(rows, 4), rows_of(rows, columns)])(x)
    return fun, [((4096, columns), bf16)]


@family({"rows": 64}, {"rows": 128}, {"rows": 256, "columns": 512})
def lane_stencil(rows: int, columns: int = 1024) -> Any:
    """Five neighbours along a row, weighted by one number each, after a square root."""
    def body(x, w, o):
        v = jnp.sqrt(jnp.abs(x[...].astype(f32)))
        total = v * w[0, 0]
        for shift in (1, 2, columns - 1, columns - 2):
            total += pltpu.roll(v, shift, 1) * w[0, shift % 7]
        o[...] = total.astype(bf16)

    def fun(x, w):
        return call(body, struct(x.shape, bf16), (x.shape[0] // rows,),
                    [rows_of(rows, columns), pl.BlockSpec(memory_space=pltpu.SMEM)], rows_of(rows, columns))(x, w)
    return fun, [((4096, columns), bf16), ((1, 8), f32)]


@family({"rows": 128, "parts": 2}, {"rows": 256, "parts": 4}, {"rows": 256, "parts": 8, "columns": 512})
def split_sum_matmul(rows: int, parts: int, columns: int = 256, depth: int = 2048) -> Any:
    """A matmul in parts along the contraction, each part scaled by its own row of numbers."""
    def body(x, w, s, o):
        step = depth // parts
        total = jnp.zeros(o.shape, f32)
        for i in range(parts):
            part = slice(i * step, (i + 1) * step)
            total += dot(x[:, part], w[part, :]) * s[i:i + 1, :]
        o[...] = total.astype(bf16)

    def fun(x, w, s):
        return call(body, struct((1024, 2048), bf16), (1024 // rows, 2048 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                     pl.BlockSpec((depth, columns), lambda i, j: (0, j)),
                     pl.BlockSpec((8, columns), lambda i, j: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, w, s)
    return fun, [((1024, depth), bf16), ((depth, 2048), bf16), ((8, 2048), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512, "columns": 512})
def block_scaled(rows: int, columns: int = 1024) -> Any:
    """A whole block scaled by its own largest value, and that value."""
    def body(x, o, s):
        v = x[...].astype(f32) * 0.5
        top = jnp.abs(v).max()
        s[...] = jnp.full(s.shape, top, f32)
        o[...] = (v / top + v * v).astype(bf16)

    def fun(x):
        steps = x.shape[0] // rows
        return call(body, (struct(x.shape, bf16), struct((steps * 8, 128), f32)), (steps,), [rows_of(rows, columns)],
                    [rows_of(rows, columns), rows_of(8, 128)])(x)
    return fun, [((4096, columns), bf16)]


@family({"batch": 2, "rows": 128}, {"batch": 4, "rows": 256}, {"batch": 4, "rows": 512, "columns": 256})
def batched_linear(batch: int, rows: int, columns: int = 512, depth: int = 256) -> Any:
    def body(x, w, b, o):
        y = jnp.einsum("bmk,bkn->bmn", x[...], w[...], preferred_element_type=f32) + b[...]
        o[...] = jax.nn.relu(y).astype(bf16)

    def fun(x, w, b):
        return call(body, struct((16, 1024, columns), bf16), (16 // batch, 1024 // rows),
                    [pl.BlockSpec((batch, rows, depth), lambda e, i: (e, i, 0)),
                     pl.BlockSpec((batch, depth, columns), lambda e, i: (e, 0, 0)),
                     pl.BlockSpec((batch, 1, columns), lambda e, i: (e, 0, 0))],
                    pl.BlockSpec((batch, rows, columns), lambda e, i: (e, i, 0)))(x, w, b)
    return fun, [((16, 1024, depth), bf16), ((16, depth, columns), bf16), ((16, 1, columns), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 256, "depth": 512})
def resident_mlp(rows: int, depth: int = 1024, hidden: int = 1024) -> Any:
    """Weights in VMEM for all steps, a smooth activation between two matmuls."""
    def body(x, up, bias, down, o):
        h = jax.nn.silu(dot(x[...], up[...]) + bias[...]).astype(bf16)
        o[...] = dot(h, down[...]).astype(bf16)

    def fun(x, up, bias, down):
        return call(body, struct(x.shape, bf16), (x.shape[0] // rows,), [rows_of(rows, depth), whole(depth, hidden),
                    whole(1, hidden), whole(hidden, depth)], rows_of(rows, depth))(x, up, bias, down)
    return fun, [((4096, depth), bf16), ((depth, hidden), bf16), ((1, hidden), f32), ((hidden, depth), bf16)]


@family({"rows": 128, "kv": 256}, {"rows": 256, "kv": 512}, {"rows": 512, "kv": 512})
def sigmoid_attention(rows: int, kv: int, length: int = 2048, depth: int = 128) -> Any:
    """Scores through a sigmoid with a causal mask, summed over a grid axis in scratch."""
    def body(q, k, v, o, acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)
        s = dot(q[0], k[0], (1, 1)) * 0.088
        row = lax.broadcasted_iota(i32, s.shape, 0) + pl.program_id(1) * rows
        column = lax.broadcasted_iota(i32, s.shape, 1) + pl.program_id(2) * kv
        p = jnp.where(row >= column, jax.nn.sigmoid(s - 2.0), 0.0)
        acc[...] += dot(p.astype(bf16), v[0])

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            o[0] = acc[...].astype(bf16)

    def fun(q, k, v):
        across = pl.BlockSpec((1, rows, depth), lambda h, i, j: (h, i, 0))
        along = pl.BlockSpec((1, kv, depth), lambda h, i, j: (h, j, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], length // rows, length // kv), [across, along, along],
                    across, [pltpu.VMEM((rows, depth), f32)])(q, k, v)
    return fun, [((2, length, depth), bf16)] * 3


@family({"rows": 256, "columns": 128}, {"rows": 512, "columns": 256}, {"rows": 512, "columns": 512})
def head_statistics(rows: int, columns: int, depth: int = 512) -> Any:
    """Logits of one block, their maximum, sum of exponentials and the chosen one, kept as columns."""
    def body(x, w, y, top, total, chosen):
        logits = dot(x[...], w[...])
        best = logits.max(-1, keepdims=True)
        top[...] = best
        total[...] = jnp.exp(logits - best).sum(-1, keepdims=True)
        at = lax.broadcasted_iota(i32, logits.shape, 1)
        chosen[...] = jnp.where(at == y[...], logits, 0.0).sum(-1, keepdims=True)

    def fun(x, w, y):
        return call(body, (struct((2048, 1), f32),) * 3, (2048 // rows,),
                    [rows_of(rows, depth), whole(depth, columns), rows_of(rows, 1)], [rows_of(rows, 1)] * 3)(x, w, y)
    return fun, [((2048, depth), bf16), ((depth, columns), bf16), ((2048, 1), i32)]


# ---- held back


@family({"rows": 128}, {"rows": 512}, {"rows": 1024, "experts": 64}, held_back=True)
def router(rows: int, experts: int = 128, depth: int = 1024) -> Any:
    """Expert choice: logits, softmax, the two best of each row, their weights."""
    def body(x, w, index, weight):
        p = jax.nn.softmax(dot(x[...], w[...]), axis=-1)
        columns = lax.broadcasted_iota(i32, p.shape, 1)
        first = p.max(-1, keepdims=True)
        first_at = jnp.where(p == first, columns, experts).min(-1, keepdims=True)
        rest = jnp.where(columns == first_at, -1.0, p)
        second = rest.max(-1, keepdims=True)
        second_at = jnp.where(rest == second, columns, experts).min(-1, keepdims=True)
        index[...] = jnp.concatenate([first_at, second_at], -1)
        weight[...] = jnp.concatenate([first, second], -1) / (first + second)

    def fun(x, w):
        return call(body, (struct((4096, 2), i32), struct((4096, 2), f32)), (4096 // rows,),
                    [rows_of(rows, depth), whole(depth, experts)], [rows_of(rows, 2)] * 2)(x, w)
    return fun, [((4096, depth), bf16), ((depth, experts), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def causal_conv(rows: int, columns: int = 1024, taps: int = 4) -> Any:
    """Depthwise convolution over time as a sum of rolled blocks."""
    def body(x, w, o):
        v = x[...].astype(f32)
        at = lax.broadcasted_iota(i32, v.shape, 0)
        total = v * w[0:1, :]
        for t in range(1, taps):
            total += jnp.where(at >= t, pltpu.roll(v, t, 0), 0.0) * w[t:t + 1, :]
        o[...] = jax.nn.silu(total).astype(bf16)

    def fun(x, w):
        return call(body, struct(x.shape, bf16), (x.shape[0] // rows,), [rows_of(rows, columns), whole(8, columns)],
                    rows_of(rows, columns))(x, w)
    return fun, [((4096, columns), bf16), ((8, columns), f32)]


@family({"chunk": 128}, {"chunk": 256}, {"chunk": 512}, held_back=True)
def linear_attention(chunk: int, depth: int = 128, length: int = 2048) -> Any:
    """Chunked linear attention with decay and a state carried between chunks."""
    def body(q, k, v, o, state):
        @pl.when(pl.program_id(1) == 0)
        def _():
            state[...] = jnp.zeros_like(state)
        i = lax.broadcasted_iota(i32, (chunk, chunk), 0)
        j = lax.broadcasted_iota(i32, (chunk, chunk), 1)
        decay = jnp.where(i >= j, jnp.exp((j - i).astype(f32) * 0.01), 0.0)
        inner = dot(q[0], k[0], (1, 1)) * decay
        fade = jnp.exp(-0.01 * lax.broadcasted_iota(i32, (chunk, 1), 0).astype(f32))
        o[0] = (dot(inner.astype(bf16), v[0]) + dot(q[0], state[...].astype(bf16)) * fade).astype(bf16)
        state[...] = state[...] * 0.5 + dot(k[0], v[0], (0, 0))

    def fun(q, k, v):
        block = pl.BlockSpec((1, chunk, depth), lambda h, i: (h, i, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], length // chunk), [block] * 3, block,
                    [pltpu.VMEM((depth, depth), f32)])(q, k, v)
    return fun, [((4, length, depth), bf16)] * 3


@family({"rows": 128}, {"rows": 256}, {"rows": 512, "columns": 1024}, held_back=True)
def rmsnorm_matmul(rows: int, columns: int = 512, depth: int = 2048) -> Any:
    def body(x, w, o):
        v = x[...].astype(f32)
        normal = (v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-6)).astype(bf16)
        o[...] = dot(normal, w[...]).astype(bf16)

    def fun(x, w):
        return call(body, struct((2048, 4096), bf16), (2048 // rows, 4096 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                     pl.BlockSpec((depth, columns), lambda i, j: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, w)
    return fun, [((2048, depth), bf16), ((depth, 4096), bf16)]


@family({"rows": 128}, {"rows": 256, "columns": 512}, {"rows": 512, "columns": 512}, held_back=True)
def grouped_dequant_matmul(rows: int, columns: int = 256, depth: int = 1024, group: int = 256) -> Any:
    """int8 weights with a scale for every `group` rows of them."""
    def body(x, w, s, o):
        total = jnp.zeros(o.shape, f32)
        for g in range(depth // group):
            part = slice(g * group, (g + 1) * group)
            weights = (w[part, :].astype(f32) * s[g:g + 1, :]).astype(bf16)
            total += dot(x[:, part], weights)
        o[...] = total.astype(bf16)

    def fun(x, w, s):
        return call(body, struct((1024, 2048), bf16), (1024 // rows, 2048 // columns),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                     pl.BlockSpec((depth, columns), lambda i, j: (0, j)),
                     pl.BlockSpec((8, columns), lambda i, j: (0, j))],
                    pl.BlockSpec((rows, columns), lambda i, j: (i, j)))(x, w, s)
    return fun, [((1024, depth), bf16), ((depth, 2048), i8), ((8, 2048), f32)]


@family({"rows": 128, "vocabulary": 512}, {"rows": 256, "vocabulary": 1024}, {"rows": 512, "vocabulary": 512},
        held_back=True)
def head_loss(rows: int, vocabulary: int, depth: int = 1024) -> Any:
    """Language model head and its log-sum-exp in one, over blocks of the vocabulary."""
    def body(x, w, y, o, top, total, hit):
        j = pl.program_id(1)

        @pl.when(j == 0)
        def _():
            top[...] = jnp.full_like(top, -1e30)
            total[...] = jnp.zeros_like(total)
            hit[...] = jnp.zeros_like(hit)
        logits = dot(x[...], w[...])
        at = lax.broadcasted_iota(i32, logits.shape, 1) + j * vocabulary
        hit[...] += jnp.where(at == y[...], logits, 0.0).sum(-1, keepdims=True)
        best = jnp.maximum(top[...], logits.max(-1, keepdims=True))
        total[...] = total[...] * jnp.exp(top[...] - best) + jnp.exp(logits - best).sum(-1, keepdims=True)
        top[...] = best

        @pl.when(j == pl.num_programs(1) - 1)
        def _():
            o[...] = jnp.log(total[...]) + top[...] - hit[...]

    def fun(x, w, y):
        return call(body, struct((1024, 1), f32), (1024 // rows, 8192 // vocabulary),
                    [pl.BlockSpec((rows, depth), lambda i, j: (i, 0)),
                     pl.BlockSpec((depth, vocabulary), lambda i, j: (0, j)),
                     pl.BlockSpec((rows, 1), lambda i, j: (i, 0))],
                    pl.BlockSpec((rows, 1), lambda i, j: (i, 0)), [pltpu.VMEM((rows, 1), f32)] * 3)(x, w, y)
    return fun, [((1024, depth), bf16), ((depth, 8192), bf16), ((1024, 1), i32)]


@family({"rows": 256, "kv": 512}, {"rows": 512, "kv": 1024}, {"rows": 1024, "kv": 1024}, held_back=True)
def biased_attention(rows: int, kv: int, length: int = 2048, depth: int = 128) -> Any:
    """Online softmax over a grid axis with slopes by distance, a window and capped scores."""
    def body(q, k, v, o, acc, top, total):
        i, j = pl.program_id(1), pl.program_id(2)

        @pl.when(j == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)
            top[...] = jnp.full_like(top, -1e30)
            total[...] = jnp.zeros_like(total)
        s = dot(q[0], k[0], (1, 1)) * 0.088
        s = 30.0 * jnp.tanh(s / 30.0)
        distance = (lax.broadcasted_iota(i32, s.shape, 0) + i * rows) - (lax.broadcasted_iota(i32, s.shape, 1) + j * kv)
        s = jnp.where((distance >= 0) & (distance < 1024), s - 0.01 * distance.astype(f32), -1e30)
        best = jnp.maximum(top[...], s.max(-1, keepdims=True))
        p = jnp.exp(s - best)
        keep = jnp.exp(top[...] - best)
        total[...] = total[...] * keep + p.sum(-1, keepdims=True)
        acc[...] = acc[...] * keep + dot(p.astype(bf16), v[0])
        top[...] = best

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            o[0] = (acc[...] / total[...]).astype(bf16)

    def fun(q, k, v):
        across = pl.BlockSpec((1, rows, depth), lambda h, i, j: (h, i, 0))
        along = pl.BlockSpec((1, kv, depth), lambda h, i, j: (h, j, 0))
        return call(body, struct(q.shape, bf16), (q.shape[0], length // rows, length // kv), [across, along, along],
                    across, [pltpu.VMEM((rows, depth), f32), pltpu.VMEM((rows, 1), f32), pltpu.VMEM((rows, 1), f32)])(
                        q, k, v)
    return fun, [((2, length, depth), bf16)] * 3


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def lion_step(rows: int, columns: int = 1024) -> Any:
    """An optimizer step with two results and a clipped update."""
    def body(p, g, m, p_out, m_out):
        grad = g[...].astype(f32)
        norm = lax.rsqrt((grad * grad).mean() + 1e-6)
        grad = grad * jnp.minimum(norm, 1.0)
        update = jnp.sign(0.9 * m[...] + 0.1 * grad)
        p_out[...] = p[...] * 0.999 - 1e-3 * update
        m_out[...] = 0.99 * m[...] + 0.01 * grad

    def fun(p, g, m):
        return call(body, (struct(p.shape, f32),) * 2, (p.shape[0] // rows,), [rows_of(rows, columns)] * 3,
                    [rows_of(rows, columns)] * 2, input_output_aliases={0: 0, 2: 1})(p, g, m)
    return fun, [((4096, columns), f32), ((4096, columns), bf16), ((4096, columns), f32)]


@family({"batch": 4, "kv": 512}, {"batch": 8, "kv": 1024}, {"batch": 8, "kv": 2048}, held_back=True)
def grouped_decode(batch: int, kv: int, group: int = 8, depth: int = 128) -> Any:
    """One query token for each sequence, eight query heads on one key head."""
    def body(q, k, v, o):
        for b in range(batch):
            s = dot(q[b], k[b], (1, 1)) * 0.088
            p = jnp.exp(s - s.max(-1, keepdims=True))
            o[b] = (dot(p.astype(bf16), v[b]) / p.sum(-1, keepdims=True)).astype(bf16)

    def fun(q, k, v):
        return call(body, struct(q.shape, bf16), (q.shape[0] // batch,), [rows_of(batch, group, depth),
                    rows_of(batch, kv, depth), rows_of(batch, kv, depth)], rows_of(batch, group, depth))(q, k, v)
    return fun, [((64, group, depth), bf16), ((64, kv, depth), bf16), ((64, kv, depth), bf16)]


@family({"batch": 2, "rows": 256}, {"batch": 4, "rows": 256}, {"batch": 4, "rows": 512}, held_back=True)
def batched_matmul(batch: int, rows: int, depth: int = 512) -> Any:
    def body(x, w, o):
        o[...] = jnp.einsum("bmk,bkn->bmn", x[...], w[...], preferred_element_type=f32).astype(bf16)

    def fun(x, w):
        return call(body, struct((16, 1024, 512), bf16), (16 // batch, 1024 // rows),
                    [pl.BlockSpec((batch, rows, depth), lambda b, i: (b, i, 0)),
                     pl.BlockSpec((batch, depth, 512), lambda b, i: (b, 0, 0))],
                    pl.BlockSpec((batch, rows, 512), lambda b, i: (b, i, 0)))(x, w)
    return fun, [((16, 1024, depth), bf16), ((16, depth, 512), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def gathered_rows(rows: int, columns: int = 1024) -> Any:
    """Rows fetched one by one into scratch, then normalised."""
    def body(ids, table, o, buffer, semaphore):
        first = pl.program_id(0) * rows

        def fetch(i, _):
            pltpu.make_async_copy(table.at[pl.ds(ids[first + i], 1)], buffer.at[pl.ds(i, 1)], semaphore).start()
            return 0

        def wait(i, _):
            pltpu.make_async_copy(table.at[pl.ds(0, 1)], buffer.at[pl.ds(i, 1)], semaphore).wait()
            return 0
        lax.fori_loop(0, rows, fetch, 0)
        lax.fori_loop(0, rows, wait, 0)
        v = buffer[...]
        o[...] = (v * lax.rsqrt((v * v).mean(-1, keepdims=True) + 1e-6)).astype(bf16)

    def fun(ids, table):
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(4096 // rows,), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((rows, columns), lambda i, ids: (i, 0)),
            scratch_shapes=[pltpu.VMEM((rows, columns), f32), pltpu.SemaphoreType.DMA])
        return pl.pallas_call(body, out_shape=struct((4096, columns), bf16), grid_spec=spec)(ids, table)
    return fun, [((4096,), i32), ((8192, columns), f32)]


@family({"rows": 64}, {"rows": 128}, {"rows": 256}, held_back=True)
def mlp_in_one(rows: int, depth: int = 1024, hidden: int = 2048) -> Any:
    """Two matmuls with an activation between, weights resident, no accumulator."""
    def body(x, up, down, o):
        h = jnp.square(jax.nn.relu(dot(x[...], up[...]))).astype(bf16)
        o[...] = dot(h, down[...]).astype(bf16) + x[...]

    def fun(x, up, down):
        return call(body, struct(x.shape, bf16), (x.shape[0] // rows,), [rows_of(rows, depth), whole(depth, hidden),
                    whole(hidden, depth)], rows_of(rows, depth))(x, up, down)
    return fun, [((4096, depth), bf16), ((depth, hidden), bf16), ((hidden, depth), bf16)]


@family({"rows": 128, "kv": 128}, {"rows": 256, "kv": 256}, {"rows": 512, "kv": 256}, held_back=True)
def attention_grad_kv(rows: int, kv: int, length: int = 1024, depth: int = 128) -> Any:
    """Gradients of keys and values, summed in scratch over blocks of queries, probabilities transposed."""
    def body(q, k, v, g, lse, delta, dk, dv, dk_sum, dv_sum):
        @pl.when(pl.program_id(2) == 0)
        def _():
            dk_sum[...] = jnp.zeros_like(dk_sum)
            dv_sum[...] = jnp.zeros_like(dv_sum)
        p = jnp.exp(dot(q[0], k[0], (1, 1)) - lse[0])
        dv_sum[...] += dot(p.astype(bf16), g[0], (0, 0))
        ds = p * (dot(g[0], v[0], (1, 1)) - delta[0])
        dk_sum[...] += dot(ds.astype(bf16), q[0], (0, 0))

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            dk[0] = dk_sum[...].astype(bf16)
            dv[0] = dv_sum[...].astype(bf16)

    def fun(*arrays):
        across = pl.BlockSpec((1, kv, depth), lambda h, j, i: (h, j, 0))
        along = pl.BlockSpec((1, rows, depth), lambda h, j, i: (h, i, 0))
        column = pl.BlockSpec((1, rows, 1), lambda h, j, i: (h, i, 0))
        return call(body, (struct((2, length, depth), bf16),) * 2, (2, length // kv, length // rows),
                    [along, across, across, along, column, column], [across, across],
                    [pltpu.VMEM((kv, depth), f32)] * 2)(*arrays)
    return fun, [((2, length, depth), bf16)] * 4 + [((2, length, 1), f32)] * 2


# ---- held back, second set: written and measured after the last fit, predicted once


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def kl_two_logits(rows: int, columns: int = 1024) -> Any:
    """Kullback-Leibler divergence of two rows of logits."""
    def body(a, b, o):
        x, y = a[...].astype(f32), b[...].astype(f32)
        top_x, top_y = x.max(-1, keepdims=True), y.max(-1, keepdims=True)
        exp_x, exp_y = jnp.exp(x - top_x), jnp.exp(y - top_y)
        log_x, log_y = jnp.log(exp_x.sum(-1, keepdims=True)), jnp.log(exp_y.sum(-1, keepdims=True))
        log_p = x - top_x - log_x
        o[...] = (jnp.exp(log_p) * (log_p - (y - top_y - log_y))).sum(-1, keepdims=True)

    def fun(a, b):
        return call(body, struct((4096, 1), f32), (4096 // rows,), [rows_of(rows, columns)] * 2, rows_of(rows, 1))(a, b)
    return fun, [((4096, columns), bf16)] * 2


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def hash_dropout(rows: int, columns: int = 1024) -> Any:
    """Dropout by a hash of the position, and a residual."""
    def body(x, r, o):
        h = lax.broadcasted_iota(i32, (rows, columns), 0) * columns + lax.broadcasted_iota(i32, (rows, columns), 1)
        h = h * 1103515245 + 12345
        h = (h ^ (h >> 15)) * 69069
        keep = ((h ^ (h >> 13)) & 1023) > 100
        o[...] = (jnp.where(keep, x[...].astype(f32) * 1.1, 0.0) + r[...].astype(f32)).astype(bf16)

    def fun(x, r):
        return call(body, struct(x.shape, bf16), (4096 // rows,), [rows_of(rows, columns)] * 2, rows_of(rows, columns))(
            x, r)
    return fun, [((4096, columns), bf16)] * 2


@family({"chunk": 128}, {"chunk": 256}, {"chunk": 512}, held_back=True)
def triangular_sum(chunk: int, depth: int = 256) -> Any:
    """Running sums of a chunk by a matmul with ones below the diagonal."""
    def body(x, g, o):
        below = lax.broadcasted_iota(i32, (chunk, chunk), 0) >= lax.broadcasted_iota(i32, (chunk, chunk), 1)
        ones = below.astype(bf16)
        o[0] = (dot(ones, x[0]) * jnp.exp(-jnp.abs(dot(ones, g[0])) * 0.01)).astype(bf16)

    def fun(x, g):
        block = pl.BlockSpec((1, chunk, depth), lambda h, i: (h, i, 0))
        return call(body, struct(x.shape, bf16), (4, 2048 // chunk), [block, block], block)(x, g)
    return fun, [((4, 2048, depth), bf16)] * 2


@family({"rows": 128, "k": 512}, {"rows": 256, "k": 512}, {"rows": 256, "k": 1024}, held_back=True)
def matmul_then_norm(rows: int, k: int, columns: int = 1024) -> Any:
    """A matmul summed in scratch, normalised in the last step."""
    def body(x, w, g, o, acc):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)
        acc[...] += dot(x[...], w[...])

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            v = acc[...]
            d = v - v.mean(-1, keepdims=True)
            o[...] = (d * lax.rsqrt((d * d).mean(-1, keepdims=True) + 1e-6) * g[...]).astype(bf16)

    def fun(x, w, g):
        return call(body, struct((2048, columns), bf16), (2048 // rows, 2048 // k),
                    [pl.BlockSpec((rows, k), lambda i, j: (i, j)), pl.BlockSpec((k, columns), lambda i, j: (j, 0)),
                     whole(1, columns)], pl.BlockSpec((rows, columns), lambda i, j: (i, 0)),
                    [pltpu.VMEM((rows, columns), f32)])(x, w, g)
    return fun, [((2048, 2048), bf16), ((2048, columns), bf16), ((1, columns), f32)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def rotate_halves(rows: int, depth: int = 256) -> Any:
    """Rotary embedding of aligned halves, stored in two parts."""
    def body(x, c, s, o):
        v = x[...].astype(f32)
        a, b = v[:, :depth // 2], v[:, depth // 2:]
        o[:, :depth // 2] = (a * c[...] - b * s[...]).astype(bf16)
        o[:, depth // 2:] = (b * c[...] + a * s[...]).astype(bf16)

    def fun(x, c, s):
        half = rows_of(rows, depth // 2)
        return call(body, struct(x.shape, bf16), (4096 // rows,), [rows_of(rows, depth), half, half],
                    rows_of(rows, depth))(x, c, s)
    return fun, [((4096, depth), bf16), ((4096, depth // 2), f32), ((4096, depth // 2), f32)]


@family({"rows": 128, "kv": 512}, {"rows": 256, "kv": 1024}, {"rows": 512, "kv": 512}, held_back=True)
def value_gated_attention(rows: int, kv: int, depth: int = 128) -> Any:
    """Softmax attention over all keys, its result gated."""
    def body(q, k, v, g, o):
        p = jax.nn.softmax(dot(q[0], k[0], (1, 1)) * 0.088, axis=-1)
        o[0] = (dot(p.astype(bf16), v[0]) * jax.nn.silu(g[0].astype(f32))).astype(bf16)

    def fun(q, k, v, g):
        block = pl.BlockSpec((1, rows, depth), lambda h, i: (h, i, 0))
        keys = pl.BlockSpec((1, kv, depth), lambda h, i: (h, 0, 0))
        return call(body, struct(q.shape, bf16), (2, 1024 // rows), [block, keys, keys, block], block)(q, k, v, g)
    return fun, [((2, 1024, depth), bf16), ((2, kv, depth), bf16), ((2, kv, depth), bf16), ((2, 1024, depth), bf16)]


@family({"rows": 128}, {"rows": 256}, {"rows": 512}, held_back=True)
def clipped_adafactor(rows: int, columns: int = 1024) -> Any:
    """An update scaled by row and column statistics, clipped by its own size."""
    def body(p, g, r, c, p_out, r_out):
        grad = g[...].astype(f32)
        square = grad * grad + 1e-30
        row = 0.9 * r[...] + 0.1 * square.mean(-1, keepdims=True)
        r_out[...] = row
        update = grad * lax.rsqrt(row) * lax.rsqrt(c[...])
        update = update / jnp.maximum(1.0, jnp.sqrt((update * update).mean()))
        p_out[...] = p[...] - 1e-3 * update

    def fun(p, g, r, c):
        return call(body, (struct(p.shape, f32), struct((4096, 1), f32)), (4096 // rows,),
                    [rows_of(rows, columns), rows_of(rows, columns), rows_of(rows, 1), whole(1, columns)],
                    [rows_of(rows, columns), rows_of(rows, 1)])(p, g, r, c)
    return fun, [((4096, columns), f32), ((4096, columns), bf16), ((4096, 1), f32), ((1, columns), f32)]

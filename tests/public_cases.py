"""Kernels that failed for people, rebuilt from the numbers in their public reports."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import array

bf16, f32 = jnp.bfloat16, jnp.float32


def transpose():
    """(0, 1, 2) -> (1, 0, 2) of bf16 (384, 128, 512): windows of 32 MiB and 1.56 MiB of spill slots."""
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.transpose(x_ref[...], (1, 0, 2))

    def fun(x):
        return pl.pallas_call(
            kernel, grid=(3, 2), in_specs=[pl.BlockSpec((128, 64, 512), lambda i, j: (i, j, 0))],
            out_specs=pl.BlockSpec((64, 128, 512), lambda i, j: (j, i, 0)),
            out_shape=jax.ShapeDtypeStruct((128, 384, 512), bf16))(x)

    return fun, [array(384, 128, 512, dtype=bf16)]


def gated_mlp(hidden_block):
    """Gated MLP that accumulates in its output."""
    def kernel(x_ref, gate_ref, up_ref, down_ref, o_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        gate = jnp.dot(x_ref[...], gate_ref[...], preferred_element_type=f32)
        up = jnp.dot(x_ref[...], up_ref[...], preferred_element_type=f32)
        o_ref[...] += jnp.dot(gate * jax.nn.sigmoid(gate) * up, down_ref[...], preferred_element_type=f32)

    def fun(x, gate, up, down):
        return pl.pallas_call(
            kernel, grid=(2, 6912 // hidden_block),
            in_specs=[pl.BlockSpec((128, 1152), lambda i, j: (i, 0)),
                      pl.BlockSpec((1152, hidden_block), lambda i, j: (0, j)),
                      pl.BlockSpec((1152, hidden_block), lambda i, j: (0, j)),
                      pl.BlockSpec((hidden_block, 1152), lambda i, j: (j, 0))],
            out_specs=pl.BlockSpec((128, 1152), lambda i, j: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((256, 1152), f32))(x, gate, up, down)

    return fun, [array(256, 1152), array(1152, 6912), array(1152, 6912), array(6912, 1152)]


def matmul_relu():
    """Matmul and ReLU of a well-known guide: over by 128 KiB since single buffering stopped being automatic."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.maximum(jnp.dot(x_ref[...], y_ref[...], preferred_element_type=f32), 0)

    def fun(x, y):
        return pl.pallas_call(
            kernel, grid=(64, 64), in_specs=[pl.BlockSpec((128, 8192), lambda i, j: (i, 0)),
                                             pl.BlockSpec((8192, 128), lambda i, j: (0, j))],
            out_specs=pl.BlockSpec((128, 128), lambda i, j: (i, j)),
            out_shape=jax.ShapeDtypeStruct((8192, 8192), f32))(x, y)

    return fun, [array(8192, 8192), array(8192, 8192)]


def cache_update(slices=128):
    """KV-cache update: one scratch of `slices` half-MiB slices, operands in HBM, scalar prefetch."""
    def kernel(indices_ref, new_ref, cache_in_ref, cache_ref, scratch, semaphore):
        del cache_in_ref
        copy = pltpu.make_async_copy(new_ref.at[pl.ds(indices_ref[0, 0], slices)], scratch, semaphore)
        copy.start()
        copy.wait()
        out = pltpu.make_async_copy(scratch, cache_ref.at[pl.ds(indices_ref[1, 0], slices)], semaphore)
        out.start()
        out.wait()

    def fun(indices, new, cache):
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=(1,),
                in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
                out_specs=pl.BlockSpec(memory_space=pl.ANY),
                scratch_shapes=[pltpu.VMEM((slices, 64, 32, 128), bf16), pltpu.SemaphoreType.DMA]),
            out_shape=jax.ShapeDtypeStruct(cache.shape, bf16), input_output_aliases={2: 0})(indices, new, cache)

    return fun, [array(3, 256, dtype=jnp.int32), array(256, 64, 32, 128, dtype=bf16), array(256, 64, 32, 128, dtype=bf16)]


def swiglu():
    """Fused SwiGLU with two accumulators: 24 MiB of scratch and 26 MiB of windows."""
    def kernel(x_ref, gate_ref, up_ref, o_ref, gate_acc, up_acc):
        @pl.when(pl.program_id(2) == 0)
        def _():
            gate_acc[...] = jnp.zeros_like(gate_acc)
            up_acc[...] = jnp.zeros_like(up_acc)

        gate_acc[...] += jnp.dot(x_ref[...], gate_ref[...], preferred_element_type=f32)
        up_acc[...] += jnp.dot(x_ref[...], up_ref[...], preferred_element_type=f32)

        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            gate = gate_acc[...]
            o_ref[...] = (gate * jax.nn.sigmoid(gate) * up_acc[...]).astype(bf16)

    def fun(x, gate, up):
        weights = pl.BlockSpec((512, 3072), lambda i, j, k: (k, j))
        return pl.pallas_call(
            kernel, grid=(2, 1, 7), in_specs=[pl.BlockSpec((1024, 512), lambda i, j, k: (i, k)), weights, weights],
            out_specs=pl.BlockSpec((1024, 3072), lambda i, j, k: (i, j)),
            scratch_shapes=[pltpu.VMEM((1024, 3072), f32), pltpu.VMEM((1024, 3072), f32)],
            out_shape=jax.ShapeDtypeStruct((2048, 3072), bf16))(x, gate, up)

    return fun, [array(2048, 3584, dtype=bf16), array(3584, 3072, dtype=bf16), array(3584, 3072, dtype=bf16)]


def rms_norm(block):
    """RMSNorm of bf16 (16384, 6144) with its mathematics in f32."""
    def kernel(x_ref, w_ref, o_ref):
        x = x_ref[...].astype(f32)
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        o_ref[...] = (x * scale * w_ref[...]).astype(bf16)

    def fun(x, w):
        return pl.pallas_call(
            kernel, grid=(16384 // block,), in_specs=[pl.BlockSpec((block, 6144), lambda i: (i, 0)),
                                                      pl.BlockSpec((1, 6144), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((block, 6144), lambda i: (i, 0)),
            out_shape=jax.ShapeDtypeStruct((16384, 6144), bf16))(x, w)

    return fun, [array(16384, 6144, dtype=bf16), array(1, 6144)]


def scratch_of(mebibytes):
    """A kernel with so many MiB of scratch that it really uses."""
    def kernel(x_ref, o_ref, scratch):
        i = pl.program_id(0)
        scratch[pl.ds(i * 8, 8), :] = x_ref[...]
        o_ref[...] = scratch[pl.ds(((i * 7) % 4) * 8, 8), :]

    def fun(x):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(4,), in_specs=[block], out_specs=block,
                              scratch_shapes=[pltpu.VMEM((mebibytes * 2048, 128), f32)],
                              out_shape=jax.ShapeDtypeStruct((32, 128), f32))(x)

    return fun, [array(32, 128)]


def whole_copy():
    """A whole-array copy without a grid: 32 MiB in, 32 MiB out, single buffered."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return lambda x: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8192, 1024), f32))(x), [array(8192, 1024)]


def pinned():
    """156 MiB that the author pinned to VMEM."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def fun(x):
        x = pltpu.with_memory_space_constraint(x, pltpu.VMEM)
        block = pl.BlockSpec((8, 4096), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(x.shape[0] // 8,), in_specs=[block], out_specs=block,
                              out_shape=jax.ShapeDtypeStruct(x.shape, f32))(x)

    return fun, [array(9984, 4096)]


def many_scalars():
    """Scalar prefetch of 600 000 f32: too much SMEM, which is not VMEM."""
    def kernel(s_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * s_ref[pl.program_id(0)]

    def fun(scalars, x):
        block = pl.BlockSpec((8, 128), lambda i, s: (i, 0))
        return pl.pallas_call(
            kernel, grid_spec=pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(4,), in_specs=[block],
                                                           out_specs=block),
            out_shape=jax.ShapeDtypeStruct((32, 128), f32))(scalars, x)

    return fun, [array(600_000), array(32, 128)]

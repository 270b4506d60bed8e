"""The model of the spill slots: what is held, what is not, on small bodies with an answer that can be counted."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import array, device, lower

from jax_vmem_guard import _jax
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.footprint import footprint
from jax_vmem_guard.kernel_analysis import analyse
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.spills import REGISTERS, held_by, spill_slots
from jax_vmem_guard.vector_registers import moves_between_registers, registers

ROWS, COLUMNS = 256, 1024
WHOLE = ROWS * COLUMNS // 1024  # registers of one f32 block


def kernel_of(body, *arrays, out=None, scratch=(), grid=(4,), results=1):
    out = out or jax.ShapeDtypeStruct((ROWS * grid[0], COLUMNS), jnp.float32)

    def fun(*operands):
        spec = pl.BlockSpec((ROWS, COLUMNS), lambda *g: (g[0], 0))
        outs = [out] * results if results > 1 else out
        return pl.pallas_call(body, grid=grid, in_specs=[spec] * len(operands),
                              out_specs=[spec] * results if results > 1 else spec, out_shape=outs,
                              scratch_shapes=list(scratch))(*operands)

    with _jax.answering_for_chip(device("v5e")):
        (kernel,) = read_kernels(lower(fun, *arrays).module)
    return kernel


def held(body, *arrays, generation=5, **options):
    return held_by(analyse(kernel_of(body, *arrays, **options).code).ops, generation).expected


X = array(ROWS * 4, COLUMNS)
B = array(ROWS * 4, COLUMNS, dtype=jnp.bfloat16)


def test_elementwise_work_streams():
    def body(x, y, o):
        o[...] = jnp.exp(x[...]) * y[...] + jnp.tanh(x[...])

    assert held(body, X, X) == 0


def test_a_converted_value_used_after_a_reduction_of_it_is_held_whole():
    def body(x, o):
        v = x[...].astype(jnp.float32)
        o[...] = v - v.max(-1, keepdims=True)

    assert held(body, B) == WHOLE


def test_a_loaded_value_is_loaded_again_instead():
    def body(x, o):
        o[...] = x[...] - x[...].max(-1, keepdims=True)

    assert held(body, X) == 0


def test_a_mask_of_positions_is_made_again_instead():
    def body(x, o):
        v = x[...].astype(jnp.float32)
        top = v.max(-1, keepdims=True)
        late = jax.lax.broadcasted_iota(jnp.int32, v.shape, 1) > 7
        o[...] = jnp.where(late, v - top, 0.0)

    assert held(body, B) == WHOLE


def test_what_a_second_store_uses_again_is_held():
    def body(x, y, o, p):
        both = x[...].astype(jnp.float32) * y[...].astype(jnp.float32)
        o[...] = both
        p[...] = both * 2

    assert held(body, B, B, results=2) >= WHOLE


def test_a_loop_holds_what_it_carries():
    def body(x, o):
        o[...] = jax.lax.fori_loop(0, 8, lambda i, c: c * 1.5 + x[...], jnp.zeros((ROWS, COLUMNS), jnp.float32))

    assert held(body, X) >= WHOLE


def test_a_column_spread_over_lanes_takes_the_registers_of_a_column():
    assert registers((256, 1024), "f32", (True, False)) == 32
    assert registers((256, 1024), "f32", (False, True)) == 8
    assert registers((256, 1024), "bf16") == WHOLE // 2
    assert registers((3, 256, 128), "i8") == 24


@pytest.mark.parametrize(("source", "result", "moves"), [
    ((256, 128), (1, 256, 128), False),
    ((256, 128), (256, 1, 128), True),
    ((256,), (256, 1), False),
    ((4, 64, 128), (256, 128), False),
    ((256, 128), (256, 2, 64), True),
])
def test_a_cast_that_deals_rows_out_anew_is_work(source, result, moves):
    assert moves_between_registers(source, result) is moves


def test_few_held_registers_need_no_slot_and_more_need_more():
    assert spill_slots(REGISTERS / 2) == 0
    slots = [spill_slots(n) for n in range(0, 4000, 50)]
    assert slots == sorted(slots)
    assert 900 < spill_slots(1024) < 1200


def accumulate(steps, straight=False):
    """A sum in scratch over the second grid axis."""
    def body(x, o, acc):
        @pl.when(pl.program_id(1) == 0)
        def _():
            acc[...] = jnp.zeros_like(acc)
        acc[...] += x[...]

        @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
        def _():
            o[...] = acc[...]

    return kernel_of(body, X, scratch=[pltpu.VMEM((ROWS, COLUMNS), jnp.float32)], grid=(4, steps))


def test_scratch_that_carries_over_grid_steps_needs_memory():
    need = footprint(accumulate(2), chip_named("v5e"))
    assert need.forwarded_bytes == 0
    assert need.expected_bytes - need.spill_bytes == need.window_bytes + (1 << 20)


def test_scratch_of_a_reduction_in_one_step_stays_in_registers():
    need = footprint(accumulate(1), chip_named("v5e"))
    assert need.forwarded_bytes == need.scratch_bytes == 1 << 20
    assert [i.buffers for i in need.items if i.kind == "scratch"] == [0]


def test_scratch_filled_by_a_dma_needs_memory():
    def body(x, o, buffer, semaphore):
        copy = pltpu.make_async_copy(x, buffer, semaphore)
        copy.start()
        copy.wait()
        o[...] = buffer[...]

    kernel = kernel_of(body, X, scratch=[pltpu.VMEM((ROWS, COLUMNS), jnp.float32), pltpu.SemaphoreType.DMA])
    assert footprint(kernel, chip_named("v5e")).forwarded_bytes == 0


def test_the_analysis_of_a_body_is_made_once():
    code = accumulate(2).code
    assert analyse(code) is analyse(code)


def test_matmuls_hold_their_left_side_where_the_right_is_too_wide_for_one_pass():
    def matmul(m, k, n):
        def body(x, y, o):
            o[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
        fun = functools.partial(pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32)))
        arrays = array(m, k, dtype=jnp.bfloat16), array(k, n, dtype=jnp.bfloat16)
        (kernel,) = read_kernels(lower(fun, *arrays).module)
        return held_by(analyse(kernel.code).ops, 5).expected

    assert matmul(512, 256, 128) == 0
    assert matmul(512, 512, 512) == 512 * 512 * 2 / 4096

"""Single buffering: which windows, how many, and what the compiler makes of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernels_on_chips import CHIPS, MiB, add, array, lower, only_kernel, used_by_kernels, with_changes
from kernels_that_need_less import (
    BUFFERED,
    bytes_through,
    dynamic_grid,
    i8,
    i32,
    in_place,
    matmul_relu,
    one_page,
    pages,
    squeezed,
    weight_kept,
    wide,
)

from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.footprint import footprint
from jax_vmem_guard.kernels import Kernel, Window, read_kernels
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import buffering, limit

V5E = chip_named("v5e")
ONE = pl.Buffered(1)
SPILL_SLOT = 4 << 10  # bytes of one spilled vector register


def propose(kernel, chip, target, need=None):
    need = footprint(kernel, chip).expected_bytes if need is None else need
    return buffering.propose(kernel, need_bytes=need, target_bytes=target, chip=chip, policy=Policy())


def window(operand, role="input", rows=256, buffers=2, **fields):
    return Window(operand=operand, role=role, array_shape=(4096, 1024), block_shape=(rows, 1024), dtype="f32",
                  memory_space="vmem", buffers=buffers, **fields)


def kernel_with(*windows, grid=(8, 8), **fields):
    return Kernel(ordinal=0, fingerprint="f", name="k", source=None, core="tc", grid=grid, windows=windows, scratch=(),
                  limit_bytes=None, **fields)


# --- Which windows ----------------------------------------------------------------------------------------------------


def test_a_window_that_stays_over_the_innermost_steps_comes_first():
    kernel = kernel_with(window(0, varies_with=(0, 1)), window(1, varies_with=(0,)), window(2, varies_with=(1,)))
    assert propose(kernel, V5E, 5 * MiB, need=6 * MiB)[0].data["windows"] == [1]


def test_among_invariant_windows_the_one_that_saves_most_for_each_transfer_comes_first():
    kernel = kernel_with(window(0, rows=256, varies_with=(0, 1)), window(1, rows=128, varies_with=(0,)),
                         grid=(8, 8, 4))
    assert [c.window.operand for c in sorted(buffering.candidates(kernel, V5E), key=lambda c: c.rank)] == [1, 0]


def test_only_as_many_windows_as_needed():
    kernel = kernel_with(*(window(i, varies_with=(0,)) for i in range(4)))
    assert [len(c.data["windows"]) for c in propose(kernel, V5E, 6 * MiB, need=8 * MiB)] == [2, 3, 4]


def test_a_window_that_loses_little_is_left_out_where_another_has_to_go_anyway():
    kernel = kernel_with(window(0, rows=8, varies_with=(0,)), window(1, rows=2048, varies_with=(0, 1)))
    assert propose(kernel, V5E, 10 * MiB, need=17 * MiB)[0].data["windows"] == [1]


def test_where_all_windows_do_not_suffice_all_are_proposed_for_another_remedy_to_finish():
    kernel = kernel_with(window(0, varies_with=(0,)), window(1, varies_with=(1,)))
    (change,) = propose(kernel, V5E, 1 * MiB, need=4 * MiB)
    assert change.data["windows"] == [0, 1] and change.data["expected_bytes"] == 2 * MiB


def test_a_change_that_makes_every_step_wait_is_a_last_resort():
    kernel = kernel_with(window(0, varies_with=(0,)), window(1, varies_with=(1,)))
    assert [c.data["last_resort"] for c in propose(kernel, V5E, 3 * MiB, need=4 * MiB)] == [False, True]


def test_a_last_axis_of_one_step_is_not_the_innermost():
    kernel = kernel_with(window(0, varies_with=(0,)), grid=(8, 1))
    assert propose(kernel, V5E, 1 * MiB, need=2 * MiB)[0].data["last_resort"]


@pytest.mark.parametrize("fixed", [
    window(0, buffers=1), window(0, synchronous=True), window(0, role="prefetch"),
    Window(operand=0, role="input", array_shape=(4096, 1024), block_shape=(4096, 1024), dtype="f32",
           memory_space="any", buffers=0),
], ids=["single", "synchronous", "prefetch", "manual DMA"])
def test_what_has_one_buffer_or_none_is_left_alone(fixed):
    assert propose(kernel_with(fixed), V5E, 1 * MiB, need=2 * MiB) == ()


@pytest.mark.parametrize("fields", [{"readable": False}, {"core": "sc"}])
def test_a_kernel_that_cannot_be_read_or_runs_elsewhere_is_left_alone(fields):
    kernel = kernel_with(window(0, varies_with=(0,)))
    assert propose(dataclasses.replace(kernel, **fields), V5E, 1 * MiB, need=2 * MiB) == ()


def test_a_kernel_that_fits_is_left_alone():
    assert propose(kernel_with(window(0, varies_with=(0,))), V5E, 2 * MiB, need=2 * MiB) == ()


def test_operand_and_result_in_the_same_place_may_have_one_buffer():
    kernel = only_kernel(lower(in_place, array(2048, 2048), array(2048, 2048)))
    assert kernel.aliases and {c.position for c in buffering.candidates(kernel, V5E)} == {0, 1, 2}


def test_a_result_that_lands_elsewhere_in_its_operand_keeps_both_their_buffers():
    def elsewhere(x, y):
        return in_place(x, y, target=lambda i: (3 - i, 0))

    kernel = only_kernel(lower(elsewhere, array(2048, 2048), array(2048, 2048)))
    assert {c.position for c in buffering.candidates(kernel, V5E)} == {1}


def test_the_edit_names_the_block_spec_as_its_author_counts():
    program = lower(pages, i32(4), array(3, 512, 1536), array(2048, 1536))
    change = propose(only_kernel(program), V5E, 10 * MiB)[-1]
    assert change.edit.endswith("pl.Buffered(1) in the BlockSpec of in_specs[0], in_specs[1], out_specs[0]")
    assert "kernels_that_need_less.py:" in change.edit


# --- What the compiler makes of it ------------------------------------------------------------------------------------


#: On tpu7x XLA places this weight in VMEM by itself, and the kernel fits as it is.
FITS_AS_IT_IS = {("weight_kept", "tpu7x")}


@pytest.mark.parametrize("name, chip", [(n, c) for n in BUFFERED for c in CHIPS if (n, c) not in FITS_AS_IT_IS])
def test_one_buffer_alone_makes_the_kernel_fit_the_default_limit(name, chip):
    fun, arguments = BUFFERED[name]
    program = lower(fun, *arguments(wide(chip)), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    with pytest.raises(Exception, match="vmem"):
        program.compile()
    change = propose(kernel, facts, facts.default_limit_bytes)[0]
    (used,) = used_by_kernels(program.compile_changed(with_changes(program, change)))
    assert used <= facts.default_limit_bytes
    assert used == pytest.approx(change.data["expected_bytes"], abs=16 * SPILL_SLOT)


@pytest.mark.compat
@pytest.mark.parametrize("chip", CHIPS)
def test_each_window_gives_back_exactly_one_block(chip):
    program = lower(pages, i32(4), array(3, 256, 512), array(1024, 512), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    # A limit of the whole chip leaves XLA nothing, so it places no operand in VMEM by itself.
    whole_chip = limit.set_to(kernel, facts.capacity_bytes, need_bytes=None, limit_bytes=0)
    used = {}
    for change in propose(kernel, facts, 0) + propose(kernel, facts, 3 * MiB - 1):
        (used[len(change.data["windows"])],) = used_by_kernels(
            program.compile_changed(with_changes(program, whole_chip, change)))
    assert used == {1: 5 * MiB // 2, 2: 2 * MiB, 3: 3 * MiB // 2}


@pytest.mark.parametrize("chip", ["v5e", "v5p"])
def test_windows_of_20_mib_need_one_buffer_and_a_limit_where_the_default_is_16(chip):
    program = lower(lambda x: bytes_through(x, 20480), i8(40960, 1024), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    (change,) = propose(kernel, facts, facts.default_limit_bytes)
    need = change.data["expected_bytes"]
    raised = limit.raise_to(kernel, need_bytes=need, limit_bytes=facts.default_limit_bytes,
                            ceiling=facts.capacity_bytes)
    assert used_by_kernels(program.compile_changed(with_changes(program, raised, change))) == [need]


def test_windows_of_20_mib_cannot_fit_v4_and_the_proposal_says_so():
    chip = chip_named("v4")
    kernel = only_kernel(lower(lambda x: bytes_through(x, 20480), i8(40960, 1024), chip="v4"))
    (change,) = propose(kernel, chip, chip.capacity_bytes)
    assert change.data["expected_bytes"] > chip.capacity_bytes


@pytest.mark.compat
@pytest.mark.parametrize("chip", CHIPS)
def test_a_page_chosen_by_a_prefetched_scalar_alone_has_one_buffer_already(chip):
    program = lower(one_page, i32(1), array(3, 256, 512), array(1024, 512), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    whole_chip = limit.set_to(kernel, facts.capacity_bytes, need_bytes=None, limit_bytes=0)
    executable = program.compile_changed(with_changes(program, whole_chip))
    assert [w.buffers for w in kernel.windows if w.role != "prefetch"] == [1, 2, 2]
    assert used_by_kernels(executable) == [5 * MiB // 2] == [footprint(kernel, facts).expected_bytes]


# --- The same results -------------------------------------------------------------------------------------------------

#: name -> (kernel, small arguments, modes with one buffer for every window)
SMALL = {
    "matmul_relu": (matmul_relu, (array(256, 256), array(256, 256))),
    "bytes_through": (lambda x, **kw: bytes_through(x, 64, **kw), (i8(256, 128),)),
    "pages": (pages, (i32(4), array(3, 16, 128), array(64, 128))),
    "dynamic_grid": (lambda n, x, **kw: dynamic_grid(n, x, block=16, **kw), (i32(1), array(64, 128))),
    "squeezed": (squeezed, (array(2, 64, 128), array(2, 16, 128))),
    "weight_kept": (weight_kept, (array(256, 128), array(64, 128))),
    "in_place": (lambda x, y, **kw: in_place(x, y, block=16, **kw), (array(64, 128), array(64, 128))),
}


@pytest.mark.compat
@pytest.mark.parametrize("name", SMALL)
def test_the_code_is_what_the_author_would_have_got_with_buffered_1(name):
    fun, arguments = SMALL[name]
    program = lower(fun, *arguments)
    change = propose(only_kernel(program), V5E, 0)[-1]
    edited = _code(with_changes(program, change))
    assert edited == _code(lower(lambda *a: fun(*a, modes=(ONE,) * 4), *arguments).module)
    assert edited != _code(program.module)


def _code(module):
    (kernel,) = read_kernels(module)
    return kernel.code.module.operation.get_asm(enable_debug_info=False)


@pytest.mark.parametrize("name", SMALL)
def test_results_are_the_same_with_one_buffer(name):
    fun, shapes = SMALL[name]
    arguments = [_values(shape, i) for i, shape in enumerate(shapes)]
    with_two = fun(*arguments, interpret=True)
    with_one = fun(*arguments, modes=(ONE,) * 4, interpret=True)
    if name == "dynamic_grid":  # what the grid does not reach is not defined
        with_two, with_one = with_two[:32], with_one[:32]
    np.testing.assert_array_equal(with_two, with_one)


def _values(shape, seed):
    if shape.dtype == jnp.int32:
        return jnp.asarray([2] if shape.shape == (1,) else [0, 2, 1, 2], jnp.int32)
    values = np.random.default_rng(seed).integers(-4, 4, shape.shape)
    return jnp.asarray(values, shape.dtype)


# --- How it is written ------------------------------------------------------------------------------------------------


def test_the_ir_version_of_the_code_stays():
    program = lower(add, array(1024, 1024), array(1024, 1024))
    change = propose(only_kernel(program), V5E, 0)[-1]
    (edited,) = read_kernels(with_changes(program, change))
    assert edited.ir_version == only_kernel(program).ir_version is not None


def test_a_window_that_does_not_exist_is_named():
    program = lower(add, array(1024, 1024), array(1024, 1024))
    change = propose(only_kernel(program), V5E, 0)[-1]
    with pytest.raises(ValueError, match="`add` has 3 windows, there is no window 7"):
        with_changes(program, dataclasses.replace(change, data={**change.data, "windows": [7]}))

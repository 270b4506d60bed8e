"""Memory coloring: which arrays, how many, and what the compiler makes of it."""

import dataclasses

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import MiB, array, lower, only_kernel, used_by_kernels, with_changes
from kernels_that_need_less import (
    COLORED,
    add_whole,
    copy_whole,
    in_place,
    matmul_relu,
    scaled_in_place,
    sum_and_difference,
    weight_kept,
    wide,
)

from jax_vmem_guard import custom_call
from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.footprint import footprint
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.remedies import coloring, limit

#: v2, v3 and v4 know no colors.
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
V5E, TPU7X = chip_named("v5e"), chip_named("tpu7x")


def propose(kernel, chip, target=None, need=None):
    need = footprint(kernel, chip).expected_bytes if need is None else need
    target = chip.default_limit_bytes if target is None else target
    return coloring.propose(kernel, need_bytes=need, target_bytes=target, chip=chip, policy=Policy())


def config_after(program, *changes):
    (op,) = custom_call.custom_calls(with_changes(program, *changes))
    return custom_call.read_config(op)


# --- Which arrays -----------------------------------------------------------------------------------------------------


def test_as_many_arrays_as_needed_come_first():
    kernel = only_kernel(lower(sum_and_difference, array(1280, 1024), array(1280, 1024)))
    changes = propose(kernel, V5E, target=8 * MiB)
    assert [(c.data["inputs"], c.data["outputs"]) for c in changes] == [([0, 1], [0]), ([0, 1], [0, 1])]


def test_of_two_arrays_that_suffice_the_smaller_moves():
    def large_and_small(x, y):
        def kernel(x_ref, y_ref, o_ref):
            o_ref[...] = x_ref[0:8, :] + y_ref[0:8, :]

        return pl.pallas_call(kernel, out_shape=array(8, 1024))(x, y)

    kernel = only_kernel(lower(large_and_small, array(3072, 1024), array(1280, 1024)))
    assert [c.data["inputs"] for c in propose(kernel, V5E)] == [[1], [0], [0, 1], [0, 1]]


def test_an_array_that_is_there_twice_moves_before_one_that_is_there_once():
    kernel = only_kernel(lower(scaled_in_place, array(1024, 1024), array(2048, 1024)))
    twice = dataclasses.replace(kernel, aliases=(), windows=tuple(
        dataclasses.replace(w, array_shape=(256, 1024)) if w.operand == 0 else w for w in kernel.windows))
    assert [c.data["inputs"] for c in propose(twice, V5E, need=18 * MiB, target=17 * MiB)][0] == [0]


def test_an_operand_taken_in_blocks_stays():
    assert propose(only_kernel(lower(matmul_relu, array(1024, 8192), array(8192, 1024))), V5E) == ()


def test_an_operand_whose_memory_a_result_takes_over_stays():
    kernel = only_kernel(lower(lambda x, y: in_place(x, y, block=2048), array(2048, 2048), array(2048, 2048)))
    assert [c.number for c in coloring.candidates(kernel, V5E)] == [1]


@pytest.mark.parametrize("chip", ["v2", "v3", "v4"])
def test_chips_without_colors_get_no_proposal(chip):
    assert propose(only_kernel(lower(copy_whole, array(2560, 1024), chip=chip)), chip_named(chip)) == ()


@pytest.mark.parametrize("fields", [{"readable": False}, {"core": "sc"}, {"communicates": True}])
def test_a_kernel_that_cannot_be_read_runs_elsewhere_or_talks_to_others_is_left_alone(fields):
    kernel = only_kernel(lower(copy_whole, array(2560, 1024)))
    assert propose(dataclasses.replace(kernel, **fields), V5E) == ()


def test_an_operand_xla_may_fuse_into_stays():
    kernel = only_kernel(lower(add_whole, array(1536, 1024), array(1536, 1024)))
    fused = dataclasses.replace(kernel, allow_input_fusion=(True, False))
    assert [(c.window.role, c.number) for c in coloring.candidates(fused, V5E)] == [("input", 1), ("output", 0)]


def test_what_would_not_fit_the_chip_together_is_not_proposed():
    # 36 MiB in and 36 MiB out need 72 MiB wherever they are; the chip has 63.94.
    assert propose(only_kernel(lower(copy_whole, array(9216, 1024), chip="tpu7x")), TPU7X) == ()


def test_a_result_that_leaves_no_room_for_the_copy_out_is_not_proposed():
    # The copy follows the default limit of 32 MiB; 36 MiB beside it are more than tpu7x has.
    kernel = only_kernel(lower(copy_whole, array(9216, 1024), chip="tpu7x"))
    read_in_blocks = dataclasses.replace(kernel, windows=kernel.windows[1:])
    assert propose(read_in_blocks, TPU7X, need=37 * MiB) == ()
    on_v6e = propose(read_in_blocks, chip_named("v6e"), need=37 * MiB)
    assert [c.data["outputs"] for c in on_v6e] == [[0]]


def test_what_the_author_colored_counts_against_the_room_and_is_not_colored_again():
    kernel = dataclasses.replace(only_kernel(lower(add_whole, array(4096, 1024), array(4096, 1024), chip="tpu7x")),
                                 input_colors={0: 1})
    changes = propose(kernel, TPU7X, need=32 * MiB, target=16 * MiB)
    assert [(c.data["inputs"], c.data["outputs"]) for c in changes] == [([1], []), ([1], [0])]
    assert changes[0].data["room_bytes"] == TPU7X.capacity_bytes - 32 * MiB


def test_where_no_set_suffices_the_strongest_is_left_for_another_remedy_to_finish():
    kernel = only_kernel(lower(weight_kept, array(512, 1024), array(2304, 1024)))
    (change,) = propose(kernel, V5E, target=512 << 10)
    assert change.data["inputs"] == [1] and change.data["expected_bytes"] == 1 * MiB


def test_the_edit_says_what_the_author_would_write():
    kernel = only_kernel(lower(copy_whole, array(2560, 1024)))
    edit = propose(kernel, V5E, target=0)[-1].edit
    assert "kernels_that_need_less.py:" in edit
    assert "pltpu.with_memory_space_constraint(x, pltpu.VMEM) around input 0" in edit
    assert "out_shape=pltpu.VMEM(shape, dtype) for output 0" in edit


# --- What the compiler makes of it ------------------------------------------------------------------------------------


#: On tpu7x XLA places what these take whole in VMEM by itself.
FIT_ON_TPU7X = ("copy_whole", "add_whole", "sum_and_difference")


@pytest.mark.parametrize("name", FIT_ON_TPU7X)
def test_on_tpu7x_xla_places_such_operands_by_itself_and_the_kernel_fits_as_it_is(name):
    fun, arguments = COLORED[name]
    program = lower(fun, *arguments(wide("tpu7x")), chip="tpu7x")
    (used,) = used_by_kernels(program.compile())
    assert used <= TPU7X.default_limit_bytes < footprint(only_kernel(program), TPU7X).expected_bytes


@pytest.mark.parametrize("name, chip", [(n, c) for n in COLORED for c in CHIPS
                                        if c != "tpu7x" or n not in FIT_ON_TPU7X])
def test_colors_alone_make_the_kernel_fit_the_default_limit(name, chip):
    fun, arguments = COLORED[name]
    program = lower(fun, *arguments(wide(chip)), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    with pytest.raises(Exception, match="vmem"):
        program.compile()
    change = propose(kernel, facts)[0]
    assert used_by_kernels(program.compile_changed(with_changes(program, change))) == [change.data["expected_bytes"]]


@pytest.mark.compat
@pytest.mark.parametrize("chip", CHIPS)
def test_every_proposal_compiles_and_uses_what_it_says(chip):
    program = lower(sum_and_difference, array(640, 1024), array(640, 1024), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    changes = propose(kernel, facts, target=9 * MiB)
    whole_chip = limit.set_to(kernel, facts.capacity_bytes, need_bytes=None, limit_bytes=0)
    used = [used_by_kernels(program.compile_changed(with_changes(program, whole_chip, c))) for c in changes]
    assert used == [[c.data["expected_bytes"]] for c in changes] == [[n * 5 * MiB // 2] for n in (3, 2, 1, 0)]


@pytest.mark.parametrize("chip", CHIPS)
def test_a_whole_array_copy_without_a_grid_fits(chip):
    # 32 MiB in, 32 MiB out: together more than tpu7x and v5p have.
    program = lower(copy_whole, array(8192, 1024), chip=chip)
    kernel, facts = only_kernel(program), chip_named(chip)
    changes = propose(kernel, facts)
    if facts.capacity_bytes < 64 * MiB:
        assert changes == ()
        return
    assert used_by_kernels(program.compile_changed(with_changes(program, changes[0]))) == [
        changes[0].data["expected_bytes"]]


def test_a_kernel_above_the_capacity_of_the_chip_fits_when_its_double_buffered_operand_is_placed_once():
    program = lower(weight_kept, array(512, 1024), array(9216, 1024), chip="tpu7x")
    kernel = only_kernel(program)
    with pytest.raises(Exception, match="vmem"):
        program.compile()
    (change,) = propose(kernel, TPU7X, target=TPU7X.capacity_bytes)
    assert footprint(kernel, TPU7X).expected_bytes > TPU7X.capacity_bytes
    assert used_by_kernels(program.compile_changed(with_changes(program, change))) == [1 * MiB]


def test_colors_and_limit_share_the_chip_to_the_byte():
    program = lower(copy_whole, array(7680, 1024), chip="tpu7x")
    both = propose(only_kernel(program), TPU7X)[-1]
    room = TPU7X.capacity_bytes - 60 * MiB
    assert both.data["room_bytes"] == room
    assert used_by_kernels(program.compile_changed(with_changes(program, both))) == [0]
    one_tile_more = dataclasses.replace(
        both, data={**both.data, "room_bytes": room + 8192, "limit_bytes": room + 8192})
    with pytest.raises(Exception, match="alternate memory"):
        program.compile_changed(with_changes(program, one_tile_more))


def test_a_scaled_array_in_place_keeps_its_aliased_windows_and_moves_the_scale():
    program = lower(scaled_in_place, array(1024, 1024), array(4096, 1024))
    (change,) = propose(only_kernel(program), V5E)
    assert (change.data["inputs"], change.data["outputs"]) == ([1], [])


def test_a_dynamic_grid_and_prefetched_scalars_shift_the_operand_number():
    def fun(steps, which, table, x):
        def kernel(which_ref, table_ref, x_ref, o_ref):
            o_ref[...] = x_ref[...] + table_ref[pl.ds(pl.multiple_of(which_ref[0] * 8, 8), 8), :]

        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(steps[0],),
            in_specs=[pl.BlockSpec(table.shape, lambda i, which_ref: (0, 0)),
                      pl.BlockSpec((8, 1024), lambda i, which_ref: (i, 0))],
            out_specs=pl.BlockSpec((8, 1024), lambda i, which_ref: (i, 0)))
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=array(*x.shape))(which, table, x)

    program = lower(fun, array(1, dtype=jnp.int32), array(1, dtype=jnp.int32), array(5120, 1024), array(64, 1024))
    change = propose(only_kernel(program), V5E)[0]
    assert change.data["inputs"] == [2]
    (used,) = used_by_kernels(program.compile_changed(with_changes(program, change)))
    assert used == change.data["expected_bytes"]


# --- How it is written ------------------------------------------------------------------------------------------------


def test_the_colors_of_the_author_stay():
    program = lower(sum_and_difference, array(1280, 1024), array(1280, 1024))
    change = propose(only_kernel(program), V5E)[0]
    config = config_after(program)
    config["custom_call_config"].update(
        input_memory_space_colors=[{"operand_index": 1, "color": 0}],
        output_memory_space_colors=[{"color": 1, "shape_index": [1]}])
    coloring.apply(config, dataclasses.replace(change, data={**change.data, "inputs": [0], "outputs": [0]}))
    call = config["custom_call_config"]
    assert call["input_memory_space_colors"] == [{"operand_index": 0, "color": 1}, {"operand_index": 1, "color": 0}]
    assert call["output_memory_space_colors"] == [{"color": 1, "shape_index": [0]}, {"color": 1, "shape_index": [1]}]


def test_colors_of_results_in_the_older_form_are_kept_in_it():
    program = lower(sum_and_difference, array(1280, 1024), array(1280, 1024))
    change = propose(only_kernel(program), V5E)[0]
    config = config_after(program)
    config["custom_call_config"]["output_memory_colors"] = [-1, 1]
    coloring.apply(config, dataclasses.replace(change, data={**change.data, "outputs": [0]}))
    assert config["custom_call_config"]["output_memory_colors"] == [1, 1]
    assert "output_memory_space_colors" not in config["custom_call_config"]


def test_the_limit_is_lowered_to_what_the_colors_leave_and_a_lower_one_stays():
    program = lower(copy_whole, array(7680, 1024), chip="tpu7x")
    kernel = only_kernel(program)
    change = propose(kernel, TPU7X)[-1]
    room = change.data["room_bytes"]
    for before, after in ((TPU7X.capacity_bytes, room), (1 * MiB, 1 * MiB)):
        limited = limit.set_to(kernel, before, need_bytes=None, limit_bytes=0)
        assert config_after(program, limited, change)["scoped_memory_configs"][0]["size"] == after

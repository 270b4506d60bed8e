"""Which remedy the guard takes, and what it does when one is not enough or does not survive the whole program."""

import jax
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import MiB, add, array, device, used_by_kernels
from kernels_that_need_less import BUFFERED, COLORED, weight_kept, wide

import jax_vmem_guard as vmem_guard


def compiled(fun, *arguments, chip, remedies=None):
    """What the guard made of a program, and its repairs."""
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
    policy = vmem_guard.Policy() if remedies is None else vmem_guard.Policy(remedies=remedies)
    before = len(vmem_guard.repairs())
    executable = vmem_guard.jit(fun, policy=policy).lower(*placed).compile()
    return executable, vmem_guard.repairs()[before:]


def changes_of(*args, **kwargs):
    _, (repair,) = compiled(*args, **kwargs)
    return [change.remedy for change in repair.changes]


def squeezed(chip):
    """Its weights stay over the innermost steps."""
    fun, arguments = BUFFERED["squeezed"]
    return fun, *arguments(wide(chip))


def test_where_the_chip_has_more_the_limit_is_raised_and_nothing_else():
    assert changes_of(*squeezed("v5e"), chip="v5e") == ["limit"]


def test_where_the_limit_is_the_whole_chip_a_window_gets_one_buffer():
    assert changes_of(*squeezed("v4"), chip="v4") == ["buffering"]


@pytest.mark.parametrize("chip", ["v5e", "tpu7x"])
def test_buffering_alone(chip):
    executable, (repair,) = compiled(*squeezed(chip), chip=chip, remedies=("buffering",))
    assert [c.remedy for c in repair.changes] == ["buffering"]
    assert used_by_kernels(executable) == [repair.changes[0].need_bytes] == [15 * wide(chip) * MiB]


@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_coloring_alone(chip):
    fun, arguments = COLORED["copy_whole"]
    executable, (repair,) = compiled(fun, *arguments(wide(chip)), chip=chip, remedies=("coloring",))
    assert [c.remedy for c in repair.changes] == ["coloring"]
    assert used_by_kernels(executable) == [repair.changes[0].need_bytes] == [10 * wide(chip) * MiB]


def test_one_buffer_and_a_higher_limit_together():
    # 73 MiB: above the chip; with one buffer 37 MiB, above the default limit still.
    weight = (array(512, 1024), array(9216, 1024))
    assert changes_of(weight_kept, *weight, chip="tpu7x") == ["buffering", "limit"]


def test_the_order_of_the_policy_decides():
    weight = (array(512, 1024), array(9216, 1024))
    assert changes_of(weight_kept, *weight, chip="tpu7x", remedies=("coloring", "buffering", "limit")) == ["coloring"]


def test_a_program_that_compiles_is_not_touched():
    _, repairs = compiled(add, array(1024, 1024), array(1024, 1024), chip="v5e")
    assert repairs == ()


def written_whole(x):
    """Blocks of the array go in, the whole result stays in VMEM until the last of them."""
    def kernel(x_ref, o_ref):
        first = pl.program_id(0) * 1792

        def piece(i, _):
            o_ref[pl.ds(pl.multiple_of(first + i * 8, 8), 8), :] = x_ref[pl.ds(pl.multiple_of(i * 8, 8), 8), :] * 2
            return 0

        jax.lax.fori_loop(0, 224, piece, 0)

    return pl.pallas_call(
        kernel, grid=(x.shape[0] // 1792,), in_specs=[pl.BlockSpec((1792, 1024), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(x.shape, lambda i: (0, 0)), name="written_whole",
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_colors_that_find_no_place_in_the_program_are_taken_back_and_the_first_error_comes_out():
    # Alone the result of 28 MiB may be placed in VMEM; carried through a loop it would be there twice.
    def in_a_loop(x):
        return jax.lax.while_loop(lambda carried: carried[0, 0] < 9, written_whole, x)

    with pytest.raises(Exception, match="on stack for %") as failure:
        compiled(in_a_loop, array(7168, 1024), chip="tpu7x", remedies=("coloring",))
    notes = "\n".join(failure.value.__notes__)
    assert "output 0 (f32[7168x1024]) in VMEM placed by XLA" in notes and "alternate memory" in notes
    _, repairs = compiled(written_whole, array(7168, 1024), chip="tpu7x", remedies=("coloring",))
    assert [c.remedy for c in repairs[0].changes] == ["coloring"]


def test_a_program_whose_author_pinned_too_much_says_so_and_names_the_buffer():
    def pinned(x):
        spec = pl.BlockSpec((256, 1024), lambda i: (i, 0))

        def double(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2

        return pl.pallas_call(double, grid=(x.shape[0] // 256,), in_specs=[spec], out_specs=spec,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(
                                  pltpu.with_memory_space_constraint(x, pltpu.VMEM))

    with pytest.raises(Exception, match="Too many buffers are colored") as failure:
        compiled(pinned, array(156 * 256, 1024), chip="v5e")
    assert "Memory coloring (pinning to VMEM): `x.1`" in "\n".join(failure.value.__notes__)

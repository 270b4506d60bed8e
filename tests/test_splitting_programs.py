"""Split kernels inside larger programs: grad, vmap, shard_map, scan, several kernels, several axes, grids that are not."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from library_kernels import flash_attention, matmul
from split_support import (
    NewAxis,
    Refused,
    Split,
    apply_splits,
    call_named,
    find_pallas_calls,
    integers,
    rows_call,
    run,
    same,
    split,
    traced,
)

from jax_vmem_guard.chips import chip_named
from jax_vmem_guard.remedies import splitting

X = integers(0, 64, 64)
Y = integers(1, 64, 64)


def mm(x, y):
    return matmul(x, y, (32, 32, 32))


def split_all(program, *axes):
    return apply_splits(program, {site.path: Split(axes=axes) for site in find_pallas_calls(program)})


def test_a_program_without_kernels_has_none():
    """A program without kernels gives no call sites."""
    assert find_pallas_calls(traced(lambda x: jnp.sin(x).sum(), X)) == ()


def test_sites_say_what_a_kernel_is():
    """A call site has the kernel's name, source line, grid and block shapes."""
    site = call_named(traced(mm, X, Y))
    assert site.name == "matmul" and site.grid == (2, 2, 2)
    assert site.blocks == ((32, 32),) * 3
    assert os.path.basename(site.source).startswith("library_kernels.py:")


WRAPPED = {
    "jit": jax.jit(mm),
    "scan": lambda x, y: lax.scan(lambda c, _: (mm(c, y) % 7, mm(c, c)), x, None, length=2),
    "while": lambda x, y: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, mm(c[1], y) % 5), (0, x))[1],
    "cond": lambda x, y: lax.cond(x[0, 0] > 0, lambda: mm(x, y), lambda: mm(y, x)),
    "remat": jax.checkpoint(mm),
    "vmap": lambda x, y: jax.vmap(mm)(jnp.stack([x, y]), jnp.stack([y, y])),
    "vmap of one argument": lambda x, y: jax.vmap(mm, in_axes=(None, 1))(x, jnp.stack([y, x], axis=1)),
    "vmap of vmap": lambda x, y: jax.vmap(jax.vmap(mm, in_axes=(None, 0)), in_axes=(0, None))(
        jnp.stack([x, y]), jnp.stack([y, x])),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_nested_kernels_are_found_and_split(name):
    """The kernel is found inside the transformation or control flow, split, and the results stay the same."""
    program = traced(WRAPPED[name], X, Y)
    sites = find_pallas_calls(program)
    assert sites
    axis = len(sites[0].grid) - 2  # the columns; vmap puts its axes in front
    assert same(program, split_all(program, (axis, 2)), X, Y)


def test_grad_through_custom_vjp():
    """Kernels of a custom_vjp are split in the forward and in the backward pass of a gradient."""
    @jax.custom_vjp
    def product(x, y):
        return mm(x, y)

    product.defvjp(lambda x, y: (mm(x, y), (x, y)), lambda res, g: (mm(g, res[1].T), mm(res[0].T, g)))
    program = traced(jax.grad(lambda x, y: (product(x, y) * jnp.tril(jnp.ones((64, 64)))).sum(), argnums=(0, 1)), X, Y)
    assert len(find_pallas_calls(program)) >= 2
    assert same(program, split_all(program, (0, 2)), X, Y)


def test_grad_of_a_scan_of_kernels():
    """A training loop: gradient of a scan over flash attention, its three kernels split."""
    q = integers(2, 1, 1, 256, 128)
    attend = flash_attention(256, 256)

    def loss(q):
        return lax.scan(lambda c, _: (attend(c, q, q), None), q, None, length=2)[0].sum()

    program = traced(jax.grad(loss), q)
    assert len(find_pallas_calls(program)) >= 3
    changed = split_all(program, (2, 2))
    assert same(program, changed, q, tolerance=2e-6)


def test_shard_map():
    """A kernel inside shard_map over two CPU devices, in a process that has two."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    script = pathlib.Path(__file__).with_name("split_on_two_devices.py")
    path = os.pathsep.join([str(script.parent.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path},
                          capture_output=True, text=True, timeout=120, check=False)
    assert "same on 2 devices" in done.stdout, done.stderr[-2000:]


def test_only_the_named_kernel_changes():
    """Of two kernels one is split; the other's equation is the same object as before."""
    program = traced(lambda x, y: mm(mm(x, y), y), X, Y)
    first, second = find_pallas_calls(program)
    changed = apply_splits(program, {second.path: Split(axes=((0, 2),))})
    after = find_pallas_calls(changed)
    assert after[0].eqn is first.eqn and after[1].grid == (4, 2, 2)
    assert same(program, changed, X, Y)


@pytest.mark.parametrize("axes", [((0, 2), (1, 4)), ((1, 2), (0, 2)), ((0, 2), (0, 2)), ((0, 4),)])
def test_several_axes_together(axes):
    """Axes are split one after the other, in any order, the same one twice as well."""
    program = traced(mm, X, Y)
    assert same(program, split(program, *axes), X, Y)


def test_a_kernel_without_a_grid_gets_one():
    """A kernel on whole arrays is given a grid along a dimension of its output, and along two."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    program = traced(lambda x, y: pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32))(x, y), X, Y)
    changed = split(program, (NewAxis(0, 0), 4), (NewAxis(0, 1), 2))
    assert call_named(changed).grid == (2, 4)
    assert call_named(changed).blocks == ((16, 64), (64, 32), (16, 32))
    assert same(program, changed, X, Y)


def test_a_new_axis_reaches_what_the_grid_does_not():
    """A kernel that adds up over its only grid axis is split along its columns instead."""
    def kernel(x_ref, o_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...], axis=0, keepdims=True)

    program = traced(lambda x: pl.pallas_call(
        kernel, grid=(4,), in_specs=[pl.BlockSpec((16, 64), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((1, 64), lambda i: (0, 0)), out_shape=jax.ShapeDtypeStruct((1, 64), jnp.float32))(x), X)
    with pytest.raises(Refused):
        split(program, (0, 2))
    assert same(program, split(program, (NewAxis(0, 1), 4)), X)


def test_a_new_axis_cuts_blocks_that_move():
    """Rows looked up in a table, written at another table's place, with a scratch that adds up over the steps."""
    def kernel(from_ref, to_ref, x_ref, o_ref, s_ref):
        @pl.when(pl.program_id(0) == 0)
        def _():
            s_ref[...] = jnp.zeros_like(s_ref)

        s_ref[...] += x_ref[...]
        o_ref[...] = s_ref[...] + lax.broadcasted_iota(jnp.int32, (16, 64), 0).astype(jnp.float32)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2, grid=(4,), in_specs=[pl.BlockSpec((16, 64), lambda i, f, t: (f[i], 0))],
        out_specs=pl.BlockSpec((16, 64), lambda i, f, t: (t[i], 0)), scratch_shapes=[pltpu.VMEM((16, 64), jnp.float32)])
    fun = pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    program = traced(lambda x: fun(jnp.asarray([3, 0, 2, 2], jnp.int32), jnp.asarray([1, 3, 0, 2], jnp.int32), x), X)
    with pytest.raises(Refused):
        split(program, (0, 2))
    changed = split(program, (NewAxis(0, 0), 2))
    assert call_named(changed).grid == (2, 4) and call_named(changed).blocks == ((8, 64), (8, 64))
    assert same(program, changed, X)
    assert same(program, split(program, (NewAxis(0, 0), 2), (NewAxis(0, 1), 4)), X)


@pytest.mark.parametrize(("rows", "block", "parts"), [(50, 32, 2), (50, 32, 4), (33, 32, 4), (17, 16, 2), (40, 16, 2)])
def test_ragged_edges(rows, block, parts):
    """Arrays that end inside a block get no step wholly outside."""
    def kernel(x_ref, o_ref):
        row = pl.program_id(0) * block + lax.broadcasted_iota(jnp.int32, (block, 64), 0)
        o_ref[...] = jnp.where(row < rows, x_ref[...] * 2 + row.astype(jnp.float32), 0)

    x = integers(3, rows, 64)
    program = traced(rows_call(kernel, rows=rows, columns=64, block=block), x)
    changed = split(program, (0, parts))
    assert call_named(changed).grid == (-(-rows // (block // parts)),)
    assert same(program, changed, x)


def test_scalar_prefetch():
    """A prefetched table that says which column block to read; the rows are split."""
    def kernel(table_ref, x_ref, o_ref):
        o_ref[...] = x_ref[...] * table_ref[pl.program_id(1)].astype(jnp.float32)

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(2, 2), in_specs=[pl.BlockSpec((32, 32), lambda i, j, t: (i, t[j]))],
        out_specs=pl.BlockSpec((32, 32), lambda i, j, t: (i, j)))
    fun = pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32))
    program = traced(lambda x: fun(jnp.asarray([1, 0], jnp.int32), x), X)
    assert same(program, split(program, (0, 4)), X)


def test_shared_arrays():
    """An input that the output overwrites, cut alike."""
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...] + y_ref[...]

    program = traced(rows_call(kernel, rows=64, columns=64, block=32, inputs=2, input_output_aliases={0: 0}), X, Y)
    assert same(program, split(program, (0, 4)), X, Y)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.uint8])
def test_iotas_of_narrow_types_are_offset_in_int32(dtype):
    """The offset of a part is added before the iota is converted: 16-bit floats and 8-bit integers would round or wrap."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + lax.broadcasted_iota(dtype, (512, 64), 0).astype(jnp.float32)

    x = jnp.zeros((512, 64), jnp.float32)
    program = traced(rows_call(kernel, rows=512, columns=64, block=512), x)
    assert same(program, split(program, (NewAxis(0, 0), 4)), x)


def test_number_of_programs_stays_the_original():
    """`pl.num_programs` and `pl.program_id` keep their old meaning in the split kernel."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + (pl.num_programs(0) * 10 + pl.program_id(0)).astype(jnp.float32)

    program = traced(rows_call(kernel, rows=64, columns=64, block=32), X)
    assert same(program, split(program, (0, 4)), X)


def test_options_are_ordered_and_cheap_to_read():
    """Single axes come first, cheapest first; each names what it saves and costs; refusals name their axis."""
    site = call_named(traced(functools.partial(matmul, block=(1024, 512, 1024)),
                             jax.ShapeDtypeStruct((2048, 1024), jnp.float32),
                             jax.ShapeDtypeStruct((1024, 2048), jnp.float32)))
    options, refusals = splitting.splits(site, chip_named("v4"))
    assert options[0].split.axes in (((0, 2),), ((1, 2),)) and options[0].proven
    assert options[0].after.vmem_bytes < options[0].before.vmem_bytes and options[0].added_steps == 8
    prices = [o.price for o in options if len(o.split.axes) == 1]
    assert prices == sorted(prices)
    assert any(len(o.split.axes) == 2 for o in options)
    assert [r.axis for r in refusals if isinstance(r.axis, int)] == [2]


@pytest.mark.parametrize(("dtype", "block", "smallest"), [(jnp.float32, 64, 8), (jnp.bfloat16, 64, 16), (jnp.int8, 64, 32)])
def test_options_keep_whole_tiles(dtype, block, smallest):
    """No option makes blocks of rows smaller than a tile of the element type."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    call = rows_call(kernel, rows=128, columns=128, block=block, dtype=dtype)
    site = call_named(traced(call, jax.ShapeDtypeStruct((128, 128), dtype)))
    options, _ = splitting.splits(site, chip_named("v5e"))
    assert min(block // k for o in options for axis, k in o.split.axes if axis == 0) == smallest


def test_a_change_holds_the_split():
    """The record of a split says what to edit, and can be written as JSON and read back."""
    site = call_named(traced(functools.partial(matmul, block=(256, 256, 256)),
                             *[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2))
    options, _ = splitting.splits(site, chip_named("v4"))
    option = next(o for o in options if len(o.split.axes) == 2)
    change = splitting.change(site, option, fingerprint="f")
    assert splitting.from_data(json.loads(json.dumps(change.data))) == option.split
    assert change.remedy == "split" and "make grid axis 0 2 times longer" in change.edit
    assert "input `args[0]` (256, 256) -> (128, 256)" in change.edit


def test_a_new_axis_survives_json():
    """So can a split along a new axis."""
    assert splitting.from_data({"axes": [[[0, 1], 2], [0, 4]]}) == Split(axes=((NewAxis(0, 1), 2), (0, 4)))


def test_other_jax_versions_stand_aside(monkeypatch):
    """On a JAX version that splitting was not tried on nothing is split, and the reason says so."""
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    program = traced(mm, X, Y)
    with pytest.raises(Refused, match=r"was tested on jax 0\.8\.1, .*, not on 0\.13\.0"):
        split(program, (0, 2))
    assert "not on 0.13.0" in splitting.splits(call_named(program), chip_named("v4"))[1][0].reason


def test_run_reads_both_results():
    """The helper compares every result, not only the first."""
    assert len(run(traced(lambda x: (x, x + 1), X), X)) == 2


@pytest.mark.parametrize("kind", ["slices", "chunks"])
def test_scratch_written_piece_by_piece(kind):
    """A scratch that constant slices, or a loop over its chunks, fill in every step carries nothing."""
    def kernel(x_ref, o_ref, s_ref):
        if kind == "slices":
            s_ref[:, :16] = x_ref[:, :16] * 2
            s_ref[:, 16:] = x_ref[:, 16:] + s_ref[:, :16].sum(axis=1, keepdims=True)
        else:
            def one(i, _):
                s_ref[pl.ds(i * 8, 8), :] = x_ref[pl.ds(i * 8, 8), :] * 2
                s_ref[pl.ds(i * 8, 8), :] += 1

            lax.fori_loop(0, 4, one, None)
        o_ref[...] = s_ref[...]

    program = traced(rows_call(kernel, rows=64, columns=64, block=32, scratch_shapes=[pltpu.VMEM((32, 64), jnp.float32)]), X)
    assert same(program, split(program, (0, 2)), X)


def test_scratch_written_in_part_may_carry():
    """Slices that leave a column out do not fill a scratch."""
    def kernel(x_ref, o_ref, s_ref):
        s_ref[:, :16] = x_ref[:, :16]
        s_ref[:, 17:] = x_ref[:, 17:]
        o_ref[...] = s_ref[...]

    program = traced(rows_call(kernel, rows=64, columns=64, block=32, scratch_shapes=[pltpu.VMEM((32, 64), jnp.float32)]), X)
    with pytest.raises(Refused, match="may carry values"):
        split(program, (0, 2))

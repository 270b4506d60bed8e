"""Reading kernels out of lowered programs: what a record says is what the source asked for."""

import functools
import json
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from kernels_on_chips import add, add_in_place, array, copy_whole, device, lower

from jax_vmem_guard import _jax, custom_call
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.mosaic import decode_kernel

X = array(1024, 256)


def kernels_of(fun, *arguments, chip="v5e"):
    with _jax.answering_for_chip(device(chip)):
        return read_kernels(lower(fun, *arguments, chip=chip).module)


def kernel_of(fun, *arguments, chip="v5e"):
    (kernel,) = kernels_of(fun, *arguments, chip=chip)
    return kernel


def copy_rows(x, block=256, index_map=lambda i: (i, 0), grid=None, **options):
    """A copy of blocks of rows; the options go to the block specification of the input."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    return pl.pallas_call(
        kernel, grid=grid or (x.shape[0] // block,), in_specs=[pl.BlockSpec((block, x.shape[1]), index_map, **options)],
        out_specs=pl.BlockSpec((block, x.shape[1]), lambda *g: (g[0], 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


# ---- windows


def test_a_window_has_the_shapes_type_and_two_buffers_of_its_block():
    kernel = kernel_of(add, X, X)
    assert kernel.grid == (4,)
    assert [(w.operand, w.role) for w in kernel.windows] == [(0, "input"), (1, "input"), (2, "output")]
    assert {(w.array_shape, w.block_shape, w.dtype, w.memory_space, w.buffers) for w in kernel.windows} == {
        ((1024, 256), (256, 256), "f32", "vmem", 2)}
    assert {w.varies_with for w in kernel.windows} == {(0,)}


def test_squeezed_dimensions_count_one():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
        spec = pl.BlockSpec((None, 128, 256), lambda b, i: (b, i, 0))
        return pl.pallas_call(kernel, grid=(2, 4), in_specs=[spec], out_specs=spec,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    window = kernel_of(fun, array(2, 512, 256)).windows[0]
    assert (window.block_shape, window.array_shape, window.varies_with) == ((1, 128, 256), (2, 512, 256), (0, 1))


def test_a_constant_index_map_keeps_one_buffer():
    window = kernel_of(functools.partial(copy_rows, index_map=lambda i: (0, 0)), X).windows[0]
    assert (window.buffers, window.constant_index, window.varies_with) == (1, True, ())


def test_single_buffering_asked_for_is_seen():
    window = kernel_of(functools.partial(copy_rows, pipeline_mode=pl.Buffered(1)), X).windows[0]
    assert (window.buffers, window.synchronous, window.constant_index) == (1, True, False)


def test_a_grid_of_one_step_keeps_one_buffer():
    assert {w.buffers for w in kernel_of(functools.partial(copy_rows, block=1024), X).windows} == {1}


def test_an_axis_with_one_step_does_not_make_a_window_vary():
    window = kernel_of(functools.partial(copy_rows, grid=(4, 1), index_map=lambda i, j: (j, j)), X).windows[0]
    assert (window.buffers, window.varies_with) == (1, ())


def test_without_a_grid_the_whole_array_is_the_block():
    kernel = kernel_of(copy_whole, X)
    assert kernel.grid == ()
    assert {(w.block_shape, w.buffers) for w in kernel.windows} == {((1024, 256), 1)}


def test_an_operand_left_in_hbm_has_no_buffer():
    def fun(x):
        def kernel(x_ref, o_ref, buffer, semaphore):
            copy = pltpu.make_async_copy(x_ref.at[pl.ds(0, 256)], buffer, semaphore)
            copy.start()
            copy.wait()
            o_ref[...] = buffer[...]
        return pl.pallas_call(kernel, grid=(4,), in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                              out_specs=pl.BlockSpec((256, 256), lambda i: (i, 0)),
                              scratch_shapes=[pltpu.VMEM((256, 256), jnp.float32), pltpu.SemaphoreType.DMA],
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    kernel = kernel_of(fun, X)
    assert (kernel.windows[0].memory_space, kernel.windows[0].buffers) == ("any", 0)
    assert [(r.shape, r.memory_space) for r in kernel.scratch] == [((256, 256), "vmem"), ((), "semaphore")]


def prefetching(dynamic):
    def fun(ids, x, *steps):
        def kernel(ids_ref, x_ref, o_ref):
            o_ref[...] = x_ref[...]
        spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(steps[0],) if dynamic else (4,),
            in_specs=[pl.BlockSpec((256, 256), lambda i, ids: (ids[i], 0))],
            out_specs=pl.BlockSpec((256, 256), lambda i, ids: (i, 0)))
        return pl.pallas_call(kernel, grid_spec=spec, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(ids, x)

    steps = (array(dtype=jnp.int32),) if dynamic else ()
    return kernel_of(fun, array(4, dtype=jnp.int32), X, *steps)


def test_prefetched_scalars_decide_where_a_window_is():
    ids, x, out = prefetching(dynamic=False).windows
    assert (ids.role, ids.memory_space, ids.buffers) == ("prefetch", "smem", 0)
    assert (x.data_dependent, x.buffers) == (True, 2)
    assert not out.data_dependent


def test_the_bounds_of_a_dynamic_grid_are_operands_that_are_no_windows():
    kernel = prefetching(dynamic=True)
    assert kernel.grid == (None,)
    assert [(w.operand, w.role) for w in kernel.windows] == [(1, "prefetch"), (2, "input"), (3, "output")]
    assert kernel.windows[2].array_shape == (1024, 256)


def test_allocations_of_nested_scopes_live_together_and_those_of_siblings_do_not():
    def fun(x):
        def kernel(x_ref, o_ref):
            def outer(a):
                a[...] = x_ref[...]

                def inner(b):
                    b[...] = a[...] * 2
                    o_ref[...] = b[...]
                pl.run_scoped(inner, pltpu.VMEM((256, 256), jnp.float32))

            def sibling(c):
                c[...] = x_ref[...].astype(jnp.bfloat16)
                o_ref[...] += c[...].astype(jnp.float32)
            pl.run_scoped(outer, pltpu.VMEM((256, 256), jnp.float32))
            pl.run_scoped(sibling, pltpu.VMEM((256, 256), jnp.bfloat16))
        spec = pl.BlockSpec((256, 256), lambda i: (i, 0))
        return pl.pallas_call(kernel, grid=(4,), in_specs=[spec], out_specs=spec,
                              out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    chains = kernel_of(fun, X).alloca_chains
    assert [tuple(r.dtype for r in chain) for chain in chains] == [("f32", "f32"), ("bf16",)]


# ---- where kernels are found


def test_kernels_inside_loops_and_branches_are_found():
    def fun(x):
        x, _ = jax.lax.scan(lambda c, _: (add(c, c, name="in_scan"), None), x, None, length=3)
        x = jax.lax.cond(x[0, 0] > 0, lambda a: add(a, a, name="in_true"), lambda a: add(a, a, name="in_false"), x)
        return jax.lax.while_loop(lambda a: a[0, 0] < 1, lambda a: add(a, a, name="in_while"), x)

    assert {k.name for k in kernels_of(fun, X)} == {"in_scan", "in_true", "in_false", "in_while"}


def test_a_function_called_twice_holds_its_kernel_once():
    inner = jax.jit(lambda x: add(x, x))
    assert len(kernels_of(lambda x: inner(inner(x)), X)) == 1


def test_a_kernel_in_shard_map_has_the_shapes_of_one_device():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    rows = jax.sharding.PartitionSpec("d")
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.sharding.NamedSharding(mesh, rows))
    fun = jax.shard_map(lambda x: add(x, x, block=128), mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    (kernel,) = read_kernels(jax.jit(fun).lower(placed).compiler_ir("stablehlo"))
    assert kernel.windows[0].array_shape == (256, 256)


def test_text_and_bytecode_read_like_the_module():
    module = lower(add, X, X).module
    (kernel,) = read_kernels(module)
    assert read_kernels(str(module))[0].fingerprint == kernel.fingerprint
    assert read_kernels(_jax.stablehlo_bytecode(module)) == (kernel,)


def test_a_program_without_kernels_has_none():
    assert kernels_of(lambda x: x + 1, X) == ()


@pytest.mark.parametrize("config", ["", "no json", "[1]", '{"custom_call_config": {"body": "%%%"}}',
                                    '{"custom_call_config": {"body": "TUzvUg=="}}', '{"custom_call_config": 3}'])
def test_a_custom_call_that_no_pallas_made_is_listed_and_not_readable(config):
    escaped = config.replace('"', '\\"')
    (kernel,) = read_kernels(f"""
        func.func @main(%x: tensor<8x128xf32>) -> tensor<8x128xf32> {{
          %0 = stablehlo.custom_call @tpu_custom_call(%x) {{backend_config = "{escaped}"}}
            : (tensor<8x128xf32>) -> tensor<8x128xf32>
          return %0 : tensor<8x128xf32>
        }}""")
    assert not kernel.readable
    assert kernel.windows == ()


def test_a_sparsecore_kernel_is_read_as_one():
    sparse = pytest.importorskip("jax.experimental.pallas.tpu_sc", reason="this JAX has no SparseCore kernels")
    with _jax.answering_for_chip(device("v6e")):
        mesh = sparse.ScalarSubcoreMesh(axis_name="core", num_cores=1)
    out = jax.ShapeDtypeStruct(X.shape, X.dtype)

    def fun(x):
        def body(x_ref, o_ref):
            pltpu.sync_copy(x_ref, o_ref)
        try:
            kernel = pl.kernel(body, out_type=out, mesh=mesh)
        except TypeError:  # jax 0.8.1 and 0.9.0
            kernel = pl.kernel(body, out_shape=out, mesh=mesh)
        return kernel(x)

    kernel = kernel_of(fun, X, chip="v6e")
    assert (kernel.core, kernel.readable) == ("sc", True)


# ---- what a custom call asks for


def test_the_limit_the_kernel_sets_is_read():
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=5 << 20))(x)

    assert kernel_of(fun, X).limit_bytes == 5 << 20
    assert kernel_of(copy_whole, X).limit_bytes is None


def test_aliases_and_input_fusion_are_read():
    assert kernel_of(add_in_place, X, X).aliases == ((0, 0),)

    def fused(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...]
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              compiler_params=pltpu.CompilerParams(allow_input_fusion=[True]))(x)

    assert kernel_of(fused, X).allow_input_fusion == (True,)


def test_memory_space_colors_are_read_by_position():
    def change(_, config):
        config["custom_call_config"]["input_memory_space_colors"] = [{"operand_index": 1, "color": 1}]
        config["custom_call_config"]["output_memory_space_colors"] = [{"color": 1}]
        return True

    (kernel,) = read_kernels(custom_call.edit(lower(add, X, X).module, change))
    assert (kernel.input_colors, kernel.output_colors) == ({1: 1}, {0: 1})


def test_a_kernel_that_sends_to_another_device_communicates():
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    rows = jax.sharding.PartitionSpec("d")

    def send(x):
        def kernel(x_ref, o_ref, sent, received):
            copy = pltpu.make_async_remote_copy(x_ref, o_ref, sent, received,
                                                device_id=(jax.lax.axis_index("d") + 1) % 4,
                                                device_id_type=pl.DeviceIdType.LOGICAL)
            copy.start()
            copy.wait()
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
                              scratch_shapes=[pltpu.SemaphoreType.DMA] * 2)(x)

    fun = jax.shard_map(send, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    placed = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.sharding.NamedSharding(mesh, rows))
    (kernel,) = read_kernels(jax.jit(fun).lower(placed).compiler_ir("stablehlo"))
    assert kernel.communicates
    assert not kernel_of(add, X, X).communicates


# ---- identity


def built_from(text, file):
    space = {"jax": jax, "pl": pl}
    exec(compile(textwrap.dedent(text), file, "exec"), space)
    return space["fun"]


SOURCE = """
    def fun(x):
        def kernel(x_ref, o_ref):
            o_ref[...] = x_ref[...] * 2
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
"""


def test_moving_the_source_does_not_change_the_fingerprint():
    here = kernel_of(built_from(SOURCE, "/here/model.py"), X)
    there = kernel_of(built_from("\n" * 9 + SOURCE, "/there/other.py"), X)
    assert (here.source, there.source) == ("/here/model.py:5", "/there/other.py:14")
    assert here.fingerprint == there.fingerprint


def test_the_limit_is_not_part_of_the_fingerprint_but_what_is_asked_of_xla_is():
    module = lower(add, X, X).module

    def edited(change):
        return read_kernels(custom_call.edit(module, lambda _, config: change(config) or True))[0].fingerprint

    same = edited(lambda c: c.update(scoped_memory_configs=[{"memory_space": 1, "offset": 0, "size": 1 << 20}]))
    colored = edited(lambda c: c["custom_call_config"].update(input_memory_space_colors=[{"operand_index": 0,
                                                                                           "color": 1}]))
    assert same == read_kernels(module)[0].fingerprint
    assert colored != same


def test_code_and_shapes_are_part_of_the_fingerprint():
    prints = {kernel_of(functools.partial(add, block=b), X, X).fingerprint for b in (128, 256)}
    prints |= {kernel_of(add, array(2048, 256), array(2048, 256)).fingerprint, kernel_of(copy_rows, X).fingerprint}
    assert len(prints) == 4


def test_a_kernel_is_named_and_its_source_is_the_line_of_the_pallas_call():
    kernel = kernel_of(copy_whole, X)
    file, line = kernel.source.rsplit(":", 1)
    assert file.endswith("kernels_on_chips.py")
    assert "pl.pallas_call(kernel" in Path(file).read_text().splitlines()[int(line) - 1]
    assert kernel_of(functools.partial(add, name="my_add"), X, X).name == "my_add"


def test_a_library_kernel_says_where_it_was_called_from():
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    q = array(1, 1, 256, 128, dtype=jnp.bfloat16)
    kernel = kernel_of(lambda q: flash_attention(q, q, q), q)
    assert "flash_attention.py:" in kernel.source
    assert kernel.called_from.rsplit(":", 1)[0] == __file__


def test_a_body_is_decoded_once_per_process():
    (op,) = custom_call.custom_calls(lower(add, X, X).module)
    body = custom_call.read_config(op)["custom_call_config"]["body"]
    assert decode_kernel(body) is decode_kernel(json.loads(json.dumps(body)))

"""Finding, editing and isolating the TPU custom calls of a module."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_on_chips import MiB, add, add_in_place, array, copy_whole, lower, used_by_kernels

from jax_vmem_guard import custom_call
from jax_vmem_guard.chips import chip_named

pytestmark = pytest.mark.compat

X = array(1024, 1024)


def nested(x, y):
    """Kernels in a nested function, a loop and a branch, and one at the end."""
    z = jax.jit(lambda a, b: add(a, b, name="in_function"))(x, y)
    z = jax.lax.fori_loop(0, 3, lambda _, c: add(c, y, name="in_loop"), z)
    z = jax.lax.cond(z[0, 0] > 0, lambda a: add(a, y, name="in_branch"), lambda a: a, z)
    return add(z, y, name="at_end")


def names(module):
    return [str(op.attributes["kernel_name"]).strip('"') for op in custom_call.custom_calls(module)]


def test_custom_calls_in_functions_loops_and_branches_are_found():
    module = lower(nested, X, X).module
    assert sorted(names(module)) == ["at_end", "in_branch", "in_function", "in_loop"]


def test_other_custom_calls_are_not_kernels():
    program = lower(lambda x: jnp.linalg.qr(x)[0] @ copy_whole(x), array(256, 256))
    assert "custom_call @Qr" in str(program.module)
    assert len(custom_call.custom_calls(program.module)) == 1


def test_the_order_survives_a_clone():
    module = lower(nested, X, X).module
    assert names(custom_call.clone(module)) == names(module)


def test_a_clone_holds_the_same_program_with_its_locations():
    module = lower(add, X, X).module
    copy = custom_call.clone(module)
    assert str(copy) == str(module)
    assert "kernels_on_chips.py" in copy.operation.get_asm(enable_debug_info=True)


def test_an_edit_leaves_the_module_of_jax_alone():
    program = lower(add, X, X)
    before = str(program.module)
    edited = custom_call.edit(program.module, lambda _, config: config.update(seen=1) is None)
    assert str(program.module) == before
    assert custom_call.read_config(custom_call.custom_calls(edited)[0])["seen"] == 1


def test_a_custom_call_that_is_not_changed_keeps_its_configuration_to_the_byte():
    module = lower(nested, X, X).module
    edited = custom_call.edit(module, lambda ordinal, config: ordinal == 1 and config.update(seen=1) is None)
    same = [str(a.attributes["backend_config"]) == str(b.attributes["backend_config"])
            for a, b in zip(custom_call.custom_calls(module), custom_call.custom_calls(edited), strict=True)]
    assert same == [True, False, True, True]


def test_a_configuration_written_back_unchanged_compiles_to_the_same_use():
    program = lower(add, X, X)
    edited = custom_call.edit(program.module, lambda _, config: True)
    assert used_by_kernels(program.compile_changed(edited)) == used_by_kernels(program.compile()) == [6 * MiB]


def test_a_configuration_that_is_no_json_is_named():
    module = custom_call.clone(lower(add, X, X).module)
    op = custom_call.custom_calls(module)[0]
    with module.context:
        op.attributes["backend_config"] = type(op.attributes["call_target_name"]).get("not json")
    with pytest.raises(ValueError, match="no JSON: 'not json'"):
        custom_call.read_config(op)


def test_a_label_comes_back_in_the_compiler_error():
    program = lower(lambda x, y: add(add(x, y), y, block=1024), array(1024, 4096), array(1024, 4096))
    with pytest.raises(Exception, match="vmem") as failure:
        program.compile_changed(custom_call.label(program.module))
    assert custom_call.labels_in(str(failure.value))[0] in ("k0", "k1")


def test_labels_tell_apart_kernels_that_share_a_name():
    small, large = array(1024, 1024), array(1024, 4096)
    program = lower(lambda a, b: (add(a, a, block=8), add(b, b, block=1024)), small, large)
    with pytest.raises(Exception, match="vmem") as failure:
        program.compile_changed(custom_call.label(program.module, ["small", "large"]))
    assert custom_call.labels_in(str(failure.value)) == ("large",)


def test_a_label_keeps_the_metadata_of_the_author():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def with_metadata(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), metadata={"mine": "yes"})(x)

    text = str(custom_call.label(lower(with_metadata, X).module))
    assert "mine" in text and custom_call.labels_in(text.replace("\\22", '"')) == ("k0",)


def test_a_wrong_number_of_labels_is_refused():
    with pytest.raises(ValueError, match="1 TPU custom calls, got 2 labels"):
        custom_call.label(lower(add, X, X).module, ["a", "b"])


def test_a_kernel_alone_uses_what_it_uses_in_its_program():
    program = lower(lambda x, y: jnp.sin(add(jnp.cos(x), y)), X, X)
    alone = custom_call.isolate(program.module, 0)
    assert used_by_kernels(program.compile_alone(alone)) == [6 * MiB]


@pytest.mark.parametrize("ordinal", range(4))
def test_every_kernel_of_a_nested_program_can_be_taken_out(ordinal):
    program = lower(nested, X, X)
    alone = custom_call.isolate(program.module, ordinal)
    assert names(alone) == [names(program.module)[ordinal]]
    assert used_by_kernels(program.compile_alone(alone)) == [6 * MiB]


def test_a_kernel_alone_keeps_its_source_line():
    program = lower(add, X, X)
    assert "kernels_on_chips.py" in custom_call.isolate(program.module, 0).operation.get_asm(enable_debug_info=True)


def test_an_aliased_operand_is_given_up_not_copied():
    program = lower(add_in_place, X, X)
    alone = custom_call.isolate(program.module, 0)
    executable = program.compile_alone(alone)
    text = executable.hlo_modules()[0].to_string()
    assert used_by_kernels(executable) == [6 * MiB]
    assert "input_output_alias" in text and " copy(" not in text


def test_a_kernel_of_a_sharded_program_is_taken_out_for_one_device():
    topology = topologies.get_topology_desc(platform="tpu", topology_name=chip_named("v5e").topology)
    mesh = Mesh(topology.devices, ("x",))
    rows = PartitionSpec("x")
    mapped = jax.shard_map(add, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False)
    big = jax.ShapeDtypeStruct((4096, 1024), jnp.float32, sharding=NamedSharding(mesh, rows))
    module = jax.jit(mapped).lower(big, big).compiler_ir()
    alone = custom_call.isolate(module, 0)
    assert "tensor<1024x1024xf32>" in str(alone)
    assert used_by_kernels(lower(add, X, X).compile_alone(alone)) == [6 * MiB]


def test_an_ordinal_that_does_not_exist_is_named():
    with pytest.raises(IndexError, match="1 TPU custom calls, there is no number 3"):
        custom_call.isolate(lower(add, X, X).module, 3)

"""Declared choices: wherever the function stands in a program, the first choice that fits is taken."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from declared_programs import (
    ARRAY,
    LARGE,
    MIDDLE,
    SMALL,
    TRANSFORMED,
    blocked_add,
    choices_taken,
    compile_guarded,
    doubling,
    with_static_rows,
)
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_on_chips import MiB, add, array, device, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import Policy


@pytest.fixture
def repaired():
    """The repairs made by one test."""
    done = len(vmem_guard.repairs())
    return lambda: vmem_guard.repairs()[done:]


@pytest.mark.compat
@pytest.mark.parametrize("fun", TRANSFORMED, ids=lambda f: f.__name__)
def test_the_choice_that_fits_is_taken_wherever_the_function_stands(fun, repaired):
    compiled = compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert {change.remedy for change in repair.changes} == {"tunable"}
    assert repair.compiles == 1, "the failure was certain, so the first compile is the one that works"
    assert max(used_by_kernels(compiled)) == 12 * MiB


@pytest.mark.compat
def test_inside_shard_map_over_eight_devices(repaired):
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices
    mesh, spec = Mesh(np.array(devices).reshape(8), ("x",)), PartitionSpec("x")
    sharded = jax.shard_map(lambda x: blocked_add(x, x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    argument = jax.ShapeDtypeStruct((8 * 8192, 4096), jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = vmem_guard.jit(sharded).lower(argument).compile()
    assert choices_taken(repaired()[0]) == [2] and used_by_kernels(compiled) == [12 * MiB]


@pytest.mark.compat
def test_the_record_says_what_changed_and_how_to_keep_it(repaired):
    compile_guarded(lambda x: blocked_add(x, x), ARRAY)
    [change] = repaired()[0].changes
    assert (change.kernel, change.remedy, change.need_bytes) == ("add", "tunable", 12 * MiB)
    assert change.before == "block=512 (choice 1 of 3)" and change.after == "block=128 (choice 3 of 3)"
    assert "declared_programs.py:" in change.edit and "put block=128 first among the choices of `add`" in change.edit


def test_a_limit_is_raised_before_another_choice_is_taken(repaired):
    compiled = compile_guarded(lambda x: blocked_add(x, x), ARRAY, chip="v5e")
    assert [change.remedy for change in repaired()[0].changes] == ["limit"]
    assert used_by_kernels(compiled) == [48 * MiB]


def test_a_choice_and_a_limit_together_where_both_are_needed(repaired):
    compile_guarded(lambda x: blocked_add(x, x), array(8192, 16384), chip="v5e")
    [repair] = repaired()
    assert [change.remedy for change in repair.changes] == ["tunable", "limit"]
    assert choices_taken(repair) == [1] and repair.changes[1].need_bytes == 96 * MiB


def test_no_policy_has_to_allow_what_the_author_declared(repaired):
    compiled = compile_guarded(lambda x: blocked_add(x, x), ARRAY, chip="v5e", policy=Policy(remedies=()))
    assert choices_taken(repaired()[0]) == [2] and used_by_kernels(compiled) == [12 * MiB]


def test_after_a_failure_that_was_not_foreseen(repaired):
    compiled = compile_guarded(lambda x: blocked_add(x, x), ARRAY, policy=Policy(ahead="never"))
    [repair] = repaired()
    assert repair.compiles == 2 and choices_taken(repair) == [2] and used_by_kernels(compiled) == [12 * MiB]


@pytest.mark.compat
def test_two_functions_in_one_program_each_take_their_own_choice(repaired):
    other = vmem_guard.tunable(functools.partial(add, name="other"), choices=[{"block": MIDDLE}, {"block": 64}])
    fits = vmem_guard.tunable(functools.partial(add, name="fits"), block=[32, 16])

    def fun(x):
        return blocked_add(x, fits(x, other(x * 2, x)))

    compiled = compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert {change.kernel: change.after for change in repair.changes} == {
        "add": "block=128 (choice 3 of 3)", "other": "block=64 (choice 2 of 2)"}
    assert sorted(used_by_kernels(compiled)) == [3 * MiB, 6 * MiB, 12 * MiB] and repair.compiles == 1


def test_one_function_with_two_shapes_takes_a_choice_for_each(repaired):
    def fun(x):
        return blocked_add(x, x), blocked_add(x[:, :1024], x[:, :1024])

    compiled = compile_guarded(fun, ARRAY)
    [repair] = repaired()
    assert choices_taken(repair) == [2]
    assert sorted(used_by_kernels(compiled)) == [12 * MiB, 12 * MiB], "512 rows of 1024 fit as they are"


def test_two_functions_that_call_the_same_kernel_are_changed_together(repaired):
    twin = vmem_guard.tunable(add, block=[LARGE, SMALL])
    compile_guarded(lambda x: blocked_add(twin(x, x), x), ARRAY)
    assert sorted(choices_taken(repaired()[0])) == [1, 2]


def test_shapes_and_static_arguments_that_change_between_calls(repaired):
    vmem_guard.install()
    try:
        for rows, columns in ((8192, 4096), (4096, 4096), (4096, 1024)):
            placed = jax.ShapeDtypeStruct((8192, columns), jnp.float32,
                                          sharding=jax.sharding.SingleDeviceSharding(device("v4")))
            with_static_rows.lower(placed, rows=rows).compile()
    finally:
        vmem_guard.uninstall()
    assert [choices_taken(repair) for repair in repaired()] == [[2], [2]], "512 rows of 1024 fit as they are"
    first, second = (repair.changes[0].data["site"] for repair in repaired())
    assert "8192" in first and "8192" not in second


@pytest.mark.compat
def test_an_inner_jit_that_jax_has_traced_before_is_traced_again(repaired):
    inner = jax.jit(lambda x: blocked_add(x, x))
    inner.trace(ARRAY)
    jax.jit(lambda x: inner(x) * 3).trace(ARRAY)
    compiled = compile_guarded(lambda x: inner(x) * 2, ARRAY)
    assert choices_taken(repaired()[0]) == [2] and used_by_kernels(compiled) == [12 * MiB]


def test_jaxs_own_trace_keeps_the_first_choice(repaired):
    jitted = vmem_guard.jit(lambda x: blocked_add(x, x))
    before = str(jitted.trace(ARRAY).jaxpr)
    lower_with(jitted, ARRAY, chip="v4").compile()
    assert len(repaired()) == 1 and str(jitted.trace(ARRAY).jaxpr) == before


def test_a_second_compile_of_the_same_lowering_costs_nothing(repaired):
    jitted = vmem_guard.jit(lambda x: blocked_add(x, x))
    first = lower_with(jitted, ARRAY, chip="v4").compile()
    second = lower_with(jitted, ARRAY, chip="v4").compile()
    assert len(repaired()) == 1 and first.runtime_executable() is second.runtime_executable()


def test_the_program_is_traced_under_the_settings_it_was_traced_under(repaired):
    with jax.default_matmul_precision("float32"):
        lowered = lower_with(vmem_guard.jit(lambda x: blocked_add(x, x) @ x.T), ARRAY, chip="v4")
    assert "operand_precision={highest,highest}" in lowered.compile().as_text()
    assert choices_taken(repaired()[0]) == [2]


TRAINING = """
import jax, jax.numpy as jnp
import jax_vmem_guard as vmem_guard
from declared_programs import doubling

def loss(params, x):
    return jnp.mean(jnp.square(jnp.sin(doubling(x * params["scale"])) + params["bias"]))

@jax.jit
def train_step(params, momentum, x):
    value, gradient = jax.value_and_grad(loss)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, momentum), momentum, value

from kernels_on_chips import device
sharding = jax.sharding.SingleDeviceSharding(device("v4"))
def placed(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)

params = {"scale": jnp.ones(4096), "bias": jnp.zeros(4096)}
arguments = placed((params, params, jax.ShapeDtypeStruct((8192, 4096), jnp.float32)))
train_step.lower(*arguments).compile()
print([(c.remedy, c.after) for repair in vmem_guard.repairs() for c in repair.changes])
"""


@pytest.mark.compat
def test_a_training_step_under_plain_jit_with_the_environment_variable():
    root = os.path.dirname(os.path.dirname(vmem_guard.__file__))
    result = subprocess.run(
        [sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.path.join(root, "tests")]), "JAX_VMEM_GUARD": "fix"})
    assert result.stdout.strip() == "[('tunable', 'block=128 (choice 2 of 2)')]", result.stderr[-2000:]


def flash_gradient(attention, q, k, v):
    return jax.grad(lambda *qkv: jnp.sum(attention(*qkv, causal=True).astype(jnp.float32)), argnums=(0, 1, 2))(q, k, v)


def flash_blocks(block):
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    return flash.BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1, block_q_major_dkv=block,
                            block_k_major_dkv=block, block_k_dkv=block, block_q_dkv=block, block_k_major_dq=block,
                            block_k_dq=block, block_q_dq=block)


def tuned_flash(*blocks):
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    return vmem_guard.tunable(flash_attention, block_sizes=[flash_blocks(block) for block in blocks])


def test_jaxs_flash_attention_and_its_gradient(repaired):
    fun = functools.partial(flash_gradient, tuned_flash(512, 256, 128))
    compiled = compile_guarded(fun, *[array(1, 1, 512, 128, dtype=jnp.bfloat16)] * 3, policy=Policy(remedies=()),
                               compiler_options={"xla_tpu_scoped_vmem_limit_kib": "2048"})
    [repair] = repaired()
    assert len(choices_taken(repair)) == 1, "one choice for the kernels of both directions"
    assert len(used_by_kernels(compiled)) == 3 and max(used_by_kernels(compiled)) <= 2 * MiB


@pytest.mark.long
def test_jaxs_flash_attention_and_its_gradient_on_v4(repaired):
    compiled = compile_guarded(functools.partial(flash_gradient, tuned_flash(2048, 512)),
                               *[array(1, 1, 4096, 128, dtype=jnp.bfloat16)] * 3)
    assert choices_taken(repaired()[0]) == [1] and max(used_by_kernels(compiled)) <= 16 * MiB


def test_check_says_which_choice_a_chip_takes():
    checked = vmem_guard.check(lambda x: blocked_add(x, x), ARRAY, topology="v4")
    assert checked.fits and choices_taken(checked.repair) == [2]


def test_a_method_and_a_decorated_function(repaired):
    class Layer:
        @vmem_guard.tunable(block=[LARGE, SMALL])
        def __call__(self, x, *, block):
            return add(x, x, block=block)

    compile_guarded(Layer(), ARRAY)
    assert choices_taken(repaired()[0]) == [1]


def test_doubling_alone_fits_with_its_first_choice_on_a_large_chip(repaired):
    compile_guarded(doubling, array(8192, 1024), chip="v5e")
    assert repaired() == ()

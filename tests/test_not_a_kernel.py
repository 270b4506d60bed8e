"""What the guard says and writes when an instruction that is no kernel runs out of scoped VMEM."""

import jax
import jax.numpy as jnp
import pytest
from kernels_on_chips import add, array, lower_with

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import Policy

#: So small a limit for the whole compile makes XLA's own instructions fail.
SMALL = {"xla_tpu_scoped_vmem_limit_kib": "64"}



def compile_with(policy):
    """A gather under the small limit."""
    jitted = vmem_guard.jit(lambda x, i: x[i], policy=policy)
    arguments = [array(4096, 1024), array(512, dtype=jnp.int32)]
    return lower_with(jitted, *arguments).compile(compiler_options=SMALL)


def test_without_the_remedy_the_error_says_how_to_get_a_bug_report():
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_with(Policy(remedies=("limit",)))
    assert "JAX_VMEM_GUARD_BUG_REPORT_DIR" in "\n".join(error.value.__notes__)


def test_with_a_folder_a_bundle_is_written_and_named_in_the_error(tmp_path):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_with(Policy(mode="report", bug_report_dir=tmp_path))
    [bundle] = tmp_path.iterdir()
    assert str(bundle) in "\n".join(error.value.__notes__)
    assert (bundle / "reproduce.py").exists()


def test_a_kernel_and_an_instruction_that_both_fail_are_both_repaired():
    def fun(x, y, i):
        return add(x, x, block=512), y[i]

    arguments = [array(8192, 4096), array(4096, 1024), array(512, dtype=jnp.int32)]
    done = len(vmem_guard.repairs())
    lower_with(vmem_guard.jit(fun), *arguments).compile(compiler_options=SMALL)
    [repair] = vmem_guard.repairs()[done:]
    assert {change.remedy for change in repair.changes} == {"limit", "compile_limit"}
    assert repair.compiles <= 4

"""What people reported: repaired where a limit can repair it, explained with the compiler's own exception elsewhere."""

import jax
import public_cases as cases
import pytest
from kernels_on_chips import MiB, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import Policy

LIMIT_ONLY = Policy(remedies=("limit",))


def guarded(case, chip, policy=LIMIT_ONLY):
    fun, arguments = case
    return lower_with(vmem_guard.jit(fun, policy=policy), *arguments, chip=chip)


@pytest.mark.parametrize(("case", "chip", "message_size"), [
    (cases.transpose(), "v6e", 33.56), (cases.transpose(), "tpu7x", 33.56),
    (cases.gated_mlp(768), "v5e", 22.50),
    (cases.matmul_relu(), "v5e", 16.12),
    (cases.swiglu(), "v6e", 50.00),
    (cases.rms_norm(512), "v6e", 36.27),
    (cases.whole_copy(), "v6e", 64.00),
], ids=["transpose-v6e", "transpose-tpu7x", "gated_mlp-v5e", "matmul_relu-v5e", "swiglu-v6e", "rms_norm-v6e",
        "whole_copy-v6e"])
def test_a_limit_repairs_it_at_its_need(case, chip, message_size):
    fun, arguments = case
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001"):
        lower_with(jax.jit(fun), *arguments, chip=chip).compile()
    done = len(vmem_guard.repairs())
    compiled = guarded(case, chip).compile()
    [repair] = vmem_guard.repairs()[done:]
    [change] = repair.changes
    assert change.remedy == "limit"
    # The message's size is a lower bound: windows first, spill slots later.
    assert message_size - 0.01 <= change.need_bytes / MiB <= 1.05 * message_size
    assert change.need_bytes <= change.data["limit_bytes"] <= 1.1 * change.need_bytes
    assert repair.compiles <= 2
    [used] = used_by_kernels(compiled)
    assert change.data["limit_bytes"] <= 1.1 * used


@pytest.mark.parametrize(("case", "chip", "text", "said"), [
    (cases.cache_update(), "v5p", "Used 64.00M of 63.94M", "63.94"),
    (cases.cache_update(), "tpu7x", "Used 64.00M of 63.94M", "63.94"),
    (cases.rms_norm(256), "v4", "Used 18.51M of 16.00M", "16.00"),
    (cases.scratch_of(17), "v4", "would exceed memory", "17.00"),
], ids=["cache_update-v5p", "cache_update-tpu7x", "rms_norm-v4", "scratch-v4"])
def test_what_no_limit_repairs_keeps_the_compilers_error_and_gets_an_explanation(case, chip, text, said):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text) as error:
        guarded(case, chip).compile()
    notes = "\n".join(error.value.__notes__)
    assert said in notes and "jax_vmem_guard" in notes


def test_pinned_operands_are_explained():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Too many buffers are colored") as error:
        guarded(cases.pinned(), "v5e").compile()
    assert "pinned" in "\n".join(error.value.__notes__)


def test_scalar_memory_is_not_vmem_and_passes_through_untouched():
    with pytest.raises(jax.errors.JaxRuntimeError, match="smem") as error:
        guarded(cases.many_scalars(), "v5e").compile()
    assert not getattr(error.value, "__notes__", None)


def test_report_mode_changes_nothing_and_explains():
    done = len(vmem_guard.repairs())
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001") as error:
        guarded(cases.matmul_relu(), "v5e", Policy(mode="report")).compile()
    assert "mode `report`" in "\n".join(error.value.__notes__)
    assert len(vmem_guard.repairs()) == done


def test_mode_off_adds_nothing():
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001") as error:
        guarded(cases.matmul_relu(), "v5e", Policy(mode="off")).compile()
    assert not getattr(error.value, "__notes__", None)

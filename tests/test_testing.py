"""Fault injection for users' tests: compiles that fail on demand, and tests that fail when anything was repaired."""

import threading

import jax
import jax.numpy as jnp
import kernels_on_chips as chips
import pytest
from jax._src.interpreters import pxla
from jax.experimental import pallas as pl

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import hook
from jax_vmem_guard.fault_messages import FORMS
from jax_vmem_guard.testing import RepairsForbidden, forbid_repairs, inject_oom

ROWS = jnp.ones((8, 128), jnp.float32)


def interpreted(name="plus_one"):
    """A jitted function that calls one Pallas kernel on the CPU; a new one each time, so that it is compiled."""
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    @jax.jit
    def f(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name=name)(x)

    return f


def compile_for_v5e(block=64, name="add", rows=512):
    """Compiles a program with one kernel for a v5e, anew each time."""
    sharding = jax.sharding.SingleDeviceSharding(chips.device("v5e"))
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.float32, sharding=sharding)
    return jax.jit(lambda a, b: chips.add(a, b, block=block, name=name)).lower(x, x).compile()


@pytest.fixture(autouse=True)
def unguarded():
    yield
    vmem_guard.uninstall()


# inject_oom


def test_a_kernel_on_the_cpu_fails_with_the_exception_of_jax():
    """Without a TPU, without the guard: what error handling gets is what it would get from the compiler."""
    with inject_oom() as oom, pytest.raises(jax.errors.JaxRuntimeError) as caught:
        interpreted()(ROWS)
    assert type(caught.value) is jax.errors.JaxRuntimeError
    assert oom.messages == (str(caught.value),)
    assert "%plus_one.1" in oom.messages[0] and "limit 16.00M exceeded" in oom.messages[0]


def test_programs_without_a_kernel_pass():
    """JAX's own small programs, made while a test prepares its arrays, are not what the test is about."""
    with inject_oom() as oom:
        jax.jit(lambda x: x * 3)(ROWS)
        jnp.arange(17.0) + 1
    assert oom.compiles == 0


def test_times_and_skip_count_compiles_of_the_kernel():
    """The first passes, two fail, the rest pass again."""
    outcomes = []
    with inject_oom(kernel="plus_*", skip=1, times=2) as oom:
        for name in ("plus_one", "other", "plus_two", "plus_three", "plus_four"):
            try:
                interpreted(name)(ROWS)
                outcomes.append("ok")
            except jax.errors.JaxRuntimeError:
                outcomes.append("failed")
    assert outcomes == ["ok", "ok", "failed", "failed", "ok"]
    assert (oom.compiles, oom.failures) == (4, 2)


def test_a_program_can_be_named_instead_of_a_kernel():
    """Then one without kernels fails too, as non-kernel code does: in a fusion."""
    @jax.jit
    def train_step(x):
        return x * 5

    with inject_oom(program="train_*"), pytest.raises(jax.errors.JaxRuntimeError, match="kind=kLoop") as caught:
        train_step(ROWS)
    assert vmem_guard.diagnose(caught.value).is_kernel is False
    assert float(train_step(ROWS)[0, 0]) == 5.0


@pytest.mark.parametrize("chip", ["v4", "v5e", "tpu7x"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_diagnosed_as_what_it_is(form, chip):
    """The guard cannot tell an injected failure from a real one, and the numbers fit the chip."""
    sharding = jax.sharding.SingleDeviceSharding(chips.device(chip))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda a, b: chips.add(a, b, block=64, name="sum_rows")).lower(x, x)
    with inject_oom(form=form), pytest.raises(jax.errors.JaxRuntimeError) as caught:
        lowered.compile()
    found = vmem_guard.diagnose(caught.value)
    facts = chips.chip_named(chip)
    assert found.form == form
    if form == "limit":
        assert (found.instruction, found.limit_bytes) == ("sum_rows.1", facts.default_limit_bytes)
        assert found.is_kernel and found.size_bytes > found.limit_bytes
    if form == "capacity":
        assert found.size_bytes > found.capacity_bytes
        assert abs(found.capacity_bytes - facts.capacity_bytes) < 10 << 10  # the text has two decimals
        assert len(found.breakdown) == 2
    if form == "allocation":
        assert found.size_bytes > facts.capacity_bytes


def test_a_real_compile_for_a_tpu_fails_and_passes_after():
    """The lowering that failed compiles once the injection is over: nothing was left behind in JAX."""
    sharding = jax.sharding.SingleDeviceSharding(chips.device("v5e"))
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda a, b: chips.add(a, b, block=64)).lower(x, x)
    with inject_oom(kernel="add"), pytest.raises(jax.errors.JaxRuntimeError, match="%add.1"):
        lowered.compile()
    assert lowered.compile().as_text()


def test_several_injections_fail_in_turn():
    """Each counts for itself; the outer one, older, comes first."""
    with inject_oom(times=1) as outer, inject_oom(times=1, form="pinned") as inner:
        for _ in range(2):
            with pytest.raises(jax.errors.JaxRuntimeError):
                interpreted()(ROWS)
        interpreted()(ROWS)
    assert (outer.failures, inner.failures) == (1, 1)
    assert outer.messages[0].startswith("RESOURCE_EXHAUSTED") and inner.messages[0].startswith("FAILED_PRECONDITION")


def test_as_a_decorator_every_call_counts_anew():
    """A decorated test that runs twice fails its compile twice."""
    @inject_oom(times=1)
    def attempt():
        with pytest.raises(jax.errors.JaxRuntimeError):
            interpreted()(ROWS)
        interpreted()(ROWS)

    attempt()
    attempt()


def test_compiles_of_all_threads_count_exactly():
    """Of sixteen compiles in four threads exactly five fail."""
    failed = []

    def work():
        for _ in range(4):
            try:
                interpreted()(ROWS)
            except jax.errors.JaxRuntimeError:
                failed.append(1)

    with inject_oom(times=5, skip=3) as oom:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (oom.compiles, oom.failures, len(failed)) == (16, 5, 5)


@pytest.mark.parametrize("wrong, said", [({"form": "hbm"}, "limit, capacity, allocation, pinned"),
                                         ({"times": -1}, "`times`"), ({"skip": 1.5}, "`skip`")])
def test_a_wrong_argument_names_what_is_allowed(wrong, said):
    """Before anything is compiled."""
    with pytest.raises(ValueError, match=said):
        inject_oom(**wrong)


def test_jax_is_as_before_afterwards():
    """Where nothing was guarded before, nothing is patched after; where something was, it stays guarded."""
    before = (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
    with inject_oom():
        assert before != (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
    assert before == (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
    with inject_oom():
        vmem_guard.install()
    assert hook.seams_active()
    vmem_guard.uninstall()
    with inject_oom():
        vmem_guard.jit(lambda x: x)
    assert hook.seams_active()


# The guard under injected failures


def test_the_guard_compiles_again_after_an_injected_failure():
    """One failure, one repaired program, and the caller never sees an error."""
    vmem_guard.install()
    before = len(vmem_guard.repairs())
    with inject_oom(kernel="add", times=1) as oom:
        assert compile_for_v5e().as_text()
    assert oom.failures == 1
    [repair] = vmem_guard.repairs()[before:]
    assert repair.program == "jit(<lambda>)" and repair.compiles >= 2


def test_the_guard_gives_up_with_the_first_error_object():
    """Every compile fails: the exception is the first of all, with notes."""
    vmem_guard.install()
    with inject_oom(kernel="add") as oom, pytest.raises(jax.errors.JaxRuntimeError) as caught:
        compile_for_v5e()
    assert str(caught.value) == oom.messages[0]
    assert oom.failures > 1
    assert any("What the guard tried" in note for note in caught.value.__notes__)


def test_probes_count_on_request_only():
    """The compiles of one kernel alone are the guard's own business, unless a test is about them."""
    vmem_guard.install()
    with inject_oom(times=0) as programs, inject_oom(times=0, probes=True) as both:
        compile_for_v5e(block=1024, rows=4096, name="probed")
    repair = vmem_guard.repairs()[-1]
    assert programs.compiles == repair.compiles
    assert both.compiles == repair.compiles + repair.probes


# forbid_repairs


def test_a_repair_is_an_assertion_error_that_lists_it():
    """With kernel and source edit, so that the author can make it permanent."""
    vmem_guard.install()
    with pytest.raises(RepairsForbidden, match="add") as caught, forbid_repairs():
        compile_for_v5e(block=1024, rows=4096)
    assert isinstance(caught.value, AssertionError)
    assert caught.value.repairs[0].changes[0].edit in str(caught.value)


def test_without_repairs_nothing_happens():
    """Repairs made before do not count."""
    vmem_guard.install()
    compile_for_v5e(block=1024, rows=4096)

    @forbid_repairs()
    def check():
        compile_for_v5e()

    check()


def test_an_exception_from_inside_is_left_as_it_is():
    """The test's own failure is the better message."""
    vmem_guard.install()
    with pytest.raises(KeyError), forbid_repairs():
        compile_for_v5e(block=1024, rows=4096)
        raise KeyError("own")

"""The seams into JAX: what is patched, what is not, and that all of it goes away again."""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import pxla
from kernels_on_chips import add, array, lower_with

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import _jax, hook

pytestmark = pytest.mark.compat


@pytest.fixture(autouse=True)
def clean():
    vmem_guard.uninstall()
    yield
    vmem_guard.uninstall()


def attributes():
    return pxla.lower_sharding_computation, pxla.MeshComputation.compile


def test_uninstall_restores_jax_exactly_however_often_it_was_installed():
    before = attributes()
    vmem_guard.install()
    vmem_guard.install(vmem_guard.Policy(mode="report"))
    assert attributes() != before
    assert hook.installed_policy().mode == "report"
    vmem_guard.uninstall()
    assert attributes() == before
    vmem_guard.uninstall()
    assert attributes() == before


def test_functions_jitted_before_installing_are_guarded():
    jitted = jax.jit(lambda x, y: add(x, y, block=256))
    vmem_guard.install()
    lower_with(jitted, array(2048, 4096), array(2048, 4096), chip="v5e").compile()
    assert vmem_guard.repairs()[-1].changes[0].remedy == "limit"


def test_after_uninstall_the_same_program_fails_as_it_did():
    jitted = jax.jit(lambda x, y: add(x, y, block=256))
    vmem_guard.install()
    lower_with(jitted, array(2048, 4096), array(2048, 4096), chip="v5e").compile()
    vmem_guard.uninstall()
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        lower_with(jitted, array(2048, 4096), array(2048, 4096), chip="v5e").compile()


def test_on_cpu_the_guard_steps_aside(monkeypatch):
    def fail(*args):
        raise AssertionError("the guard looked at a CPU program")

    monkeypatch.setattr(hook.guard, "compile_program", fail)
    vmem_guard.install()
    assert jax.jit(lambda x: x + 1)(1) == 2
    assert jnp.sum(jnp.arange(4)) == 6


def test_a_changed_signature_in_jax_is_refused_with_the_version(monkeypatch):
    def lower_sharding_computation(jaxpr, name):
        pass

    monkeypatch.setattr(pxla, "lower_sharding_computation", lower_sharding_computation)
    with pytest.raises(_jax.IncompatibleJax, match=jax.__version__):
        vmem_guard.install()


def test_a_missing_attribute_in_jax_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(pxla.MeshComputation, "compile")
    with pytest.raises(_jax.IncompatibleJax, match="compile"):
        vmem_guard.install()


def test_threads_may_install_and_uninstall_while_others_compile():
    stop = threading.Event()
    before = attributes()
    errors = []

    def toggle():
        while not stop.is_set():
            vmem_guard.install()
            vmem_guard.uninstall()

    def compile_many(offset):
        try:
            for i in range(30):
                assert jax.jit(lambda x, k=offset + i: x + k)(0) == offset + i
        except Exception as error:
            errors.append(error)

    toggler = threading.Thread(target=toggle)
    workers = [threading.Thread(target=compile_many, args=(100 * n,)) for n in range(3)]
    toggler.start()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    toggler.join()
    vmem_guard.uninstall()
    assert not errors and attributes() == before


def test_a_lowering_does_not_keep_the_traced_program_alive():
    import gc
    import weakref

    vmem_guard.install()
    jitted = jax.jit(lambda x: x * 3)
    traced = jitted.trace(2.0)
    lowered = traced.lower()
    program = weakref.ref(_jax.remembered_lowering(lowered._lowering).closed_jaxpr)
    lowered.compile()
    del traced, jitted
    jax.clear_caches()
    gc.collect()
    assert program() is None


def test_the_programs_own_install_ends_what_a_wrong_environment_began():
    hook.refuse(ValueError("JAX_VMEM_GUARD='fixx' is not a mode"))
    with pytest.raises(ValueError, match="fixx"):
        jax.jit(lambda x: x + 1)(1)
    vmem_guard.install()
    assert jax.jit(lambda x: x + 1)(1) == 2


def test_a_wrong_field_with_the_guard_off_is_a_log_line_and_no_more(monkeypatch, caplog):
    from jax_vmem_guard import plugin

    monkeypatch.setattr(plugin, "_done", False)
    monkeypatch.setenv("JAX_VMEM_GUARD_NO_SUCH_FIELD", "1")
    monkeypatch.delenv("JAX_VMEM_GUARD", raising=False)
    plugin.initialize()
    assert "JAX_VMEM_GUARD_NO_SUCH_FIELD" in caplog.text
    assert jax.jit(lambda x: x + 2)(1) == 3

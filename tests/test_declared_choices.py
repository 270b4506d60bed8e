"""What the guard says and does where declared choices do not simply work; and where they leave no trace."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from declared_programs import ARRAY, LARGE, MIDDLE, SMALL, blocked_add, choices_taken, compile_guarded
from jax._src import compiler, pjit
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from kernels_on_chips import MiB, add, array, lower_with, used_by_kernels

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import Policy, _jax_trace, stand_in
from jax_vmem_guard.testing import inject_oom

SMALL_ARRAY = array(512, 1024)


@pytest.fixture
def repaired():
    """The repairs made by one test."""
    done = len(vmem_guard.repairs())
    return lambda: vmem_guard.repairs()[done:]


@pytest.fixture
def installed():
    vmem_guard.install()
    yield
    vmem_guard.uninstall()


def notes_of(fun, *arguments, **how):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_guarded(fun, *arguments, **how)
    return "\n".join(error.value.__notes__)


# ---- a program whose first choices compile is the plain program


class Sent(Exception):
    """Raised in the compiler's place: module bytecode, serialised options."""


def sent_to_the_compiler(monkeypatch, fun, *arguments):
    def record(backend, module, devices, options, callbacks):
        raise Sent(mlir.module_to_bytecode(module), options.SerializeAsString())

    jax.clear_caches()
    with monkeypatch.context() as patched, pytest.raises(Sent) as sent:
        patched.setattr(compiler, "backend_compile_and_load", record)
        lower_with(jax.jit(fun), *arguments, chip="v5e").compile()
    return sent.value.args


@pytest.mark.compat
def test_a_program_that_fits_is_byte_for_byte_the_one_with_a_direct_call(monkeypatch):
    tuned = vmem_guard.tunable(add, block=[64, 32])
    spare = vmem_guard.fallback(add, lambda x, y, block: x + y)
    programs = []
    for calls in ({"add": functools.partial(add, block=64)}, {"add": tuned}, {"add": functools.partial(spare, block=64)}):
        for guarded in (False, True):
            if guarded:
                vmem_guard.install()
            try:
                def fun(x, calls=calls):
                    return jnp.sin(calls["add"](x, x))

                programs.append(sent_to_the_compiler(monkeypatch, fun, SMALL_ARRAY))
            finally:
                vmem_guard.uninstall()
    assert len(programs) == 6 and len(set(programs)) == 1


def test_without_the_guard_the_first_choice_is_called_and_jax_is_as_it_was():
    vmem_guard.uninstall()
    tuned = vmem_guard.tunable(lambda x, *, n: (x, n), n=[3, 2])
    assert tuned(7) == (7, 3) and tuned(7, n=5) == (7, 5), "an argument of the call wins"
    name = next(name for name in _jax_trace.TraceSeam.NAMES if hasattr(pjit, name))
    before = getattr(pjit, name)
    vmem_guard.install()
    assert getattr(pjit, name) is not before
    vmem_guard.uninstall()
    assert getattr(pjit, name) is before


# ---- which choices are tried


def test_a_choice_with_nothing_smaller_in_it_is_passed_over(repaired):
    asked = []

    def blocked(x, block, rows):
        asked.append(block)
        return add(x, x, block=block)

    tuned = vmem_guard.tunable(blocked, choices=[
        {"block": MIDDLE, "rows": 8}, {"block": LARGE, "rows": 8}, {"block": SMALL, "rows": 8}])
    compile_guarded(tuned, ARRAY)
    assert choices_taken(repaired()[0]) == [2] and LARGE not in asked


def test_a_later_choice_that_cannot_be_traced_is_left_out(repaired):
    def blocked(x, block):
        if block == MIDDLE:
            raise ValueError("this block is not for these shapes")
        return add(x, x, block=block)

    compile_guarded(vmem_guard.tunable(blocked, block=[LARGE, MIDDLE, SMALL]), ARRAY)
    assert choices_taken(repaired()[0]) == [2]


def test_an_error_of_the_first_choice_is_the_callers():
    def blocked(x, block):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        compile_guarded(vmem_guard.tunable(blocked, block=[LARGE, SMALL]), ARRAY)


def test_a_choice_that_changes_no_kernel_is_said_and_not_compiled(caplog, repaired):
    def blocked(x, block_q, block_k):  # one of two knobs is not connected
        return add(x, x, block=block_q)

    tuned = vmem_guard.tunable(blocked, choices=[{"block_q": LARGE, "block_k": LARGE}, {"block_q": LARGE, "block_k": SMALL},
                                                 {"block_q": SMALL, "block_k": SMALL}])
    with caplog.at_level(logging.WARNING, "jax_vmem_guard"):
        compile_guarded(tuned, ARRAY)
    assert choices_taken(repaired()[0]) == [2] and repaired()[0].compiles == 1
    assert "block_k=128 (choice 2 of 3) gives exactly the kernels of" in caplog.text


def test_a_choice_that_changes_another_kernel_than_the_failing_one_is_said():
    def blocked(x, block):
        return add(add(x, x, block=block, name="tuned"), x, block=LARGE, name="fixed")

    notes = notes_of(vmem_guard.tunable(blocked, block=[64, 32]), ARRAY, policy=Policy(remedies=("limit",)))
    assert "changes `fixed`, which is what does not fit" in notes


def test_where_no_choice_fits_the_compilers_error_lists_them():
    tuned = vmem_guard.tunable(add, block=[1024, LARGE])
    notes = notes_of(lambda x: tuned(x, x), ARRAY, policy=Policy(remedies=("limit",)))
    assert "no declared choice fits: `add`" in notes and "block=1024, block=512" in notes


def test_where_no_choice_fits_the_first_one_is_split(repaired):
    tuned = vmem_guard.tunable(add, block=[1024, LARGE])
    compiled = compile_guarded(lambda x: tuned(x, x), ARRAY)
    assert [change.remedy for change in repaired()[0].changes] == ["split"]
    assert max(used_by_kernels(compiled)) <= 16 * MiB


def test_a_program_without_declared_functions_is_repaired_as_ever(repaired):
    compile_guarded(lambda x: add(x, x, block=LARGE), ARRAY)
    assert [change.remedy for change in repaired()[0].changes] == ["split"]


def test_a_function_that_depends_on_more_than_its_arguments_is_not_changed():
    calls = []

    def impure(x):
        calls.append(1)
        return jnp.sin(blocked_add(x, x)) if len(calls) % 2 else blocked_add(x, x)

    assert "it depends on more than its arguments" in notes_of(impure, ARRAY, policy=Policy(remedies=("limit",)))


def test_a_program_traced_before_the_guard_was_on_says_so():
    vmem_guard.uninstall()
    traced = jax.jit(lambda x: blocked_add(x, x)).trace(
        jax.ShapeDtypeStruct(ARRAY.shape, ARRAY.dtype, sharding=jax.sharding.SingleDeviceSharding(
            stand_in.topology_named("v4").devices[0])))
    vmem_guard.install(Policy(remedies=("limit",)))
    try:
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            traced.lower().compile()
    finally:
        vmem_guard.uninstall()
    assert "it was traced before the guard was on" in "\n".join(error.value.__notes__)


def test_mode_report_changes_nothing():
    notes = notes_of(lambda x: blocked_add(x, x), ARRAY, policy=Policy(mode="report"))
    assert "mode `report` only explains" in notes


def test_a_program_lowered_inside_a_mesh_and_compiled_outside(installed, repaired):
    devices = stand_in.topology_named("v4").devices
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    with jax.set_mesh(mesh):
        def fun(x):
            return jax.shard_map(lambda x: blocked_add(x, x), in_specs=spec, out_specs=spec, check_vma=False)(x)

        lowered = jax.jit(fun).lower(jax.ShapeDtypeStruct((len(devices) * 8192, 4096), jnp.float32,
                                                          sharding=NamedSharding(mesh, spec)))
    assert used_by_kernels(lowered.compile()) == [12 * MiB] and choices_taken(repaired()[0]) == [2]


def test_a_stateful_flax_module_takes_another_choice_and_keeps_its_state():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.scale, self.calls = nnx.Param(jnp.ones(4096)), nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            self.calls[...] += 1
            return blocked_add(x * self.scale[...], x)

    model, x = Model(), jnp.zeros((8192, 4096))
    with vmem_guard.rehearse("v4", outputs="zeros") as rehearsal:
        call = nnx.jit(lambda model, x: model(x))
        for _ in range(2):
            call(model, x)
    [judgement] = rehearsal.judgements
    assert choices_taken(judgement.repair) == [2] and int(model.calls[...]) == 2


# ---- the plan file


def test_a_remembered_choice_is_compiled_at_once(tmp_path, repaired):
    policy = Policy(plan_file=str(tmp_path / "plan.json"))
    for _ in range(2):
        compile_guarded(lambda x: blocked_add(x, x), array(8192, 16384), chip="v5e", policy=policy)
    first, second = repaired()
    assert second.remembered and (second.compiles, second.probes) == (1, 0)
    assert [change.after for change in first.changes] == [change.after for change in second.changes]


def test_choices_that_were_edited_since_are_looked_at_again(tmp_path, repaired):
    policy = Policy(plan_file=str(tmp_path / "plan.json"))
    for blocks in ([LARGE, SMALL], [LARGE, 64]):
        tuned = vmem_guard.tunable(add, block=blocks)
        compile_guarded(lambda x, tuned=tuned: tuned(x, x), ARRAY, policy=policy)
    first, second = repaired()
    assert first.changes[0].after.startswith("block=128") and second.changes[0].after.startswith("block=64")


# ---- calls outside of any program


def test_a_call_outside_of_jit_runs_the_next_choice_after_a_failure(installed, repaired):
    @functools.partial(jax.jit, static_argnames="scale")
    def scaled(x, scale):
        return x * scale

    tuned = vmem_guard.tunable(scaled, scale=[4, 2])
    with inject_oom(program="*scaled*", times=1):
        assert float(tuned(jnp.float32(1))) == 2
    assert choices_taken(repaired()[-1]) == [1]


def test_a_call_outside_of_jit_ends_in_the_first_error(installed):
    @functools.partial(jax.jit, static_argnames="scale")
    def scaled(x, scale):
        return x * scale

    with inject_oom(program="*scaled*"), pytest.raises(jax.errors.JaxRuntimeError) as error:
        vmem_guard.tunable(scaled, scale=[4, 2])(jnp.float32(1))
    assert "no declared choice of `scaled`" in "\n".join(error.value.__notes__)


# ---- declarations


@pytest.mark.parametrize(("arguments", "keywords", "kind", "words"), [
    ((add,), {}, ValueError, "at least one choice"),
    ((add,), {"choices": []}, ValueError, "at least one choice"),
    ((add,), {"a": [1, 2], "b": [1]}, ValueError, "they have one length"),
    ((add,), {"choices": [{"a": 1}], "b": [1]}, ValueError, "not both"),
    ((add,), {"choices": [3]}, TypeError, "list of dicts"),
    ((add,), {"block": 512}, TypeError, "`block` must be a list"),
    ((512,), {"block": [512]}, TypeError, "takes a function"),
])
def test_a_wrong_declaration_says_what_is_right(arguments, keywords, kind, words):
    with pytest.raises(kind, match=words):
        vmem_guard.tunable(*arguments, **keywords)


def test_lists_go_together_and_dicts_may_differ():
    calls = vmem_guard.tunable(lambda **kw: kw, a=[1, 2], b=["x", "y"])
    assert calls() == {"a": 1, "b": "x"}
    assert vmem_guard.tunable(lambda **kw: kw, choices=[{"a": 1}, {"b": 2}])() == {"a": 1}
    assert "a=1, b='x'; a=2, b='y'" in repr(calls)

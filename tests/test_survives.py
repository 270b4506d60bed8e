"""The guard among threads, forks, interrupts, re-execution and nested compiles."""

import os
import signal
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cheap_programs as cheap
import jax
import public_cases as cases
import pytest
from jax._src.interpreters import pxla
from kernels_on_chips import lower_with

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import _jax, hook
from jax_vmem_guard.plan_file import PlanFile
from jax_vmem_guard.probe import prober
from jax_vmem_guard.testing import inject_oom


def attributes():
    return pxla.lower_sharding_computation, pxla.MeshComputation.compile


@pytest.fixture(autouse=True)
def as_found():
    """Every test leaves JAX as it was."""
    vmem_guard.uninstall()  # whatever tests before this one have left
    before = attributes()
    yield
    vmem_guard.uninstall()
    assert attributes() == before


@pytest.fixture
def made():
    """The repairs made by one test."""
    done = len(vmem_guard.repairs())
    return lambda: vmem_guard.repairs()[done:]


class Before:
    """Calls a function before the n-th compile of a program (counted from 1); n is None for every compile."""

    def __init__(self, call, n=None, probes=False):
        self.call, self.n, self.probes, self.count = call, n, probes, 0

    def __enter__(self):
        hook.add_interceptor(self._before)
        return self

    def __exit__(self, *error):
        hook.remove_interceptor(self._before, uninstall_too=True)

    def _before(self, program, module, options, alone):
        if alone != self.probes:
            return
        self.count += 1
        if self.n in (None, self.count):
            self.call()


def test_a_compile_inside_a_trace_is_repaired_like_any_other(made):
    """A function that compiles another one while it is traced: both need a repair, both get it."""
    vmem_guard.install()

    def outer(x):
        cheap.lower(cheap.needs_more, 1).compile()
        return cheap.needs_much_more(x)

    cheap.lower(outer, 2).compile()
    assert [repair.program for repair in made()] == ["jit(needs_more_1)", "jit(outer_2)"]


def test_a_compile_inside_a_compile_is_repaired_like_any_other(made):
    """What a callback compiles in the middle of a repair does not disturb it."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    with Before(lambda: cheap.lower(cheap.needs_more, 3).compile(), n=2):
        cheap.lower(cheap.needs_much_more, 4).compile()
    assert sorted(repair.program for repair in made()) == ["jit(needs_more_3)", "jit(needs_much_more_4)"]


def test_caches_may_be_cleared_in_the_middle_of_a_repair(made):
    """`jax.clear_caches()` between the failing and the repaired compile drops what JAX holds, not what the guard does."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    with Before(jax.clear_caches):
        cheap.lower(cheap.mixed, 5).compile()
    assert len(made()[0].changes) == 2


def test_uninstalling_in_the_middle_of_a_repair_lets_it_end(made):
    """The program that is being compiled is repaired; the next one is not guarded."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    with Before(vmem_guard.uninstall, n=1):
        cheap.lower(cheap.needs_more, 6).compile()
    assert len(made()) == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match="E1001"):
        cheap.lower(cheap.needs_more, 7).compile()


def test_installing_in_the_middle_of_a_compile_guards_the_next_one(made):
    """The program that is being compiled has the policy it started with: none."""
    with Before(vmem_guard.install, n=1), pytest.raises(jax.errors.JaxRuntimeError):
        cheap.lower(cheap.needs_more, 8).compile()
    cheap.lower(cheap.needs_more, 9).compile()
    assert [repair.program for repair in made()] == ["jit(needs_more_9)"]


spilling, arguments = cases.transpose()  # its registers spill: the guard asks the compiler what it needs


@pytest.mark.parametrize("n, probes", [(1, False), (2, False), (1, True)], ids=["first", "retry", "probe"])
def test_an_interrupt_ends_a_repair_and_leaves_nothing_behind(n, probes, made, tmp_path):
    """Ctrl-C in the failing compile, in the retry and in a probe reaches the caller; afterwards all works as before."""
    vmem_guard.install(vmem_guard.Policy(ahead="never", plan_file=str(tmp_path / "plan.json")))
    prober.clear()

    def interrupt():
        raise KeyboardInterrupt

    lowered = lower_with(jax.jit(spilling), *arguments)
    before = lowered.as_text()
    with Before(interrupt, n=n, probes=probes), pytest.raises(KeyboardInterrupt):
        lowered.compile()
    assert made() == () and not (tmp_path / "plan.json").exists()
    assert lowered.as_text() == before
    lowered.compile()
    assert len(made()) == 1 and len(PlanFile(tmp_path / "plan.json").read()) == 1


def test_a_real_signal_during_a_repair_is_an_interrupt(made):
    """SIGINT sent to the process while it compiles, not raised by the test itself."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    with Before(lambda: os.kill(os.getpid(), signal.SIGINT), n=2), pytest.raises(KeyboardInterrupt):
        cheap.lower(cheap.mixed, 11).compile()
    cheap.lower(cheap.mixed, 12).compile()
    assert [repair.program for repair in made()] == ["jit(mixed_12)"]


def test_a_cell_that_is_run_again_is_compiled_again(made):
    """A notebook's cell defines, guards and runs the same function anew: one repair each time, JAX patched once."""
    cell = """
vmem_guard.install(vmem_guard.Policy(ahead="never"))

@vmem_guard.jit
def step(x):
    return cheap.needs_more(x)

cheap.lower_with(step, cheap.ARRAY).compile()
"""
    patched = set()
    for _ in range(3):
        exec(compile(cell, "<cell>", "exec"), {"vmem_guard": vmem_guard, "cheap": cheap})
        patched.add(attributes())
    assert [repair.program for repair in made()] == ["jit(step)"] * 3
    assert len(patched) == 1


def test_a_module_loaded_twice_patches_jax_once():
    """`importlib.reload` and autoreload make new seams while the old ones are in place: the new ones replace them."""
    before = attributes()
    called = []
    seams = [_jax.Seams(), _jax.Seams()]
    for i, one in enumerate(seams):
        one.patch(lambda original, *a, i=i, **k: (called.append(i), original(*a, **k))[1],
                  lambda original, self, options, devices: original(self, options, device_assignment=devices))
    assert jax.jit(lambda x: x + 41)(1) == 42
    assert set(called) == {1}
    seams[1].restore()
    assert attributes() == before


def test_a_forked_child_finds_no_lock_taken():
    """Data loaders fork while other threads compile: in the child the guard's locks are free."""
    code = """
import os, sys, threading
import jax_vmem_guard as vmem_guard
from jax_vmem_guard import agreement, hook
from jax_vmem_guard.journal import journal
from jax_vmem_guard.probe import prober

held, release = threading.Barrier(2), threading.Event()
def hold():
    with hook._lock, journal._lock, prober._lock, agreement._answers_lock, agreement._rounds_lock:
        held.wait()
        release.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    vmem_guard.install()
    vmem_guard.uninstall()
    prober.clear()
    os._exit(len(vmem_guard.repairs()) + len(agreement.agree("f@1", "[]", timeout_s=1.0)))
release.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.stdout.strip() == "2", done.stderr


def in_threads(count, threads):
    """Compiles `count` programs in each of several threads under the guard; gives what was changed in each thread."""
    kinds = [cheap.fits] * 18 + [cheap.needs_more, cheap.needs_much_more]

    def work(thread):
        for n in range(count):
            cheap.lower(kinds[n % len(kinds)], 1000 * thread + n + 20).compile()

    before = len(vmem_guard.repairs())
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    changes = cheap.changes_of(vmem_guard.repairs()[before:])
    return [{name: what for name, what in changes.items() if int(name.rstrip(")").rsplit("_", 1)[1]) // 1000 == thread}
            for thread in range(threads)]


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.long)])
def test_two_threads_get_what_one_gets(count):
    """Many programs in each of two threads: the same kernels changed in the same way as one after the other."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    prober.clear()
    [alone] = in_threads(count, 1)
    prober.clear()
    jax.clear_caches()
    both = in_threads(count, 2)
    assert len(alone) == count // 10
    assert sorted(alone.values()) == sorted(both[0].values()) == sorted(both[1].values())


def test_threads_share_a_plan_file(tmp_path):
    """Four threads, one program each with kernels in common: every outcome is in the file."""
    vmem_guard.install(vmem_guard.Policy(ahead="never", plan_file=str(tmp_path / "plan.json")))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: cheap.lower([cheap.needs_more, cheap.needs_much_more][n % 2], n + 3000).compile(),
                      range(4)))
    entries = PlanFile(tmp_path / "plan.json").read()
    assert sorted((entry.kernel, len(entry.programs)) for entry in entries) == [("needs_more", 2), ("needs_much_more", 2)]


def test_injected_failures_in_one_thread_do_not_reach_the_other(made):
    """Faults by program name: one thread's program fails for good, the other's compiles."""
    vmem_guard.install(vmem_guard.Policy(ahead="never", max_compiles=3))
    outcomes = types.SimpleNamespace(failed=None, compiled=None)

    def fail():
        try:
            cheap.lower(cheap.fits, 4001).compile()
        except jax.errors.JaxRuntimeError as error:
            outcomes.failed = error

    def work():
        outcomes.compiled = cheap.lower(cheap.needs_more, 4002).compile()

    with inject_oom(program="fits_4001", form="capacity") as oom:
        threads = [threading.Thread(target=target) for target in (fail, work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert str(outcomes.failed) == oom.messages[0]
    assert outcomes.compiled is not None and [repair.program for repair in made()] == ["jit(needs_more_4002)"]

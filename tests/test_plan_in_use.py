"""The plan file at work: what one process learned, the next one knows, with the real compiler."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kernels_on_chips as chips
import public_cases as cases
import pytest
import remembered_programs

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import plan_file
from jax_vmem_guard.plan_file import PlanFile
from jax_vmem_guard.probe import prober
from jax_vmem_guard.testing import inject_oom


def array(rows=4096, columns=1024, chip="v5e"):
    return jax.ShapeDtypeStruct((rows, columns), jnp.float32,
                                sharding=jax.sharding.SingleDeviceSharding(chips.device(chip)))


def too_large(x, y):
    """A kernel that needs 24 MiB where 16 are allowed."""
    return chips.add(x, y, block=1024, name="too_large")


spilling, _ = cases.transpose()  # its registers spill: only the compiler knows what it needs


def cube():
    return jax.ShapeDtypeStruct((384, 128, 512), jnp.bfloat16,
                                sharding=jax.sharding.SingleDeviceSharding(chips.device("v5e")))


def hopeless(x, y):
    """A kernel that needs 48 MiB, 24 with single buffers, on a chip that has 16."""
    return chips.add(x, y, block=2048, name="hopeless")


def compile_anew(fun, *arguments):
    """Compiles as a new process would: nothing but the plan file is remembered."""
    jax.clear_caches()
    prober.clear()
    return jax.jit(lambda *a: fun(*a)).lower(*arguments).compile()


def compiles_of(fun, *arguments):
    """(compiles of the program, compiles of kernels alone, the repair) that it took."""
    before = len(vmem_guard.repairs())
    with inject_oom(times=0) as programs, inject_oom(times=0, probes=True) as all_of_them:
        compile_anew(fun, *arguments)
    made = vmem_guard.repairs()[before:]
    return programs.compiles, all_of_them.compiles - programs.compiles, made[0] if made else None


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plan.json"


@pytest.fixture
def guarded(path):
    """Installs the guard with the plan file, and whatever else is asked for."""
    def install(**policy):
        vmem_guard.install(vmem_guard.Policy(**({"plan_file": str(path), "ahead": "never"} | policy)))

    install()
    yield install
    vmem_guard.uninstall()


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="jax_vmem_guard")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "jax_vmem_guard"]


def test_the_second_time_the_first_compile_carries_the_changes(guarded, path):
    """No failing compile and no probe; the same changes, marked as remembered; the file stays as it was."""
    programs, _, first = compiles_of(too_large, array(), array())
    assert (programs, first.remembered) == (2, False)
    written = path.read_bytes()
    programs, probes, second = compiles_of(too_large, array(), array())
    assert (programs, probes, second.remembered) == (1, 0, True)
    assert second.changes == first.changes
    assert path.read_bytes() == written


def test_the_file_says_what_a_person_wants_to_know(guarded, path):
    """Kernel, line, chip, versions, what changed, what is used, and the edit for the source."""
    compile_anew(too_large, array(), array())
    [entry] = PlanFile(path).read()
    assert (entry.kernel, entry.outcome, entry.environment.chip) == ("too_large", "repaired", "v5e")
    assert entry.environment.jax == jax.__version__
    assert "kernels_on_chips.py:" in entry.source
    assert "vmem_limit_bytes=" in entry.edit
    [change] = entry.changes
    assert entry.used_bytes == 24 << 20
    assert entry.used_bytes < change.data["limit_bytes"] <= 1.1 * entry.used_bytes


def test_a_remembered_program_is_compiled_to_the_same_module(guarded):
    """The plan file changes how the program gets there, not where."""
    first, second = (compile_anew(too_large, array(), array()).as_text() for _ in range(2))
    assert first == second


def test_another_program_with_the_kernel_is_compiled_as_it_is_first(guarded, path):
    """The same kernel may fit elsewhere, so the compiler speaks first; then the entry spares the probe."""
    def with_more(x):
        return spilling(x), x + 1

    assert compiles_of(spilling, cube())[1] == 1
    programs, probes, repair = compiles_of(with_more, cube())
    assert (programs, probes, repair.remembered) == (2, 0, False)
    [entry] = PlanFile(path).read()
    assert len(entry.programs) == 2
    assert compiles_of(with_more, cube())[:2] == (1, 0)


def test_a_program_where_the_kernel_fits_is_not_changed(guarded):
    """Here XLA keeps the kernel's result in VMEM, and the kernel that is too large elsewhere compiles as it is."""
    def doubled(x, y):
        return too_large(x, y) * 2

    compile_anew(too_large, array(), array())
    modules = []
    for settle in (vmem_guard.uninstall, guarded):
        settle()
        modules.append(compile_anew(doubled, array(), array()).as_text())
    assert modules[0] == modules[1]


def test_other_shapes_are_another_kernel(guarded, path):
    """Nothing is taken over from an array that is larger."""
    compile_anew(too_large, array(), array())
    assert compiles_of(too_large, array(rows=8192), array(rows=8192))[0] == 2
    assert len(PlanFile(path).read()) == 2


def test_a_source_that_moved_is_the_same_program(guarded):
    """Lines and files are no part of what is compiled."""
    compile_anew(too_large, array(), array())
    source = "\n\n\ndef moved(x, y):\n    return chips.add(x, y, block=1024, name='too_large')\n"
    names = {"chips": chips}
    exec(compile(source, "elsewhere.py", "exec"), names)
    assert compiles_of(names["moved"], array(), array())[:2] == (1, 0)


def test_what_nothing_helps_is_remembered_too(guarded, path):
    """The failure costs one compile the second time, and its note says where the knowledge comes from."""
    big = array(chip="v4")
    guarded(remedies=("limit", "buffering"))
    with inject_oom(times=0, probes=True) as first, pytest.raises(jax.errors.JaxRuntimeError):
        compile_anew(hopeless, big, big)
    [entry] = PlanFile(path).read()
    assert (entry.kernel, entry.outcome, entry.changes) == ("hopeless", "failed", ())
    assert "24.00 MiB" in entry.reason and "the chip has 16.00 MiB" in entry.reason
    with inject_oom(times=0, probes=True) as second, pytest.raises(jax.errors.JaxRuntimeError) as caught:
        compile_anew(hopeless, big, big)
    assert first.compiles > second.compiles == 1
    assert any("the plan file remembers" in note and "prune --failed" in note for note in caught.value.__notes__)


def test_a_failure_counts_only_while_nothing_more_is_allowed(guarded, path):
    """A policy that allows another remedy tries again; one that allows less does not."""
    big = array(chip="v4")
    guarded(remedies=("limit",))
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_anew(hopeless, big, big)
    counts = {}
    for remedies in (("limit",), (), ("limit", "buffering")):
        guarded(remedies=remedies)
        with inject_oom(times=0, probes=True) as oom, pytest.raises(jax.errors.JaxRuntimeError):
            compile_anew(hopeless, big, big)
        counts[remedies] = oom.compiles
    assert counts[("limit",)] == counts[()] == 1
    assert counts["limit", "buffering"] > 1


def test_changes_the_policy_does_not_allow_are_not_applied(guarded):
    """A limit that was raised once is no permission."""
    compile_anew(too_large, array(), array())
    guarded(remedies=("buffering",))
    _, _, repair = compiles_of(too_large, array(), array())
    assert {change.remedy for change in repair.changes} == {"buffering"}


def test_in_report_mode_nothing_is_applied_or_recorded(guarded, path):
    """The mode that only explains changes no program, whatever the file says."""
    compile_anew(too_large, array(), array())
    before = path.read_bytes()
    guarded(mode="report")
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_anew(too_large, array(), array())
    assert path.read_bytes() == before


def test_an_entry_of_another_version_is_not_applied_and_said_once(guarded, path, warnings):
    """After an upgrade the kernel is looked at again, and both versions stay in the file."""
    compile_anew(too_large, array(), array())
    path.write_text(path.read_text().replace(f'"libtpu": "{plan_file.installed_versions()[1]}"', '"libtpu": "0.0.1"'))
    assert compiles_of(too_large, array(), array())[0] == 2
    assert compiles_of(too_large, array(), array())[:2] == (1, 0)
    assert len([message for message in warnings() if "libtpu 0.0.1" in message]) == 1
    assert len(PlanFile(path).read()) == 2


def test_an_entry_that_no_longer_helps_is_replaced(guarded, path, warnings):
    """One wasted compile, a warning, and the next time it is right."""
    compile_anew(too_large, array(), array())
    content = json.loads(path.read_text())
    content["entries"][0]["changes"][0]["data"]["limit_bytes"] = 17 << 20
    path.write_text(json.dumps(content))
    programs, _, repair = compiles_of(too_large, array(), array())
    assert programs == repair.compiles == 3
    assert any("looked at again" in message for message in warnings())
    assert compiles_of(too_large, array(), array())[:2] == (1, 0)


def test_a_marked_function_inside_a_plain_jit_remembers_too(path):
    """Its plan file counts for the program around it: one compile the second time."""
    inner = vmem_guard.jit(lambda x, y: too_large(x, y), policy=vmem_guard.Policy(plan_file=str(path), ahead="never"))
    counts = [compiles_of(lambda x, y: inner(x, y), array(), array())[0] for _ in range(2)]
    vmem_guard.uninstall()
    assert counts == [2, 1]


@pytest.mark.parametrize("content", [b"{", b'{"format": 99, "entries": []}'])
def test_a_file_that_cannot_be_used_does_not_stop_the_repair(guarded, path, content):
    """The program compiles all the same, and a new file holds what was learned."""
    path.write_bytes(content)
    assert compiles_of(too_large, array(), array())[0] == 2
    assert PlanFile(path).read()[0].kernel == "too_large"
    [kept] = path.parent.glob("plan.json.*")
    assert kept.read_bytes() == content


def test_a_path_that_cannot_be_written_does_not_stop_the_repair(guarded, tmp_path, warnings):
    """Nothing is remembered then, which is said once."""
    (tmp_path / "file").write_text("")
    guarded(plan_file=str(tmp_path / "file" / "plan.json"))
    for _ in range(2):
        assert compiles_of(too_large, array(), array())[0] == 2
    assert len([message for message in warnings() if "cannot be written" in message]) == 1


def test_a_program_that_compiles_as_it_is_leaves_no_trace(guarded, path):
    """No file, no change, one compile, with or without entries of other programs."""
    def fits(x, y):
        return chips.add(x, y, block=64, name="fits")

    assert compiles_of(fits, array(), array()) == (1, 0, None)
    assert not path.exists()
    compile_anew(too_large, array(), array())
    before = path.read_bytes()
    assert compiles_of(fits, array(), array()) == (1, 0, None)
    assert path.read_bytes() == before


def test_several_kernels_of_a_program_are_remembered_one_by_one(guarded, path):
    """Two that were changed and one that was not: two entries, one compile the next time."""
    def three(x, y):
        a = chips.add(x, y, block=1024, name="first")
        b = chips.add(a, y, block=64, name="small")
        return chips.add(b, x, block=2048, name="second")

    assert compiles_of(three, array(), array())[0] == 2
    assert [entry.kernel for entry in PlanFile(path).read()] == ["first", "second"]
    assert compiles_of(three, array(), array())[:2] == (1, 0)


def test_a_marked_function_remembers_too(path):
    """`vmem_guard.jit` with a policy of its own."""
    policy = vmem_guard.Policy(plan_file=str(path))
    counts = []
    for _ in range(2):
        jax.clear_caches()
        prober.clear()
        before = len(vmem_guard.repairs())
        vmem_guard.jit(lambda x, y: too_large(x, y), policy=policy).lower(array(), array()).compile()
        counts.append(vmem_guard.repairs()[before].remembered)
    assert counts == [False, True]
    vmem_guard.uninstall()


def test_a_second_process_compiles_every_program_once(path):
    """Kernels in loops, branches, gradients, vmaps and shards, split, unbuffered, fused, and code that is no kernel."""
    first = remembered_programs.compile_all(str(path))
    assert min(outcome[0] for outcome in first.values()) == 1 < 2 <= max(outcome[0] for outcome in first.values())
    done = subprocess.run([sys.executable, remembered_programs.__file__, str(path)], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout.splitlines()[-1])
    assert {name: outcome[:2] for name, outcome in second.items()} == {name: [1, 0] for name in first}
    assert {name: outcome[2] for name, outcome in second.items()} == {name: outcome[2] for name, outcome in first.items()}

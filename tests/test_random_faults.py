"""Random failures, seeded: whatever fails and however, a run ends in a compiled program or in the compiler's own error."""

import collections
import json
import random

import cheap_programs as cheap
import jax
import pytest
import remembered_programs
from jax._src.interpreters import pxla

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import _jax, hook, planner
from jax_vmem_guard.chips import chip_for_device_kind
from jax_vmem_guard.custom_call import custom_calls, metadata_text
from jax_vmem_guard.fault_messages import FORMS, Victim, message
from jax_vmem_guard.kernels import read_kernels
from jax_vmem_guard.plan_file import PlanFile
from jax_vmem_guard.probe import prober

OTHER_ERRORS = ("INTERNAL: Mosaic failed to compile TPU kernel: unsupported shape cast", "UNKNOWN: socket closed",
                "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM")


class RandomFaults:
    """Every k-th compile, of a program or of a kernel alone, fails at random: any form, any kernel, or another error.

    What happens to a module depends on the seed, the module and how often it was compiled: kernels are compiled alone
    in threads, whose order means nothing.

    Attributes:
      raised: the exception objects, in order.
    """

    def __init__(self, seed: int, every: int):
        self._seed, self._every = seed, every
        self._seen: collections.Counter[str] = collections.Counter()
        self.raised: list[Exception] = []

    def __enter__(self):
        hook.add_interceptor(self._intercept)
        return self

    def __exit__(self, *error):
        hook.remove_interceptor(self._intercept, uninstall_too=True)

    def _intercept(self, program, module, options, alone):
        text = _jax.text_without_locations(module)
        self._seen[text] += 1
        chance = random.Random(f"{self._seed} {self._seen[text]} {text}")
        if chance.randrange(self._every):
            return
        text = chance.choice(OTHER_ERRORS) if chance.random() < 0.2 else self._out_of_vmem(chance, program, module)
        self.raised.append(jax.errors.JaxRuntimeError(text))
        raise self.raised[-1]

    def _out_of_vmem(self, chance, program, module) -> str:
        chip = chip_for_device_kind(program.device_kind)
        victims = [Victim(program=program.name, instruction="fusion", is_kernel=False, chip=chip,
                          limit_bytes=chip.default_limit_bytes)]
        victims += [Victim(program=program.name, instruction=kernel.name, is_kernel=True, chip=chip,
                           limit_bytes=planner.limit_in_force(kernel, chip=chip, flag_bytes=None),
                           metadata=metadata_text(call))
                    for kernel, call in zip(read_kernels(module), custom_calls(module), strict=True)]
        return message(chance.choice(FORMS), chance.choice(victims))


def programs() -> dict:
    """Name -> a lowering made anew: programs that fit, that need a repair, that nothing helps."""
    kinds = (cheap.fits, cheap.needs_more, cheap.needs_much_more, cheap.hopeless, cheap.no_kernel, cheap.mixed)
    made = {fun.__name__: lambda fun=fun: cheap.lower(fun, 1) for fun in kinds}
    names = ("rms_norm, split", "matmul_relu, buffers", "matmul", "inside_cond")
    return made | {name: remembered_programs.PROGRAMS[name] for name in names}


def outcome(lowered) -> str:
    """The compiled program's text, or the first line of the compiler's error, without the guard."""
    try:
        return lowered.compile().as_text()
    except jax.errors.JaxRuntimeError as error:
        assert not getattr(error, "__notes__", ())
        return str(error)


@pytest.fixture(scope="module", autouse=True)
def one_frame():
    """Compiled programs whose texts do not depend on which test compiles them."""
    before = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 1)
    yield
    jax.config.update("jax_traceback_in_locations_limit", before)


@pytest.fixture(scope="module")
def without():
    """name -> (module text, outcome) of every program, before anything was guarded."""
    vmem_guard.uninstall()
    jax.clear_caches()
    found = {}
    for name, lower in programs().items():
        lowered = lower()
        found[name] = lowered.as_text(), outcome(lowered)
    return found


@pytest.fixture(autouse=True)
def unguarded():
    yield
    vmem_guard.uninstall()


def run(seed: int, every: int, path) -> dict[str, str]:
    """Compiles every program with random faults; gives how each ended. Each lowering is compiled twice."""
    vmem_guard.install(vmem_guard.Policy(plan_file=str(path), ahead=random.Random(seed).choice(["certain", "never"])))
    ends = {}
    with RandomFaults(seed, every) as faults:
        for name, lower in programs().items():
            lowered = lower()
            for again in range(2):
                try:
                    lowered.compile()
                    ends[name, again] = "compiled"
                except jax.errors.JaxRuntimeError as error:
                    # One of those that were injected, the object itself, or a real one of a program that fails.
                    own = any(error is raised for raised in faults.raised)
                    assert own or str(error).startswith(("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION")), error
                    ends[name, again] = "injected" if own else "real"
    vmem_guard.uninstall()
    return ends


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 60))])
def test_every_run_ends_compiled_or_in_the_compilers_own_error(seed, without, tmp_path):
    """And nothing is left behind: no patch, no changed module, no other outcome without the guard, no torn plan file."""
    before = (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
    jax.clear_caches()
    prober.clear()
    path = tmp_path / "plan.json"
    ends = run(seed, every=2 + seed % 4, path=path)
    assert ends["hopeless", 1] != "compiled"
    assert before == (pxla.lower_sharding_computation, pxla.MeshComputation.compile)
    if path.exists():
        json.loads(path.read_text())
        PlanFile(path).read()
    for name, lower in programs().items():
        lowered = lower()
        assert lowered.as_text() == without[name][0], name
        assert outcome(lowered) == without[name][1], name


def test_the_same_seed_gives_the_same_decisions(tmp_path):
    """Nothing but the program, the chip, the policy and the failures decides."""
    decided = []
    for n in range(2):
        jax.clear_caches()
        prober.clear()
        before = len(vmem_guard.repairs())
        ends = run(1234, every=4, path=tmp_path / f"plan{n}.json")
        decided.append((ends, [repair.changes for repair in vmem_guard.repairs()[before:]]))
    assert decided[0] == decided[1]


def test_a_plan_file_written_among_faults_misleads_nobody(without, tmp_path):
    """What was learned while compiles failed at random never stops a program that compiles without it."""
    path = tmp_path / "plan.json"
    for seed in range(2):
        jax.clear_caches()
        prober.clear()
        run(100 + seed, every=3, path=path)
    jax.clear_caches()
    prober.clear()
    vmem_guard.install(vmem_guard.Policy(plan_file=str(path)))
    for name, lower in programs().items():
        if without[name][1].startswith("HloModule"):
            lower().compile()

"""Not a test: one process of a distributed job whose programs need a repair, for test_many_hosts.py.

usage: python guarded_processes.py SCENES PORT NUM_PROCESSES PROCESS_ID DIRECTORY

Plays each scene (a function below) in turn and prints one JSON object: scene -> what this process got. The programs are
compiled for a topology that is not here, which all processes are taken to run.
"""

import json
import logging
import sys
from pathlib import Path

import conftest  # noqa: F401 - the environment in which libtpu compiles without a TPU
import jax
import jax.numpy as jnp
import kernels_on_chips as chips

import jax_vmem_guard as vmem_guard
from jax_vmem_guard import consensus, hook
from jax_vmem_guard.agreement import AgreementError, agree
from jax_vmem_guard.probe import prober
from jax_vmem_guard.testing import inject_oom


def array(chip="v5e"):
    return jax.ShapeDtypeStruct((4096, 1024), jnp.float32,
                                sharding=jax.sharding.SingleDeviceSharding(chips.device(chip)))


def program(factor: int, chip="v5e", block=1024):
    """Lowers a program, another one for each factor, with a kernel that needs 24 MiB (blocks of 1024 rows)."""
    def step(x, y):
        return chips.add(x, y, block=block, name="too_large"), y * factor

    jax.clear_caches()
    prober.clear()
    return jax.jit(step).lower(array(chip), array(chip))


def chosen(factor: int):
    """Lowers a program for v4 with a declared choice: blocks of 1024 rows need 24 MiB there, of 512 rows 12."""
    tuned = vmem_guard.tunable(chips.add, block=[1024, 512])
    jax.clear_caches()
    return jax.jit(lambda x, y: (tuned(x, y), y * factor)).lower(array("v4"), array("v4"))


def outcome(lowered) -> dict:
    """What came of compiling: the limit in the compiled program, how many compiles, or the error."""
    before = len(vmem_guard.repairs())
    with inject_oom(times=0) as compiles:
        try:
            lowered.compile()
        except AgreementError as error:
            return {"error": "AgreementError", "text": str(error), "compiles": compiles.compiles}
        except jax.errors.JaxRuntimeError as error:
            return {"error": type(error).__name__, "text": str(error), "notes": getattr(error, "__notes__", []),
                    "compiles": compiles.compiles}
    [repair] = vmem_guard.repairs()[before:]
    return {"changes": [change.data for change in repair.changes], "remembered": repair.remembered,
            "compiles": compiles.compiles}


def install(**policy) -> None:
    vmem_guard.install(vmem_guard.Policy(**({"agreement_timeout_s": 120.0, "ahead": "never"} | policy)))


def all_repair(me, folder):
    install()
    return outcome(program(2))


def all_give_up(me, folder):
    """No remedy helps on a v4; nobody waits for anybody."""
    install(agreement_timeout_s=1000.0, remedies=("limit", "buffering"))
    return outcome(program(3, chip="v4", block=2048))


def file_on_the_first_host_only(me, folder):
    """All have a path, each on its own disk; only the disk of process 0 knows the program."""
    path = folder / f"host{me}.json"
    install(plan_file=str(path))
    return outcome(program(4))


def file_in_the_policy_of_the_first_only(me, folder):
    """The others know of no plan file, fail once, and take what process 0 has compiled already."""
    path = folder / "first_only.json"
    install(plan_file=str(path) if me == 0 else None)
    return outcome(program(5))


def a_remembered_plan_that_no_longer_helps(me, folder):
    """Process 0 remembers a limit that is too low; all plan anew, together."""
    path = folder / "wrong.json"
    install(plan_file=str(path) if me == 0 else None)
    return outcome(program(6))


def file_of_another_host_is_not_used(me, folder):
    """Process 0 knows nothing, so nobody does, whatever process 1 has on its disk."""
    path = folder / f"other{me}.json"
    install(plan_file=str(path))
    return outcome(program(7))


def other_guard_version(me, folder):
    install()
    consensus.__version__ = "0.2.0" if me == 1 else "0.1.0"
    return outcome(program(8))


def report_on_one(me, folder):
    install(mode="report" if me == 1 else "fix")
    return outcome(program(9))


def report_on_the_first(me, folder):
    install(mode="report" if me == 0 else "fix")
    return outcome(program(10))


def other_remedies(me, folder):
    install(remedies=("limit",) if me == 0 else ("buffering",))
    return outcome(program(11))


def one_without_the_guard(me, folder):
    install(agreement_timeout_s=3.0)
    if me == 1:
        vmem_guard.uninstall()
    return outcome(program(12))


def another_program_on_one(me, folder):
    install(agreement_timeout_s=3.0)
    return outcome(program(13 + me))


def fits_everywhere(me, folder):
    """A program that compiles as it is asks nobody: process 1 compiles another number of programs."""
    install(agreement_timeout_s=1000.0)
    for factor in range(me + 1):
        program(20 + factor, block=64).compile()
    return "compiled"


def a_declared_choice(me, folder):
    install(ahead="certain")
    return outcome(chosen(30))


def a_choice_that_only_the_first_remembers(me, folder):
    install(plan_file=str(folder / "choice.json") if me == 0 else None)
    return outcome(chosen(31))


def learn_choice(path: Path, factor: int) -> None:
    """Writes a plan file as an earlier run in one process does."""
    install(plan_file=str(path))
    chosen(factor).compile()
    vmem_guard.uninstall()


def learn(path: Path, factor: int, limit_bytes: int | None = None) -> None:
    """Writes a plan file as an earlier run in one process does, perhaps with another limit in it."""
    install(plan_file=str(path))
    program(factor).compile()
    vmem_guard.uninstall()
    if limit_bytes is not None:
        content = json.loads(path.read_text())
        content["entries"][0]["changes"][0]["data"]["limit_bytes"] = limit_bytes
        path.write_text(json.dumps(content))


def main(scenes: str, port: str, num_processes: str, process_id: str, directory: str) -> None:
    logging.disable(logging.WARNING)
    me = int(process_id)
    jax.distributed.initialize(coordinator_address=f"127.0.0.1:{port}", num_processes=int(num_processes), process_id=me,
                               shutdown_timeout_seconds=60)
    got = {}
    for scene in scenes.split(","):
        agree(f"ready@{scene}", "[]", timeout_s=120.0)
        got[scene] = globals()[scene](me, Path(directory))
        vmem_guard.uninstall()
        consensus.__version__ = "0.1.0"
    assert not hook.seams_active()
    print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

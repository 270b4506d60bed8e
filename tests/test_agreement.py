"""Many hosts: real processes under `jax.distributed` agree, or all fail with the same clear error, and never hang."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import agreeing_processes as play
import pytest

from jax_vmem_guard import agreement

PROGRAM = Path(play.__file__)
TOGETHER = ("same_plan", "other_plan", "another_attempt", "remembered_by_the_leader_only", "remembered_by_another_only",
            "other_guard_version", "other_remedies", "one_only_reports", "the_leader_only_reports", "one_does_not_come",
            "the_leader_does_not_come", "again_later", "only_some_run_it", "runs_here_only", "many_at_once",
            "twice_at_once", "told_by_the_leader", "told_nothing", "interrupted")


def run(scenes: str, num_processes: int) -> list[subprocess.CompletedProcess]:
    """The processes of one job, ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    command = [sys.executable, str(PROGRAM), scenes, str(port), str(num_processes)]
    processes = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env=environment) for i in range(num_processes)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *o) for p, o in zip(processes, outputs, strict=True)]


@pytest.fixture(scope="module")
def got():
    """scene -> what each of four processes got."""
    done = run(",".join(TOGETHER), 4)
    for process in done:
        assert process.returncode == 0, process.stderr
    answers = [json.loads(process.stdout.splitlines()[-1]) for process in done]
    return {scene: [answer[scene] for answer in answers] for scene in TOGETHER}


def the_error(answers: list[str]) -> str:
    """The one text that all these processes raised."""
    [text] = set(answers)
    assert text.startswith("AgreementError: ")
    return text


def test_the_same_plan_everywhere_is_agreed(got):
    """Each process goes on with it."""
    assert got["same_plan"] == [play.plan()] * 4


def test_a_later_attempt_is_agreed_anew(got):
    """Each changed form of the program has its own round."""
    assert got["another_attempt"] == [[play.plan(n) for n in range(3)]] * 4


def test_another_plan_is_an_error_everywhere_that_names_the_first_difference(got):
    """Path, both values and both processes; the same text in all four."""
    error = the_error(got["other_plan"])
    assert "`jit_other`" in error
    assert "`plan[0].data.limit_bytes` is 20 in process 0 and 24 in process 2" in error


@pytest.mark.parametrize("scene, difference", [
    ("other_guard_version", "`guard` is '0.1.0' in process 0 and '0.2.0' in process 1"),
    ("other_remedies", "`the number of policy.remedies` is 2 in process 0 and 1 in process 3")])
def test_other_facts_are_an_error_everywhere(got, scene, difference):
    """Another guard version or policy is named even where the plans happen to be equal."""
    assert difference in the_error(got[scene])


def test_the_leaders_plan_file_counts(got):
    """What process 0 remembers is taken by all, whether they remember something themselves or not."""
    assert got["remembered_by_the_leader_only"] == [play.plan(22)] * 4
    assert got["remembered_by_another_only"] == [play.plan(20)] * 4


def test_report_on_one_and_fix_on_the_others(got):
    """The one that reports does not wait; the others learn at once why they must not change the program."""
    *fixing, reporting = got["one_only_reports"]
    assert reporting == "None"
    assert "`policy.mode` is 'fix' in process 0 and 'report' in process 3" in the_error(fixing)
    leader, *others = got["the_leader_only_reports"]
    assert leader == "None"
    assert "process 0 does not change it: its mode is report" in the_error(others)


def test_a_process_that_does_not_come_is_named(got):
    """By all that wait for it, with how long they waited."""
    assert [got["one_does_not_come"][i] for i in (1, 2)] == ["elsewhere"] * 2
    error = the_error([got["one_does_not_come"][i] for i in (0, 3)])
    assert "processes 1, 2 did not take part within 1 s" in error and "JAX_VMEM_GUARD" in error


def test_a_leader_that_does_not_come_is_named(got):
    """Nobody decides then, and the others end by themselves."""
    assert "process 0 did not take part within 1 s" in the_error(got["the_leader_does_not_come"][1:])


def test_what_was_agreed_stays_agreed(got):
    """A process that compiles the program again, alone, gets the same plan without waiting."""
    assert got["again_later"][3] == play.plan()


def test_only_processes_that_run_the_program_take_part(got):
    """The lowest of them leads, and a program of one process is nobody else's concern."""
    assert [got["only_some_run_it"][i] for i in (1, 3)] == [play.plan(1)] * 2
    assert got["runs_here_only"] == [play.plan(i) for i in range(4)]


def test_threads_agree_on_their_programs_independently(got):
    """In any order, and on the same program twice."""
    assert got["many_at_once"] == [[play.plan(i) for i in range(8)]] * 4
    assert got["twice_at_once"] == [[play.plan()] * 2] * 4


def test_the_leader_speaks_once(got):
    """All hear what it said first; without it they hear nothing, after a bounded wait."""
    assert got["told_by_the_leader"] == [["from 0", "from 0"]] * 4
    assert got["told_nothing"][1:] == [None] * 3


def test_an_interrupt_ends_the_wait(got):
    """Ctrl-C does not wait for the other hosts."""
    assert got["interrupted"][1] == "KeyboardInterrupt"


def test_a_process_that_dies_is_named():
    """Of two processes one dies before it agrees; the other says so and does not hang."""
    survivor, dead = run("one_dies", 2)
    assert dead.returncode == 9
    assert "process 1 did not take part within 1 s" in json.loads(survivor.stdout.splitlines()[-1])["one_dies"]


def test_the_death_of_the_coordinator_ends_the_others():
    """Process 0 holds the key-value store: JAX ends the others with it, or they raise; none hangs."""
    dead, orphan = run("the_coordinator_dies", 2)
    assert dead.returncode == 9
    assert orphan.returncode != 0 or "does not answer" in orphan.stdout


def test_without_jax_distributed_there_is_nobody_to_ask():
    """One process: the plan comes back, and declining says nothing to nobody."""
    assert agreement.agree("jit_f@1", play.plan(), timeout_s=1.0) == play.plan()
    assert agreement.from_leader("plan file", "mine", timeout_s=1.0) == "mine"
    agreement.decline("jit_f@1", "its mode is report")


def test_the_first_difference_of_two_plans_is_a_path():
    """Kinds, lengths, missing fields and long texts are all said in one line."""
    first = agreement._first_difference
    assert first([1, 2], [1, 3], "plan") == ("plan[1]", "2", "3")
    assert first([1], [1, 2], "plan") == ("the number of plan", "1", "2")
    assert first({"a": 1}, {"b": 1}, "plan") == ("plan.a", "1", "'absent'")
    assert first({"a": None}, {"a": [0]}, "plan") == ("plan.a", "null", "[0]")
    assert len(first("x" * 999, "y", "plan")[1]) < 250

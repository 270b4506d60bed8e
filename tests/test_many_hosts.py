"""The guard on many hosts: real processes under `jax.distributed`, real compiles, one decision."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import guarded_processes as play
import pytest

from jax_vmem_guard.plan_file import PlanFile

PROGRAM = Path(play.__file__)
SCENES = ("all_repair", "all_give_up", "file_on_the_first_host_only", "file_of_another_host_is_not_used",
          "file_in_the_policy_of_the_first_only", "a_remembered_plan_that_no_longer_helps", "other_guard_version",
          "report_on_one", "report_on_the_first", "other_remedies", "one_without_the_guard", "another_program_on_one",
          "fits_everywhere", "a_declared_choice", "a_choice_that_only_the_first_remembers")


def run(scenes: str, num_processes: int, directory: Path) -> dict[str, list]:
    """scene -> what each process of one job got."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(PROGRAM.parents[1])}
    processes = [subprocess.Popen(
        [sys.executable, str(PROGRAM), scenes, str(port), str(num_processes), str(i), str(directory)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) for i in range(num_processes)]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    answers = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    return {scene: [answer[scene] for answer in answers] for scene in scenes.split(",")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """Plan files as earlier runs left them."""
    folder = tmp_path_factory.mktemp("hosts")
    play.learn(folder / "host0.json", factor=4)
    play.learn(folder / "first_only.json", factor=5, limit_bytes=30 << 20)
    play.learn(folder / "wrong.json", factor=6, limit_bytes=17 << 20)
    play.learn(folder / "other1.json", factor=7, limit_bytes=30 << 20)
    play.learn_choice(folder / "choice.json", factor=31)
    return folder


@pytest.fixture(scope="module")
def got(directory):
    return run(",".join(SCENES), 2, directory)


def limits(answers) -> list[int]:
    return [change["limit_bytes"] for answer in answers for change in answer["changes"]]


def the_error(answers) -> str:
    """The one AgreementError that all these processes raised."""
    assert {answer["error"] for answer in answers} == {"AgreementError"}, answers
    [text] = {answer["text"] for answer in answers}
    assert "jit(step)" in text
    return text


def test_all_processes_make_the_same_repair(got):
    """Each fails, plans and compiles once more, with one limit."""
    assert [answer["compiles"] for answer in got["all_repair"]] == [2, 2]
    assert len(set(limits(got["all_repair"]))) == 1


def test_what_nothing_helps_is_the_compilers_own_error_on_all(got):
    """No process waits for the others to repair what none can repair."""
    for answer in got["all_give_up"]:
        assert answer["error"] == "JaxRuntimeError"
        assert any("What the guard tried" in note for note in answer["notes"])


def test_a_plan_file_on_the_first_host_serves_all(got, directory):
    """One compile each, though the disk of process 1 was empty; and it stays empty, for process 0's counts."""
    assert [(a["compiles"], a["remembered"]) for a in got["file_on_the_first_host_only"]] == [(1, True)] * 2
    assert len(set(limits(got["file_on_the_first_host_only"]))) == 1
    assert not (directory / "host1.json").exists()


def test_processes_without_a_plan_file_take_what_the_first_remembers(got):
    """Process 1 sees its own failure first, and then the changes of process 0, not its own."""
    first, second = got["file_in_the_policy_of_the_first_only"]
    assert (first["compiles"], second["compiles"]) == (1, 2)
    assert limits([first, second]) == [30 << 20, 30 << 20]


def test_a_remembered_plan_that_fails_is_replaced_by_the_same_one_everywhere(got, directory):
    """Process 0 compiles what it remembers, then as it is, then anew; process 1 the other way round."""
    answers = got["a_remembered_plan_that_no_longer_helps"]
    assert [answer["compiles"] for answer in answers] == [3, 3]
    assert len(set(limits(answers))) == 1 and limits(answers)[0] > 24 << 20
    [entry] = PlanFile(directory / "wrong.json").read()
    assert entry.changes[0].data["limit_bytes"] == limits(answers)[0]


def test_a_plan_file_on_another_host_does_not_count(got):
    """What only process 1 remembers is not used by anybody."""
    answers = got["file_of_another_host_is_not_used"]
    assert [(answer["compiles"], answer["remembered"]) for answer in answers] == [(2, False)] * 2
    assert limits(answers)[0] == limits(answers)[1] < 30 << 20


def test_other_guard_versions_are_an_error_everywhere(got):
    """Even where both would make the same change."""
    assert "`jax_vmem_guard` is '0.1.0' in process 0 and '0.2.0' in process 1" in the_error(got["other_guard_version"])


def test_report_on_one_is_an_error_on_the_other(got):
    """The reporting one raises the compiler's error, the fixing one says why it must not fix."""
    fixing, reporting = got["report_on_one"]
    assert reporting["error"] == "JaxRuntimeError" and reporting["compiles"] == 1
    assert "`policy.mode` is 'fix' in process 0 and 'report' in process 1" in the_error([fixing])
    reporting, fixing = got["report_on_the_first"]
    assert reporting["error"] == "JaxRuntimeError" and reporting["compiles"] == 1
    assert "process 0 does not change it" in the_error([fixing]) and "report" in fixing["text"]


def test_other_remedies_are_an_error_everywhere(got):
    """The first difference in the policies is named."""
    assert "policy.remedies" in the_error(got["other_remedies"])


def test_a_process_without_the_guard_is_named(got):
    """It raises the compiler's error; the other one says that it did not take part, in bounded time."""
    guarded, unguarded = got["one_without_the_guard"]
    assert unguarded["error"] == "JaxRuntimeError" and unguarded["notes"] == []
    assert "process 1 did not take part within 3 s" in the_error([guarded]) and "JAX_VMEM_GUARD" in guarded["text"]


def test_another_program_on_one_process_is_an_error_on_both(got):
    """Each waits for the other with a program of its own."""
    first, second = got["another_program_on_one"]
    assert "process 1 did not take part" in the_error([first])
    assert "process 0 did not take part" in the_error([second])


def test_programs_that_fit_need_no_agreement(got):
    """Processes compile what they like, in their own number and order."""
    assert got["fits_everywhere"] == ["compiled", "compiled"]


def test_four_processes_agree(tmp_path):
    """More than two."""
    answers = run("all_repair", 4, tmp_path)["all_repair"]
    assert [answer["compiles"] for answer in answers] == [2] * 4
    assert len(set(limits(answers))) == 1


@pytest.mark.parametrize(("scene", "compiles", "remembered"), [
    ("a_declared_choice", 1, [False, False]), ("a_choice_that_only_the_first_remembers", None, [True, False])])
def test_all_processes_take_the_same_declared_choice(got, scene, compiles, remembered):
    assert [[change["choice"] for change in answer["changes"]] for answer in got[scene]] == [[1], [1]]
    assert compiles is None or {answer["compiles"] for answer in got[scene]} == {compiles}
    assert [answer["remembered"] for answer in got[scene]] == remembered

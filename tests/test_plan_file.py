"""The plan file: what is remembered, and that nothing which happens to the file stops a program."""

import dataclasses
import logging
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_vmem_guard import plan_file, plan_format
from jax_vmem_guard.changes import Change
from jax_vmem_guard.plan_file import Entry, Environment, PlanFile

V5E = Environment(chip="v5e", jax="0.10.2", libtpu="0.0.52")
V6E = dataclasses.replace(V5E, chip="v6e")
OLDER = dataclasses.replace(V5E, libtpu="0.0.34")


def change(**fields) -> Change:
    return Change(**({"kernel": "matmul", "fingerprint": "ab12", "source": "model.py:7", "remedy": "limit",
                      "before": "limit 16.00 MiB (default)", "after": "limit 24.00 MiB", "need_bytes": 24 << 20,
                      "edit": "vmem_limit_bytes=25165824", "data": {"limit_bytes": 24 << 20}} | fields))


def repaired(fingerprint="ab12", environment=V5E, **fields) -> Entry:
    return Entry(**({"fingerprint": fingerprint, "kernel": "matmul", "source": "model.py:7", "environment": environment,
                     "outcome": "repaired", "changes": (change(fingerprint=fingerprint),), "used_bytes": 24 << 20,
                     "reason": None, "edit": "vmem_limit_bytes=25165824", "programs": ("p1",), "remedies": ("limit",),
                     "guard": "0.1.0"} | fields))


def known(plan, environment=V5E) -> dict[str, Entry]:
    """The entries of an environment, where each kernel has one."""
    return {fingerprint: entry for fingerprint, [entry] in plan.entries(environment).items()}


def failed(fingerprint="cd34", environment=V5E, **fields) -> Entry:
    return repaired(fingerprint, environment, **({"outcome": "failed", "changes": (), "used_bytes": None, "edit": "",
                                                  "reason": "needs 200.00 MiB, the chip has 128.00"} | fields))


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "plan.json"


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, logger="jax_vmem_guard")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "jax_vmem_guard"]


# What is remembered


def test_what_one_object_records_another_reads(path):
    """Success and failure come back as they were recorded, filed by fingerprint."""
    PlanFile(path).record([repaired(), failed()])
    assert known(PlanFile(path)) == {"ab12": repaired(), "cd34": failed()}


def test_an_entry_counts_only_in_its_environment(path):
    """Another chip, jax or libtpu sees nothing, and can ask what is known elsewhere."""
    plan = PlanFile(path)
    plan.record([repaired()])
    for other in (V6E, OLDER, dataclasses.replace(V5E, jax="0.9.0")):
        assert plan.entries(other) == {}
        assert plan.stale(other) == (repaired(),)
    assert plan.stale(V5E) == ()


def test_an_entry_is_not_stale_where_its_kernel_is_known_too(path):
    """A file for several chips is no reason to complain."""
    plan = PlanFile(path)
    plan.record([repaired(), repaired(environment=V6E), failed()])
    assert plan.stale(V6E) == (failed(),)


def test_a_stale_entry_is_said_once(path, warnings):
    """The message names the kernel and both environments, and comes once per kernel, not once per compile."""
    PlanFile(path).record([repaired()])
    for _ in range(3):
        PlanFile(path).say_stale(OLDER, ["ab12", "unknown"])
    [message] = warnings()
    assert "`matmul`" in message and "libtpu 0.0.52" in message and "libtpu 0.0.34" in message


def test_a_later_outcome_replaces_an_earlier_one_of_the_same_kernel_program_and_environment(path):
    """Only that one: the same kernel on another chip, and other kernels, stay."""
    plan = PlanFile(path)
    plan.record([repaired(), repaired(environment=V6E), failed()])
    plan.record([failed("ab12")])
    assert known(plan) == {"ab12": failed("ab12"), "cd34": failed()}
    assert known(plan, V6E) == {"ab12": repaired(environment=V6E)}


def test_one_kernel_may_need_different_changes_in_different_programs(path):
    """Each program finds its own; a program that changes sides leaves the other entry to the others."""
    more = (change(data={"limit_bytes": 30 << 20}),)
    plan = PlanFile(path)
    plan.record([repaired(programs=("p1", "p2"))])
    plan.record([repaired(programs=("p2",), changes=more)])
    assert {e.programs: e.changes[0].data["limit_bytes"] >> 20 for e in plan.entries(V5E)["ab12"]} == {
        ("p1",): 24, ("p2",): 30}
    plan.record([repaired(programs=("p1",), changes=more)])
    [entry] = plan.entries(V5E)["ab12"]
    assert entry.programs == ("p2", "p1")


def test_the_same_changes_in_another_program_are_one_entry(path):
    """Also when the source moved meanwhile: the entry then shows the new line."""
    plan = PlanFile(path)
    plan.record([repaired()])
    plan.record([repaired(programs=("p2",), source="model.py:99", changes=(change(source="model.py:99", edit="new"),))])
    [entry] = plan.entries(V5E)["ab12"]
    assert (entry.programs, entry.source) == (("p1", "p2"), "model.py:99")


def test_an_entry_keeps_the_latest_programs_only(path):
    """A kernel that is part of a thousand program variants does not fill the file."""
    plan = PlanFile(path)
    plan.record([repaired(programs=tuple(f"p{i}" for i in range(40)))])
    plan.record([repaired(programs=("latest",))])
    [entry] = plan.entries(V5E)["ab12"]
    assert len(entry.programs) == 32 and entry.programs[-1] == "latest"


def test_a_change_by_another_process_is_seen(path):
    """The object that read the file before reads it again once it was replaced."""
    plan = PlanFile(path)
    plan.record([repaired()])
    assert set(plan.entries(V5E)) == {"ab12"}
    PlanFile(path).record([failed()])
    assert set(plan.entries(V5E)) == {"ab12", "cd34"}


def test_the_same_outcomes_give_the_same_bytes(path, tmp_path):
    """In any order, one by one or together: a committed plan file changes only when an outcome does."""
    entries = [repaired(), failed(), repaired(environment=V6E)]
    PlanFile(path).record(entries)
    for entry in reversed(entries):
        PlanFile(tmp_path / "other.json").record([entry])
    assert path.read_bytes() == (tmp_path / "other.json").read_bytes()


def test_recording_what_is_known_leaves_the_file_alone(path):
    """Not even its modification time changes."""
    PlanFile(path).record([repaired()])
    before = path.stat()
    PlanFile(path).record([repaired()])
    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_the_directory_of_the_file_is_made(tmp_path):
    """A first run has no cache directory yet."""
    PlanFile(tmp_path / "not" / "yet" / "plan.json").record([repaired()])
    assert (tmp_path / "not" / "yet" / "plan.json").exists()


def test_a_symbolic_link_and_the_permissions_survive(path, tmp_path):
    """The file a link points to is replaced, not the link, and who may read it stays."""
    PlanFile(path).record([repaired()])
    path.chmod(0o640)
    (tmp_path / "link.json").symlink_to(path)
    PlanFile(tmp_path / "link.json").record([failed()])
    assert (tmp_path / "link.json").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert set(PlanFile(path).entries(V5E)) == {"ab12", "cd34"}


json_values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
words = st.text(max_size=5)
a_change = st.builds(Change, kernel=words, fingerprint=words, source=st.none() | words, remedy=words, before=words,
                     after=words, need_bytes=st.none() | st.integers(0), edit=words,
                     data=st.dictionaries(words, json_values | st.dictionaries(words, json_values), max_size=2))
an_environment = st.builds(Environment, chip=words, jax=words, libtpu=words)


@given(st.lists(st.builds(
    repaired, words, an_environment, kernel=words, changes=st.lists(a_change, min_size=1, max_size=2).map(tuple),
    used_bytes=st.none() | st.integers(0), edit=words, programs=st.lists(words, max_size=2, unique=True).map(tuple),
    remedies=st.lists(words, max_size=2).map(tuple)), max_size=3))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_text_and_entries_are_one_to_one(entries):
    """Whatever names, sources and data hold comes back, and writing it again gives the same text."""
    entries = plan_format.merged((), entries)
    text = plan_format.to_text(entries)
    back = plan_format.from_text(text)
    assert {e.key: e for e in back} == {e.key: e for e in entries}
    assert plan_format.to_text(reversed(back)) == text
    assert plan_format.merged(back, back) == back


# What can happen to the file

CORRUPT = {
    "empty": b"",
    "torn": plan_format.to_text([repaired()]).encode()[:-20],
    "merge conflict": b"<<<<<<< ours\n" + plan_format.to_text([repaired()]).encode(),
    "binary": b"\x93NUMPY\x00\xff",
    "other json": b'{"hello": 1}',
    "a list": b"[]",
    "too deep": b"[" * 100_000,
    "a missing field": plan_format.to_text([repaired()]).replace('"used_bytes"', '"usedbytes"').encode(),
    "a wrong type": plan_format.to_text([repaired()]).replace('"limit_bytes": 25165824', '"limit_bytes": NaN').encode(),
    "a negative size": plan_format.to_text([repaired()]).replace('"used_bytes": 2', '"used_bytes": -2').encode(),
    "an unknown outcome": plan_format.to_text([repaired()]).replace('"repaired"', '"mended"').encode(),
    "a repair without changes": plan_format.to_text([failed()]).replace('"failed"', '"repaired"').encode(),
    "changes that are no list": plan_format.to_text([failed()]).replace("[]", "{}", 1).encode(),
    "format 0": plan_format.to_text([]).replace('"format": 1', '"format": 0').encode(),
}
NEWER = plan_format.to_text([repaired()]).replace('"format": 1', '"format": 2').encode()


@pytest.mark.parametrize("content", [*CORRUPT.values(), NEWER], ids=[*CORRUPT, "newer"])
def test_a_file_that_cannot_be_used_is_one_warning_and_is_kept(path, warnings, content):
    """Reading gives nothing and touches nothing; the next outcome starts a new file beside the old bytes."""
    path.write_bytes(content)
    for _ in range(2):
        assert PlanFile(path).entries(V5E) == {}
        assert PlanFile(path).stale(V6E) == ()
    assert path.read_bytes() == content
    [message] = warnings()
    assert str(path) in message

    PlanFile(path).record([failed()])
    assert known(PlanFile(path)) == {"cd34": failed()}
    [kept] = path.parent.glob("plan.json.*")
    assert kept.read_bytes() == content
    assert kept.name.startswith("plan.json.newer-" if content == NEWER else "plan.json.corrupt-")
    assert kept.name in warnings()[-1] and len(warnings()) == 2


def test_one_kernel_twice_in_one_environment_is_corrupt(path):
    """Two answers to one question, as a hand-made merge leaves them, are refused with the kernel's name."""
    entry = plan_format.to_text([repaired()])
    start, end = entry.index("{", 1), entry.rindex("]")
    body = entry[start:end].strip()
    with pytest.raises(plan_format.MalformedPlan, match="second time.*`matmul`"):
        plan_format.from_text(entry[:start] + body + ",\n" + body + entry[end:])


def test_the_message_for_a_malformed_entry_names_the_field():
    """A person who edited the file by hand finds the place."""
    text = plan_format.to_text([failed("aa"), repaired()]).replace('"need_bytes": 25165824', '"need_bytes": "24 MiB"')
    said = r"`entries\[1\].changes\[0\].need_bytes` must be a number of bytes"
    with pytest.raises(plan_format.MalformedPlan, match=said):
        plan_format.from_text(text)


def test_a_missing_file_is_no_reason_to_warn(path, warnings):
    """Every plan file was missing once."""
    assert PlanFile(path).entries(V5E) == {}
    assert warnings() == []


def test_a_path_that_cannot_exist_is_one_warning(tmp_path, warnings):
    """The directory is a file: like a read-only directory, but for root too."""
    (tmp_path / "file").write_text("")
    for _ in range(2):
        PlanFile(tmp_path / "file" / "plan.json").record([repaired()])
    [message] = warnings()
    assert "cannot be written" in message and str(tmp_path / "file" / "plan.json") in message


def test_a_directory_in_the_place_of_the_file_is_two_warnings(path, warnings):
    """One for reading, one for writing, and the directory stays."""
    path.mkdir()
    PlanFile(path).record([repaired()])
    assert PlanFile(path).entries(V5E) == {}
    assert len(warnings()) == 2 and path.is_dir()


def test_a_read_only_directory_is_one_warning(warnings):
    """No lock file and no plan file can be made there."""
    read_only = Path("/proc/self/attr")  # neither root nor anybody else can make a file here
    if not read_only.is_dir():
        pytest.skip("this system has no /proc, whose directories not even root can write to")
    PlanFile(read_only / "plan.json").record([repaired()])
    [message] = warnings()
    assert "cannot be written" in message


def test_a_full_disk_keeps_the_old_file(path, warnings):
    """The write that fails in the middle leaves the file as it was and no litter."""
    PlanFile(path).record([failed()])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))  # writing beyond it is an OSError
    try:
        PlanFile(path).record([repaired()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == [".plan.json.lock", "plan.json"]
    [message] = warnings()
    assert "cannot be written" in message


@pytest.mark.parametrize("bad", [repaired(changes=(change(data={"x": object()}),)), repaired(changes=()),
                                 repaired(changes=(change(data={"x": float("nan")}),)), repaired(kernel="\ud800")])
def test_an_entry_that_could_not_be_read_back_is_not_written(path, warnings, bad):
    """What would make the file corrupt is refused with a warning, and the file stays as it was."""
    PlanFile(path).record([failed()])
    before = path.read_bytes()
    PlanFile(path).record([bad])
    assert path.read_bytes() == before
    assert len(warnings()) == 1


def test_a_lock_that_is_held_for_ever_is_a_warning_and_no_hang(path, warnings, monkeypatch):
    """A stuck process costs its neighbours a bounded wait, not the run."""
    monkeypatch.setattr(plan_file, "_LOCK_TIMEOUT_S", 0.01)
    plan = PlanFile(path)
    with plan._locked():
        plan.record([repaired()])
    assert not path.exists()
    assert "TimeoutError" in warnings()[0]
    plan.record([repaired()])
    assert plan.entries(V5E)


def test_a_file_system_without_locks_still_remembers(path, warnings, monkeypatch):
    """`flock` may be unsupported on network file systems: the file is still replaced whole."""
    def unsupported(descriptor, operation):
        raise OSError(plan_file.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(plan_file.fcntl, "flock", unsupported)
    PlanFile(path).record([repaired()])
    PlanFile(path).record([failed()])
    assert set(PlanFile(path).entries(V5E)) == {"ab12", "cd34"}
    assert len(warnings()) == 1


def test_an_interrupt_while_recording_reaches_the_caller(path, monkeypatch):
    """Ctrl-C is not a disk error; the file stays as it was and the lock is free."""
    plan = PlanFile(path)
    plan.record([failed()])

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            plan.record([repaired()])
    plan.record([repaired("ef56")])
    assert set(plan.entries(V5E)) == {"cd34", "ef56"}


# Writers at the same time


def test_threads_that_record_at_once_lose_nothing(path):
    """Eight threads with objects of their own, sixteen outcomes each."""
    names = [f"{i:03d}" for i in range(128)]
    threads = [threading.Thread(target=lambda mine=names[i::8]: [PlanFile(path).record([repaired(n)]) for n in mine])
               for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(PlanFile(path).entries(V5E)) == names


def test_a_thousand_killed_groups_of_writers_lose_and_tear_nothing(tmp_path):
    """Three processes record at once until SIGKILL hits them, at a random line or at a random moment, 1,000 times."""
    program = Path(__file__).with_name("plan_writers.py")
    done = subprocess.run([sys.executable, str(program), str(tmp_path), "1000", "20240601"], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert "outcomes kept: 3" in done.stdout


def test_plan_files_work_without_jax(path):
    """Reviewing and recording need no jax: the module is imported by tools that start fast."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import plan_writers as w;"
            "w.plan_file.PlanFile(sys.argv[2]).record([w.entry(0, 0)]); print('jax' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent), str(path)], capture_output=True,
                          text=True, check=True)
    assert done.stdout.strip() == "False" and path.exists()


# Where the file is


def test_auto_is_a_file_in_the_compilation_cache(tmp_path):
    """Where the cache lives on, so does the plan."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert plan_file.resolve_path("auto") == tmp_path / plan_file.AUTO_NAME
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("cache", [None, "gs://bucket/cache"])
def test_auto_without_a_local_cache_is_one_warning(cache, warnings, monkeypatch):
    """No plan file then, and the reason is said once."""
    monkeypatch.setattr(plan_file, "_said", {})
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", cache)
    try:
        assert [plan_file.resolve_path("auto"), plan_file.resolve_path("auto")] == [None, None]
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    [message] = warnings()
    assert "jax_compilation_cache_dir" in message


def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch):
    """Strings, paths and a home directory; nothing set means no file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_file.resolve_path("~/plan.json") == tmp_path / "plan.json"
    assert plan_file.resolve_path(tmp_path / "auto") == tmp_path / "auto"
    assert plan_file.resolve_path(None) is None and plan_file.resolve_path("") is None

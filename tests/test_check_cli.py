"""`jax-vmem-guard check`: a target's programs on several chips, each compile in a child process."""

import argparse
import json
import os
import select
import sys
from pathlib import Path

import jax
import pytest

from jax_vmem_guard import bounded, check_cli, check_run
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.rows import ABORTED, ERROR, FAILS, FITS, MEMORY, REPAIRED, TIMEOUT

HERE = Path(__file__).parent
TARGETS = HERE / "check_targets.py"
LIMIT_ONLY = "--remedies=limit"


def run_cli(*arguments):
    """The command's exit code."""
    parser = argparse.ArgumentParser()
    check_cli.add_parser(parser.add_subparsers())
    options = parser.parse_args(["check", *map(str, arguments)])
    return options.run(options)


def rows_of(capsys):
    return json.loads(capsys.readouterr().out)["rows"]


def test_matrix_of_kernels_and_chips(capsys):
    """Each program of the target on each topology, with exit code 0 where all fit."""
    code = run_cli(f"{TARGETS}:several", "--topology=v5e", "--topology=v6e:2x2", LIMIT_ONLY, "--json=-", "-j2")
    rows = rows_of(capsys)
    assert code == 0
    assert sorted((row["topology"], row["verdict"]) for row in rows) == [
        ("v5e:2x2", FITS), ("v5e:2x2", REPAIRED), ("v6e:2x2", FITS), ("v6e:2x2", FITS)]
    assert all({item["what"].split()[0] for item in row["items"]} == {"input", "output"} for row in rows)


def test_one_that_does_not_fit_gives_exit_code_1(capsys, tmp_path):
    """The table says what and why, and the page holds the same rows."""
    page = tmp_path / "page.html"
    assert run_cli(f"{TARGETS}:large", "--topology=v4", LIMIT_ONLY, f"--html={page}") == 1
    printed = capsys.readouterr().out
    assert "does not fit" in printed
    assert "1 kernel on v4:2x2x1: 1 does not fit." in printed
    assert "does not fit" in page.read_text()


def test_max_share_fails_what_leaves_too_little_of_the_chip(capsys):
    """32 MiB are half of v5p: fine at 0.8, too much at 0.4."""
    arguments = (f"{TARGETS}:large", "--topology=v5p", LIMIT_ONLY)
    assert run_cli(*arguments, "--max-share=0.8") == 0
    assert run_cli(*arguments, "--max-share=0.4") == 1
    assert "needs 50% of the chip's VMEM, 40% are allowed" in capsys.readouterr().out


def test_names_of_a_dict_are_the_programs(capsys):
    """Programs are called as the target calls them."""
    run_cli(f"{TARGETS}:named", "--topology=v6e", "--json=-")
    assert [row["program"] for row in rows_of(capsys)] == ["little", "much"]


def test_a_bad_program_takes_only_its_own_verdict():
    """One aborts the compiler, one never ends, one eats the memory; the programs between them are judged all the same."""
    request = check_run.Request(target=f"{TARGETS}:mixed_fates", topologies=("v5e",), policy=Policy(remedies=("limit",)),
                                bounds=bounded.Bounds(seconds=15, memory_bytes=3 << 29))
    rows = check_run.run(request)
    assert [row.verdict for row in rows] == [FITS, ABORTED, REPAIRED, TIMEOUT, MEMORY, FITS]
    aborted, late, hungry = rows[1], rows[3], rows[4]
    assert "SIGABRT" in aborted.reason
    assert "not done after 15 s" in late.reason
    assert "1.5 GiB are allowed" in hungry.reason


def test_a_targets_own_error_is_a_verdict(capsys):
    """A function that raises while it is traced does not compile; exit code 2."""
    assert run_cli(f"{TARGETS}:breaks", "--topology=v5e", "--json=-") == 2
    (row,) = rows_of(capsys)
    assert row["verdict"] == ERROR
    assert "the target's own fault" in row["reason"]


@pytest.mark.parametrize(("target", "words"), [
    ("no_such_module:f", "there is no module `no_such_module`"),
    (f"{TARGETS}:absent", "has no function `absent`"),
    (f"{TARGETS}:wrong", "must return (fun, args)"),
    ("nothing.py", "it does not name a function"),
])
def test_a_target_that_is_not_there_says_what_a_target_is(target, words, capsys):
    """Exit code 2, and the reason names what was expected."""
    assert run_cli(target, "--topology=v5e", "--json=-") == 2
    assert words in rows_of(capsys)[0]["reason"]


def test_an_unknown_chip_is_refused_before_anything_starts(capsys):
    assert run_cli(f"{TARGETS}:small", "--topology=v9") == 2
    assert "v5e" in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "1.5", "much"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(SystemExit) as end:
        run_cli(f"{TARGETS}:small", f"--max-share={share}")
    assert end.value.code == 2


def test_meshes_of_this_machine_and_of_the_topology(capsys, monkeypatch):
    """`shard_map` over four CPU devices, and over the topology's own chips, are the same program to the compiler."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    for name in ("sharded", "sharded_on"):
        assert run_cli(f"{TARGETS}:{name}", "--topology=v5e:2x2", "--json=-") == 0
        (row,) = rows_of(capsys)
        assert (row["kernel"], row["verdict"]) == ("scale", FITS)
        assert row["windows_bytes"] == 2 * 64 * 1024 * 4  # a quarter of the rows, in and out


def test_a_mesh_larger_than_the_topology_is_a_verdict(capsys, monkeypatch):
    """The reason names both numbers."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert run_cli(f"{TARGETS}:sharded", "--topology=v6e:1x1", "--json=-") == 2
    assert "has 1 chips" in rows_of(capsys)[0]["reason"]


@pytest.fixture(scope="module")
def lowered():
    """`scale` with 32 MiB of windows, lowered for a v5e."""
    sys.path.insert(0, str(HERE))
    import check_targets
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    x = jax.ShapeDtypeStruct((4096, 1024), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    return check_targets, jax.jit(lambda x: check_targets.scale(x, 2048)).lower(x)


@pytest.mark.parametrize("form", ["text", "bytecode", "export"])
def test_files(form, lowered, tmp_path, capsys):
    """StableHLO text, StableHLO bytecode and an export give the verdict of the program they hold."""
    targets, program = lowered
    file = tmp_path / "program.bin"
    if form == "text":
        file.write_text(program.as_text())
    elif form == "bytecode":
        with open(file, "wb") as out:
            program.compiler_ir().operation.write_bytecode(out)
    else:
        x = jax.ShapeDtypeStruct((4096, 1024), "float32")
        exported = jax.export.export(jax.jit(lambda x: targets.scale(x, 2048)), platforms=["tpu"])(x)
        file.write_bytes(bytes(exported.serialize()))
    assert run_cli(file, "--topology=v5e", LIMIT_ONLY, "--json=-") == 0
    (row,) = rows_of(capsys)
    assert (row["kernel"], row["verdict"], row["measured"]) == ("scale", REPAIRED, True)


def test_a_file_of_another_kind_is_refused(tmp_path, capsys):
    """A Python file without a function, and noise."""
    noise = tmp_path / "noise.bin"
    noise.write_bytes(bytes(range(256)))
    assert run_cli(TARGETS, "--topology=v5e", "--json=-") == 2
    assert ":function" in rows_of(capsys)[0]["reason"]
    assert run_cli(noise, "--topology=v5e", "--json=-") == 2
    assert "jax.export" in rows_of(capsys)[0]["reason"]


def test_a_child_is_killed_with_what_it_started(tmp_path):
    """A child out of time leaves no process behind."""
    (tmp_path / "endless_child.py").write_text(
        "import json, os, subprocess, sys\n"
        "request = json.load(sys.stdin)\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "os.write(request['events'], json.dumps({'pids': [os.getpid(), grandchild.pid]}).encode() + b'\\n')\n"
        "while True: pass\n")
    events = []
    path, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), str(tmp_path)
    try:
        ended = bounded.run("endless_child", {}, events.append,
                            bounded.Bounds(seconds=1, memory_bytes=None, start_seconds=60))
    finally:
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)
    assert ended.how == "timeout"
    assert all(ends(pid) for pid in events[0]["pids"])


def ends(pid):
    """Whether a process is gone, or goes within 30 s."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30)[0])
    finally:
        os.close(handle)


def test_fails_is_worse_than_unknown():
    """The exit code of a mixture is that of the worst about VMEM."""
    from jax_vmem_guard.rows import Row, exit_code

    def row(verdict):
        return Row(program="p", kernel="k", topology="v5e:2x2", chip="v5e", verdict=verdict)

    assert exit_code([row(FITS), row(TIMEOUT)]) == 2
    assert exit_code([row(FAILS), row(TIMEOUT)]) == 1
    assert exit_code([row(FITS), row(REPAIRED)]) == 0

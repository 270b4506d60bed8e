"""`jax-vmem-guard plan`: show, check and prune, with exit codes that CI can use."""

import builtins

import pytest
from test_plan_file import OLDER, V5E, V6E, failed, repaired

from jax_vmem_guard import cli, plan_cli
from jax_vmem_guard.plan_file import PlanFile


def run(*arguments) -> int:
    return cli.main(["plan", *map(str, arguments)])


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(plan_cli, "installed_versions", lambda: (V5E.jax, V5E.libtpu))
    return tmp_path / "plan.json"


@pytest.mark.parametrize("rich", [True, False])
def test_show_lists_outcomes_sizes_and_edits(path, capsys, monkeypatch, rich):
    """With rich as a table, without it as tab-separated lines; the same facts."""
    monkeypatch.setenv("COLUMNS", "300")
    if not rich:
        real = builtins.__import__
        monkeypatch.setattr(builtins, "__import__", lambda name, *rest, **more: real(
            "no such module" if name.startswith("rich") else name, *rest, **more))
    PlanFile(path).record([repaired(kernel="my[kernel]"), failed()])
    assert run("show", path) == 0
    shown = capsys.readouterr().out
    for fact in ("my[kernel]", "model.py:7", "24.00 MiB", "limit 16.00 MiB (default) -> limit 24.00 MiB",
                 "needs 200.00 MiB", "vmem_limit_bytes=25165824"):
        assert fact in shown


def test_show_as_json_is_the_canonical_text(path, capsys):
    """A file edited by hand can be brought back to the form the guard writes."""
    PlanFile(path).record([repaired(), failed()])
    assert run("show", "--json", path) == 0
    assert capsys.readouterr().out == path.read_text()


def test_check_passes_where_every_entry_applies(path, capsys):
    """Failures are listed, but they are outcomes like others."""
    PlanFile(path).record([repaired(), repaired(environment=OLDER), failed()])
    assert run("check", path) == 0
    assert "does not compile" in capsys.readouterr().out


def test_check_fails_for_a_kernel_known_for_other_versions_only(path, capsys):
    """After an upgrade CI says which kernels would be looked at again."""
    PlanFile(path).record([repaired(environment=OLDER), repaired(environment=V6E)])
    assert run("check", path) == 1
    assert "`matmul` (model.py:7) is known for v5e, jax 0.10.2, libtpu 0.0.34 only" in capsys.readouterr().out
    assert run("check", path, "--libtpu", "0.0.34") == 1
    assert "v6e" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "check", "prune"])
def test_a_file_that_cannot_be_used_is_exit_code_two(path, capsys, action):
    """Missing or corrupt: the reason goes to stderr and the file stays as it is."""
    assert run(action, path) == 2
    path.write_text("{")
    assert run(action, path) == 2
    assert "not JSON" in capsys.readouterr().err
    assert path.read_text() == "{"


def test_prune_removes_entries_of_other_versions(path, capsys):
    """Other chips stay: they are installed elsewhere, not outdated."""
    PlanFile(path).record([repaired(), repaired(environment=OLDER), repaired(environment=V6E), failed()])
    assert run("prune", "--dry-run", path) == 0
    assert len(PlanFile(path).read()) == 4
    assert run("prune", path) == 0
    assert {e.place for e in PlanFile(path).read()} == {("ab12", V5E), ("ab12", V6E), ("cd34", V5E)}
    assert "libtpu 0.0.34" in capsys.readouterr().out


def test_prune_removes_failures_and_named_kernels_on_request(path):
    """So that they are tried again."""
    PlanFile(path).record([repaired(), repaired("99", kernel="other"), failed()])
    assert run("prune", "--failed", path) == 0
    assert set(PlanFile(path).entries(V5E)) == {"ab12", "99"}
    assert run("prune", "--kernel", "other", path) == 0
    assert set(PlanFile(path).entries(V5E)) == {"ab12"}

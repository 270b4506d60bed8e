"""The pytest plugin, in test runs of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

SUITE = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import jax
import pytest
import check_targets as targets

def test_fits(vmem_check):
    (result,) = vmem_check(targets.scale, targets.array(64), 16)
    assert result.fits

@pytest.mark.vmem(topology=["v6e", "v4"])
def test_large(vmem_check):
    vmem_check(targets.scale, targets.array(4096), 2048)

@pytest.mark.vmem(topology="v5e", mode="fix", remedies=("limit",))
def test_repaired(vmem_check):
    assert vmem_check(targets.scale, targets.array(4096), 2048)[0].repair is not None

@pytest.mark.vmem(topology="v5p", mode="fix", remedies=("limit",), max_share=0.25)
def test_share(vmem_check):
    vmem_check(targets.scale, targets.array(4096), 2048)

def test_without_it():
    pass
"""


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a small suite with the plugin, in another process; gives the finished process."""

    def run(*arguments, suite=SUITE):
        (tmp_path / "test_suite.py").write_text(suite)
        # Installed, the plugin is found by its entry point; from a checkout it is named.
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "jax_vmem_guard_pytest", "-p", "no:cacheprovider", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    return run


def line_of(output, *words):
    return next((line for line in output.splitlines() if all(word in line for word in words)), None)


@pytest.fixture
def workers():
    pytest.importorskip("xdist", reason="needs pytest-xdist: pip install pytest-xdist")
    return ("-p", "xdist", "-n1")


def test_checks_fails_and_sums_up(run):
    """A kernel that fits passes, one that does not fails with the table and the reason; the end has them all."""
    done = run()
    assert done.returncode == 1
    assert "2 failed, 3 passed" in done.stdout
    assert "kernels do not fit" in done.stdout
    assert "needs 50% of the chip's VMEM, 25% are allowed" in done.stdout
    summary = done.stdout[done.stdout.index("= scoped VMEM, MiB ="):]
    assert line_of(summary, "scale", "v5e:2x2", "fits")
    assert line_of(summary, "scale", "v4:2x2x1", "does not fit")
    assert line_of(summary, "scale", "v5e:2x2", "fits after repair")


def test_the_command_line_wins(run):
    """Topology and mode of the command line take the place of the marker's."""
    done = run("--vmem-topology=v6e", "--vmem-topology=v5e:2x2", "--vmem-mode=fix", "-k", "large")
    assert done.returncode == 0, done.stdout
    assert line_of(done.stdout, "v6e:2x2", "fits")
    assert line_of(done.stdout, "v5e:2x2", "fits after repair")
    assert line_of(done.stdout, "v4:2x2x1") is None


def test_works_under_xdist(run, workers):
    """Workers check, the controlling process prints."""
    done = run(*workers, "-k", "fits or large")
    summary = done.stdout[done.stdout.index("= scoped VMEM, MiB ="):]
    assert line_of(summary, "v4:2x2x1", "does not fit")
    assert summary.count("v5e:2x2") == 1


def test_a_suite_that_does_not_use_it_pays_nothing(run):
    """No table, and JAX is not imported."""
    done = run(suite="def test_nothing():\n    import sys\n    assert 'jax' not in sys.modules\n")
    assert done.returncode == 0, done.stdout
    assert "scoped VMEM" not in done.stdout


def test_the_summary_can_be_left_out(run):
    assert "= scoped VMEM" not in run("--no-vmem-summary", "-k", "test_fits").stdout


def test_a_marker_with_an_unknown_field_says_what_it_takes(run):
    suite = SUITE.replace('topology="v5e", mode="fix"', 'chip="v5e", mode="fix"')
    done = run("-k", "repaired", suite=suite)
    assert done.returncode == 1
    assert "does not know `chip`; it takes topology, mode, max_share, remedies" in done.stdout


def test_the_marker_is_known_to_strict_runs(run):
    assert run("--strict-markers", "--collect-only", "-q").returncode == 0

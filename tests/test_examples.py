"""The example trainings, rehearsed: each runs to its last step on this CPU, learns, and is repaired for a v5e."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jax_vmem_guard.rows import FITS, REPAIRED

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS = 3


@pytest.mark.parametrize(("script", "needs"), [
    ("train_jax.py", "optax"), ("train_flax.py", "flax"), ("train_equinox.py", "equinox")])
def test_an_example_trains_here_and_is_repaired_for_there(script, needs, tmp_path):
    """The loss goes down step by step; the forward kernel does not fit as configured and does after one repair."""
    pytest.importorskip(needs, reason=f"the example needs it: pip install {needs}")
    rows_file = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, "-m", "jax_vmem_guard", "rehearse", "--topology", "v5e:2x2", "--remedies", "limit", "--json",
         str(rows_file), str(EXAMPLES / script), "--steps", str(STEPS)], capture_output=True, text=True, check=False,
        cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == STEPS
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    rows = json.loads(rows_file.read_text())["rows"]
    assert sorted(row["verdict"] for row in rows) == [FITS, FITS, REPAIRED]  # dq, dkv, forward
    (forward,) = (row for row in rows if row["verdict"] == REPAIRED)
    assert 16 * 2**20 < forward["need_bytes"] <= forward["limit_bytes"] < 64 * 2**20
    assert script in forward["source"]

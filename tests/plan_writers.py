"""Not a test: a program that kills writers of one plan file and counts what was lost. Used by test_plan_file.py.

usage: python plan_writers.py DIRECTORY TRIALS SEED

Each trial forks three processes that record outcome after outcome in one file, and tell the parent of each outcome
that was recorded. In every other trial each kills itself (SIGKILL) at a random line of the code under test; in the
rest the parent kills them once a random number of outcomes was reported. Then the file must be readable and hold every
outcome that was reported.
Starts without jax, so that a fork is cheap.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import sys
import types
from pathlib import Path

package = types.ModuleType("jax_vmem_guard")  # the package without its `__init__`, which imports jax
package.__path__ = [str(Path(__file__).resolve().parents[1] / "jax_vmem_guard")]
sys.modules["jax_vmem_guard"] = package

from jax_vmem_guard import plan_file  # noqa: E402
from jax_vmem_guard.changes import Change  # noqa: E402

HERE = plan_file.Environment(chip="v5e", jax="0.10.2", libtpu="0.0.52")
WRITERS = 3
LINES = 3000  # one outcome recorded takes 350 lines in a new file, 1500 in one with three entries
REPORT = struct.Struct("ii")  # at most PIPE_BUF bytes: written in one piece or not at all


def entry(writer: int, count: int) -> plan_file.Entry:
    name = f"{writer:08x}"
    change = Change(kernel="k", fingerprint=name, source="model.py:1", remedy="limit", before="16", after="18",
                    need_bytes=count, edit="vmem_limit_bytes=...", data={"limit_bytes": count})
    return plan_file.Entry(fingerprint=name, kernel="k", source="model.py:1", environment=HERE, outcome="repaired",
                           changes=(change,), used_bytes=count, reason=None, edit="x" * 300, programs=("p",))


def kill_at_line(line: int) -> None:
    """This process dies at the given executed line of plan_file.py or plan_format.py, counted from now."""
    left = [line]

    def trace(frame, event, argument):
        if "jax_vmem_guard" not in frame.f_code.co_filename:
            return None
        left[0] -= event == "line"
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def write(path: Path, writer: int, start: int, report: int, last_line: int | None) -> None:
    plan = plan_file.PlanFile(path)
    if last_line is not None:
        kill_at_line(last_line)
    for count in range(start, start + 1000):
        plan.record([entry(writer, count)])
        os.write(report, REPORT.pack(writer, count))


def trial(path: Path, chance: random.Random, start: int) -> dict[int, int]:
    """Runs and kills the writers of one trial; gives the last count each reported."""
    by_themselves = start % 2000 == 0
    reading, writing = os.pipe()
    children = []
    for writer in range(WRITERS):
        last_line = chance.randrange(LINES) if by_themselves else None
        child = os.fork()
        if child == 0:
            os.close(reading)
            write(path, writer, start, writing, last_line)
            os._exit(0)
        children.append(child)
    os.close(writing)
    reported: dict[int, int] = {}
    if not by_themselves:
        for _ in range(chance.randrange(1, 6)):
            reported.update([REPORT.unpack(os.read(reading, REPORT.size))])
        for child in children:
            os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    while message := os.read(reading, REPORT.size):
        reported.update([REPORT.unpack(message)])
    os.close(reading)
    return reported


def main(directory: str, trials: str, seed: str) -> None:
    path, chance = Path(directory) / "plan.json", random.Random(int(seed))
    known: dict[int, int] = {}
    for number in range(int(trials)):
        known.update(trial(path, chance, number * 1000))
        stored = {int(e.fingerprint, 16): e for e in plan_file.PlanFile(path).read()} if path.exists() else {}
        for writer, count in known.items():
            assert writer in stored, f"trial {number}: writer {writer} was lost"
            assert stored[writer].used_bytes >= count, f"trial {number}: outcome {count} of writer {writer} was lost"
        for writer, e in stored.items():
            assert e == entry(writer, e.used_bytes), f"trial {number}: a torn entry of writer {writer}"
    print("outcomes kept:", len(known), "files:", sorted(p.name for p in path.parent.iterdir()))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Not a test: one process of a distributed job, for test_agreement.py.

usage: python agreeing_processes.py SCENES PORT NUM_PROCESSES PROCESS_ID

Plays each scene (a function below) in turn and prints one JSON object: scene -> what this process got.
"""

import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax

from jax_vmem_guard.agreement import AgreementError, agree, decline, from_leader

FACTS = {"guard": "0.1.0", "policy": {"mode": "fix", "remedies": ("limit", "buffering")}}
SOON = 1.0


def plan(limit: int = 20) -> str:
    return json.dumps([{"kernel": "matmul", "data": {"limit_bytes": limit}, "remedy": "limit"}])


def answer(program: str, plan_json: str, **more) -> str:
    try:
        return agree(program, plan_json, **({"timeout_s": 60.0, "facts": FACTS} | more))
    except AgreementError as error:
        return f"AgreementError: {error}"


def same_plan(me: int) -> str:
    return answer("jit_same@1", plan())


def other_plan(me: int) -> str:
    return answer("jit_other@1", plan(24 if me == 2 else 20))


def another_attempt(me: int) -> list[str]:
    return [answer("jit_again@1", plan(n), attempt=n) for n in range(3)]


def remembered_by_the_leader_only(me: int) -> str:
    return answer("jit_leader@1", plan(22 if me == 0 else 20), remembered=me == 0)


def remembered_by_another_only(me: int) -> str:
    return answer("jit_follower@1", plan(22 if me == 3 else 20), remembered=me == 3)


def other_guard_version(me: int) -> str:
    return answer("jit_version@1", plan(), facts=FACTS | {"guard": "0.2.0" if me == 1 else "0.1.0"})


def other_remedies(me: int) -> str:
    policy = FACTS["policy"] | ({"remedies": ["limit"]} if me == 3 else {})
    return answer("jit_remedies@1", plan(), facts=FACTS | {"policy": policy})


def one_only_reports(me: int) -> str:
    if me == 3:
        facts = FACTS | {"policy": FACTS["policy"] | {"mode": "report"}}
        return str(decline("jit_reports@1", "its mode is report", facts=facts))
    return answer("jit_reports@1", plan())


def the_leader_only_reports(me: int) -> str:
    if me == 0:
        return str(decline("jit_leads@1", "its mode is report", facts=FACTS))
    return answer("jit_leads@1", plan())


def one_does_not_come(me: int) -> str:
    return "elsewhere" if me in (1, 2) else answer("jit_alone@1", plan(), timeout_s=SOON)


def the_leader_does_not_come(me: int) -> str:
    return "elsewhere" if me == 0 else answer("jit_headless@1", plan(), timeout_s=SOON)


def again_later(me: int) -> str:
    """Only process 3 compiles the agreed program again, and has learned another plan meanwhile."""
    return "" if me != 3 else answer("jit_same@1", plan(99), timeout_s=SOON)


def only_some_run_it(me: int) -> str:
    return "" if me in (0, 2) else answer("jit_some@1", plan(me), processes=(1, 3), remembered=True)


def runs_here_only(me: int) -> str:
    return answer("jit_mine@1", plan(me), processes=(me,))


def many_at_once(me: int) -> list[str]:
    """Eight programs in eight threads, in another order in each process."""
    order = [(i * (2 * me + 1)) % 8 for i in range(8)]
    with ThreadPoolExecutor(8) as threads:
        answers = dict(zip(order, threads.map(lambda i: answer(f"jit_{i}@1", plan(i)), order), strict=True))
    return [answers[i] for i in range(8)]


def twice_at_once(me: int) -> list[str]:
    """Two threads of each process compile one program."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda _: answer("jit_twice@1", plan()), range(2)))


def told_by_the_leader(me: int) -> list[str | None]:
    first = from_leader("plan file", f"from {me}", timeout_s=60.0)
    return [first, from_leader("plan file", f"later from {me}", timeout_s=60.0)]


def told_nothing(me: int) -> str | None:
    return "" if me == 0 else from_leader("silence", "", timeout_s=SOON)


def interrupted(me: int) -> str:
    """Ctrl-C while waiting for a process that does not come."""
    if me != 1:
        return ""
    waiting = threading.Timer(0.3, lambda: os.kill(os.getpid(), 2))
    waiting.start()
    try:
        return answer("jit_interrupted@1", plan(), timeout_s=600.0)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def one_dies(me: int) -> str:
    if me == 1:
        os._exit(9)
    return answer("jit_widow@1", plan(), timeout_s=SOON)


def the_coordinator_dies(me: int) -> str:
    if me == 0:
        answer("jit_ready@1", plan())
        os._exit(9)
    answer("jit_ready@1", plan())
    return answer("jit_orphan@1", plan(), timeout_s=30.0)


def main(scenes: str, port: str, num_processes: str, process_id: str) -> None:
    me = int(process_id)
    jax.distributed.initialize(coordinator_address=f"127.0.0.1:{port}", num_processes=int(num_processes), process_id=me,
                               heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10)
    got = {}
    for scene in scenes.split(","):
        agree(f"ready@{scene}", "[]", timeout_s=60.0)  # all start a scene together, however loaded the machine is
        start = time.monotonic()
        got[scene] = globals()[scene](me)
        print(f"{scene}: {time.monotonic() - start:.2f} s", file=sys.stderr)
    print(json.dumps(got), flush=True)
    if scenes in ("one_dies", "the_coordinator_dies"):
        os._exit(0)  # a normal exit would wait for the dead


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The child process of `jax-vmem-guard check`: compiles a target's programs for one topology, one after the other.

The compiler can abort the process that called it, so it is called in one that may die. Events go, one JSON object a
line, to the file descriptor named in the request; standard output belongs to the target.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> int:
    """Handle the request on standard input: `target`, `topology`, `policy`, `start` and `events` (a descriptor)."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    request = json.load(sys.stdin)
    # Under `-m` this module is `__main__`; what the target prints must not be mistaken for events.
    with os.fdopen(request["events"], "w", buffering=1) as events:

        def tell(event: str, **data: Any) -> None:
            events.write(json.dumps({"event": event} | data) + "\n")
            events.flush()

        return _work(request, tell)


def _work(request: dict[str, Any], tell: Any) -> int:
    from jax_vmem_guard.judge_target import judge_target
    from jax_vmem_guard.policy import Policy
    from jax_vmem_guard.stand_in import topology_named
    from jax_vmem_guard.targets import load

    try:
        topology = topology_named(request["topology"])
        policy = Policy(**request["policy"])
        number = -1
        for number, target in enumerate(load(request["target"], topology)):
            if number < request["start"]:
                continue
            tell("begin", number=number, program=target.name)
            judgement = judge_target(target, topology=topology, policy=policy)
            tell("judged", number=number, program=target.name, rows=[row.to_dict() for row in judgement.rows])
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        tell("failed", text=f"{type(error).__name__}: {lines[0]}", usage=isinstance(error, ValueError))
        return 1
    tell("done", programs=number + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

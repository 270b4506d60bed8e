"""One file per remedy: what it proposes for a kernel, and how a change is written into the program.

`MODULE_REMEDIES` maps a remedy's name to the module that proposes changes for one kernel and writes them into its
custom call.
"""

from __future__ import annotations

from typing import Any

from jax_vmem_guard.remedies import buffering, coloring, limit

MODULE_REMEDIES: dict[str, Any] = {remedy.NAME: remedy for remedy in (limit, buffering, coloring)}

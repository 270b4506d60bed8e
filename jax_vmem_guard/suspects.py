"""Which kernels a failure is about."""

from __future__ import annotations

import re

from jax_vmem_guard.build import Builder
from jax_vmem_guard.custom_call import labels_in
from jax_vmem_guard.diagnosis import Diagnosis


def named_by(diagnosis: Diagnosis, builder: Builder) -> set[str]:
    """Fingerprints of the kernels that the message is about; empty where it does not tell.

    The guard's own label decides where the message has it. Without one, a name or a source line counts only if it
    points at a single kernel.
    """
    labelled = {builder.labelled(label) for label in labels_in(diagnosis.label or "")} - {None}
    if labelled:
        return {fingerprint for fingerprint in labelled if fingerprint is not None}
    base = re.sub(r"(\.\d+)+$", "", diagnosis.instruction or "")
    # A fusion around a kernel has a name of its own and no label; its op_name ends in "<kernel>/pallas_call".
    scopes = (diagnosis.op_name or "").split("/")[-2:-1]
    for same in (lambda k: bool(base) and k.name == base,
                 lambda k: k.name in scopes,
                 lambda k: diagnosis.source is not None and k.source == diagnosis.source):
        found = {k.fingerprint for k in builder.kernels if same(k)}
        if len(found) == 1:
            return found
    return set()

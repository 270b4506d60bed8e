"""Set-up shared by the benchmarks: the TPU compiler on a machine without a TPU. Import this before jax."""

import os
import sys
import time

for name, value in {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                    "TPU_STDERR_LOG_LEVEL": "3"}.items():
    os.environ.setdefault(name, value)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def lower(jitted, shapes, chip):
    """`jitted` lowered for a chip that is not here; `shapes` are (shape, dtype) pairs."""
    import jax
    from jax.experimental import topologies

    from jax_vmem_guard import _jax
    from jax_vmem_guard.chips import chip_named

    device = topologies.get_topology_desc(platform="tpu", topology_name=chip_named(chip).topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    with _jax.answering_for_chip(device, as_devices=True):
        return jitted.lower(*[jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes])


def seconds(action):
    """How long `action()` takes, and what it returns."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result

"""What each TPU chip has in scoped VMEM.

Every number was read from the compiler itself (libtpu 0.0.52, jax 0.10.2): the default limit from E1001 messages, the
capacity from "Used X of Y vmem" messages. On v5p, v6e and tpu7x the compiler keeps 64 KiB of the nominal memory.
"""

from __future__ import annotations

from dataclasses import dataclass

MiB = 1 << 20
KiB = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of TPU chip.

    Attributes:
      name: short name, as in topology names: "v5e".
      device_kinds: what `jax.Device.device_kind` says on it.
      generation: TPU generation; the tiling of VMEM buffers depends on it.
      default_limit_bytes: scoped VMEM limit of a kernel that sets none.
      capacity_bytes: the most scoped VMEM one kernel can have.
      topology: the smallest topology the compiler knows of this chip.
    """

    name: str
    device_kinds: tuple[str, ...]
    generation: int
    default_limit_bytes: int
    capacity_bytes: int
    topology: str


CHIPS: tuple[Chip, ...] = (
    Chip(name="v2", device_kinds=("TPU v2",), generation=2, default_limit_bytes=16 * MiB,
         capacity_bytes=16 * MiB, topology="v2:2x2"),
    Chip(name="v3", device_kinds=("TPU v3",), generation=3, default_limit_bytes=16 * MiB,
         capacity_bytes=16 * MiB, topology="v3:2x2"),
    Chip(name="v4", device_kinds=("TPU v4",), generation=4, default_limit_bytes=16 * MiB,
         capacity_bytes=16 * MiB, topology="v4:2x2x1"),
    Chip(name="v5e", device_kinds=("TPU v5 lite", "TPU v5e"), generation=5, default_limit_bytes=16 * MiB,
         capacity_bytes=128 * MiB, topology="v5e:2x2"),
    Chip(name="v5p", device_kinds=("TPU v5", "TPU v5p"), generation=5, default_limit_bytes=16 * MiB,
         capacity_bytes=64 * MiB - 64 * KiB, topology="v5p:2x2x1"),
    Chip(name="v6e", device_kinds=("TPU v6 lite", "TPU v6e"), generation=6, default_limit_bytes=32 * MiB,
         capacity_bytes=128 * MiB - 64 * KiB, topology="v6e:2x2"),
    Chip(name="tpu7x", device_kinds=("TPU7x", "TPU 7x", "TPU v7x"), generation=7, default_limit_bytes=32 * MiB,
         capacity_bytes=64 * MiB - 64 * KiB, topology="tpu7x:2x2x1"),
)


def chip_for_device_kind(device_kind: str) -> Chip | None:
    """The chip that reports `device_kind`, or None for one this table does not know."""
    return next((chip for chip in CHIPS if device_kind in chip.device_kinds), None)


def chip_named(name: str) -> Chip:
    """The chip with this short name ("v5e"), topology name ("v5e:2x2") or device kind ("TPU v5 lite").

    Raises:
      ValueError: for a name that is in no row of the table; the message lists the names that are.
    """
    short = name.split(":")[0]
    for chip in CHIPS:
        if short == chip.name or name in chip.device_kinds:
            return chip
    raise ValueError(f"`{name}` is not a TPU chip this version knows; use one of "
                     f"{', '.join(chip.name for chip in CHIPS)}")

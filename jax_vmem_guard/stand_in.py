"""Lets this machine's CPU devices stand for the chips of a TPU topology.

The n-th CPU device of the process stands for the n-th chip of the topology. What a traced program says about devices -
shardings of its arguments, meshes of its `shard_map`s, sharding constraints - is translated from one to the other, so
that the compiler for the topology gets the program the script would have compiled there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding

from jax_vmem_guard import _jax, _jax_trace
from jax_vmem_guard.chips import Chip, chip_for_device_kind, chip_named
from jax_vmem_guard.interpret import for_tpu


class NotEnoughChips(ValueError):
    """The program uses more devices than the topology has chips."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A TPU topology that is not here, and the chip it is made of.

    Attributes:
      name: as the compiler knows it: "v5e:2x2".
      chip: the kind of chip.
      devices: its chips, in the compiler's order; they can be compiled for, not run on.
    """

    name: str
    chip: Chip
    devices: tuple[Any, ...]


def prepare_environment() -> None:
    """Environment that lets libtpu compile on a machine without a TPU; variables already set stay as they are.

    Only what is set before JAX starts a backend counts. `TPU_SKIP_MDS_QUERY` keeps libtpu from asking a cloud metadata
    server for the machine's chips (it waits minutes for one that is not there); `ALLOW_MULTIPLE_LIBTPU_LOAD` lets
    several processes compile at once.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")


def topology_named(name: str) -> Topology:
    """The topology called `name` ("v5e:2x2"), or the smallest one of the chip called `name` ("v5e").

    Raises:
      ValueError: for a chip or a topology the compiler does not know; the message gives names that work.
      RuntimeError: where no TPU compiler is installed; the message says how to install it.
    """
    chip = chip_named(name)
    full_name = name if ":" in name else chip.topology
    prepare_environment()
    from jax.experimental import topologies

    try:
        devices: Any = topologies.get_topology_desc(platform="tpu", topology_name=full_name).devices
    except Exception as error:
        if "libtpu" in str(error) and "install" in str(error).lower():
            raise RuntimeError("compiling for a TPU needs its compiler: `pip install libtpu` (the version that "
                               f"`pip install 'jax[tpu]=={jax.__version__}'` picks)") from error
        raise ValueError(f"the TPU compiler knows no topology `{full_name}`; one that works is "
                         f"`{chip.topology}`. It said: {str(error).splitlines()[0]}") from error
    return Topology(name=full_name, chip=chip_for_device_kind(devices[0].device_kind) or chip,
                    devices=tuple(devices))


class StandIn:
    """Translates what a traced program says about devices to one topology.

    Args:
      topology: the topology.
      devices: the devices that stand for its chips, in order; default: all CPU devices of this process.
    """

    def __init__(self, topology: Topology, devices: Sequence[Any] | None = None):
        self.topology = topology
        here = tuple(jax.devices("cpu") if devices is None else devices)
        self._position = {device: position for position, device in enumerate(here)}
        self.translated = 0  # meshes and shardings with devices that were translated so far

    def device(self, device: Any) -> Any:
        """The chip `device` stands for; a chip of a topology stays itself."""
        position = self._position.get(device)
        if position is None:
            return device
        if position >= len(self.topology.devices):
            raise NotEnoughChips(
                f"the program uses device number {position + 1} of this machine, but topology "
                f"`{self.topology.name}` has {len(self.topology.devices)} chips; name a larger topology, or start "
                f"with XLA_FLAGS=--xla_force_host_platform_device_count={len(self.topology.devices)}")
        return self.topology.devices[position]

    def mesh(self, mesh: Mesh) -> Mesh:
        """The same mesh over the topology's chips; an empty mesh stays as it is."""
        if mesh.empty:
            return mesh
        self.translated += 1
        chips = np.empty(mesh.devices.shape, dtype=object)
        for index, device in np.ndenumerate(mesh.devices):
            chips[index] = self.device(device)
        return Mesh(chips, mesh.axis_names, axis_types=mesh.axis_types)

    def sharding(self, sharding: Sharding) -> Sharding:
        """The same sharding over the topology's chips."""
        memory_kind = _pinned_only(sharding.memory_kind)
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            mesh = self.mesh(mesh) if isinstance(mesh, Mesh) else mesh
            return NamedSharding(mesh, sharding.spec, memory_kind=memory_kind)
        if isinstance(sharding, SingleDeviceSharding):
            (device,) = sharding.device_set
            self.translated += 1
            return SingleDeviceSharding(self.device(device), memory_kind=memory_kind)
        self.translated += 1
        return _jax.gspmd_sharding_on(sharding, self.device)

    def value(self, leaf: Any) -> Any:
        """A leaf of an equation's parameters or of a lowering's arguments, translated where it names devices."""
        if isinstance(leaf, Mesh):
            return self.mesh(leaf)
        if isinstance(leaf, Sharding):
            return self.sharding(leaf)
        return leaf

    def lowering(self, lower: Any, jaxpr: Any, call: _jax.LoweringCall) -> Any:
        """Lower a traced program for the topology.

        Args:
          lower: JAX's function that lowers a traced program.
          jaxpr: the traced program.
          call: what it was called with for this machine's devices.

        Returns:
          The lowered program, whose `compile()` asks the compiler for the topology.

        Raises:
          NotEnoughChips: the program uses more devices than the topology has.
        """
        before = self.translated
        program = for_tpu(jaxpr, self.value)
        _jax_trace.remember_derived(program, jaxpr, lambda again: for_tpu(again, self.value))
        call = call.map_placement(self.value)
        if self.translated == before:  # nothing in the program names a device: it would run on the default one
            call = call.place_open_arguments(SingleDeviceSharding(self.topology.devices[0]))
        return lower(program, *call.arguments, **call.keywords)

    def concrete(self, tree: Any) -> Any:
        """Arguments of a function to check as abstract arguments placed on the topology.

        Arrays become `jax.ShapeDtypeStruct`s. Shardings over this machine's devices or over an `AbstractMesh` become
        shardings over the topology's chips; an argument without a sharding stays without one.
        """

        def place(leaf: Any) -> Any:
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                return leaf
            sharding = getattr(leaf, "sharding", None)
            committed = getattr(leaf, "committed", True)
            if not isinstance(sharding, Sharding) or not committed:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
                sharding = NamedSharding(self.concrete_mesh(sharding.mesh), sharding.spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding(sharding))

        return jax.tree.map(place, tree)

    def concrete_mesh(self, mesh: AbstractMesh) -> Mesh:
        """An abstract mesh laid over the topology's chips, in order."""
        if mesh.size > len(self.topology.devices):
            raise NotEnoughChips(f"the mesh {dict(mesh.shape)} has {mesh.size} devices, but topology "
                                 f"`{self.topology.name}` has {len(self.topology.devices)} chips; name a larger one")
        chips = np.array(self.topology.devices[:mesh.size], dtype=object).reshape(tuple(mesh.shape.values()))
        return Mesh(chips, mesh.axis_names, axis_types=mesh.axis_types)


def _pinned_only(memory_kind: str | None) -> str | None:
    """A memory kind that means the same on a chip: host memory stays; a CPU's own default becomes the chip's."""
    return memory_kind if memory_kind == "pinned_host" else None

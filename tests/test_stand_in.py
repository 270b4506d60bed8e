"""This machine's devices in the place of a topology's chips."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_vmem_guard.chips import CHIPS
from jax_vmem_guard.stand_in import NotEnoughChips, StandIn, topology_named


@pytest.fixture(scope="module")
def stand_in():
    """The one CPU device of the test process, and three objects that only have their place in the order."""
    return StandIn(topology_named("v5e:2x2"), [jax.devices("cpu")[0], "second", "third", "fourth", "fifth"])


@pytest.mark.parametrize("chip", [chip.name for chip in CHIPS])
def test_a_chips_name_gives_its_smallest_topology(chip):
    """Every chip of the table can be compiled for, and knows itself again by its device kind."""
    topology = topology_named(chip)
    assert topology.chip.name == chip
    assert topology.devices[0].device_kind in topology.chip.device_kinds


def test_devices_stand_for_chips_in_order(stand_in):
    assert [stand_in.device(d) for d in (jax.devices("cpu")[0], "second")] == list(stand_in.topology.devices[:2])


def test_a_chip_stays_itself(stand_in):
    chip = stand_in.topology.devices[3]
    assert stand_in.device(chip) is chip


def test_more_devices_than_chips_is_an_error_with_both_numbers(stand_in):
    with pytest.raises(NotEnoughChips, match="device number 5 .* has 4 chips"):
        stand_in.device("fifth")


def test_shardings_keep_their_spec(stand_in):
    """Axis names, types and partition stay; only the devices change."""
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("x",), axis_types=(AxisType.Explicit,))
    moved = stand_in.sharding(NamedSharding(mesh, PartitionSpec("x")))
    assert (moved.spec, moved.mesh.axis_types) == (PartitionSpec("x"), (AxisType.Explicit,))
    assert moved.device_set == {stand_in.topology.devices[0]}
    single = stand_in.sharding(SingleDeviceSharding(jax.devices("cpu")[0]))
    assert single.device_set == {stand_in.topology.devices[0]}


def test_arguments_become_abstract_and_placed(stand_in):
    """Arrays and shapes on an abstract mesh are placed on chips; uncommitted arrays stay free; other values pass."""
    abstract = NamedSharding(AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2), PartitionSpec("b"))
    free, placed, text = stand_in.concrete(
        (jax.numpy.ones(4), jax.ShapeDtypeStruct((8,), "float32", sharding=abstract), "text"))
    assert free.sharding is None
    assert placed.sharding.mesh.devices.tolist() == np.array(stand_in.topology.devices).reshape(2, 2).tolist()
    assert text == "text"

"""What `check` may be pointed at, and what it says of anything else."""

import pytest

from jax_vmem_guard.stand_in import topology_named
from jax_vmem_guard.targets import TargetError, load

FILE = """
def step(x, y):
    return x

def programs(topology, scale=2):
    return step, (1, topology)

number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "targets_of_a_user.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(("name", "said"), [
    ("step", "`step` takes x, y; a TARGET is called without arguments"),
    ("stepp", "has no function `stepp`; it has: programs, step"),
    ("number", "has no function `number`"),
])
def test_a_name_that_is_no_target_is_told_apart(file, name, said):
    with pytest.raises(TargetError) as error:
        list(load(f"{file}:{name}", topology_named("v5e:2x2")))
    assert said in str(error.value)


def test_a_function_that_asks_for_the_topology_gets_it(file):
    [target] = load(f"{file}:programs", topology_named("v5e:2x2"))
    assert target.name == "programs" and target.args == (1, "v5e:2x2")

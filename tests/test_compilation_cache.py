"""JAX's persistent compilation cache under the guard: what is repaired is cached, and a warm cache decides nothing.

Without a TPU the cache is written and looked up, but an executable read from it cannot be loaded: JAX says so in a
warning and compiles. That is enough to see which programs are looked for.
"""

import jax
import pytest
import test_plan_in_use as use
from jax._src import compilation_cache

import jax_vmem_guard as vmem_guard
from jax_vmem_guard.plan_file import AUTO_NAME, PlanFile

pytestmark = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")
OPTIONS = {"jax_persistent_cache_min_compile_time_secs": 0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture
def cache(tmp_path):
    """Turns the cache on in an empty directory; gives a function that lists what is in it."""
    options = {"jax_compilation_cache_dir": str(tmp_path), **OPTIONS}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield lambda: sorted(path.name for path in tmp_path.glob("*-cache"))
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    vmem_guard.uninstall()


def test_what_is_cached_is_the_repaired_program(cache):
    """One entry: the program that failed leaves none, the kernel alone leaves none."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    use.compile_anew(use.spilling, use.cube())
    assert len(cache()) == 1


def test_a_warm_cache_changes_no_decision(cache):
    """The second time the same program fails first, is repaired in the same way, and is found under the same key."""
    vmem_guard.install(vmem_guard.Policy(ahead="never"))
    cold = use.compiles_of(use.too_large, use.array(), use.array())
    written = cache()
    assert use.compiles_of(use.too_large, use.array(), use.array()) == cold
    assert cache() == written


def test_a_program_that_fits_has_the_same_key_under_the_guard(cache):
    """What was cached without the guard is found with it."""
    def fits(x, y):
        return use.chips.add(x, y, block=64, name="fits")

    for settle in (vmem_guard.uninstall, vmem_guard.install):
        settle()
        use.compile_anew(fits, use.array(), use.array())
        assert len(cache()) == 1


def test_the_plan_file_may_lie_in_the_cache(cache, tmp_path):
    """`plan_file="auto"`: a remembered program is looked up in the cache first, under the key of its repaired form."""
    vmem_guard.install(vmem_guard.Policy(plan_file="auto", ahead="never"))
    assert use.compiles_of(use.too_large, use.array(), use.array())[0] == 2
    written = cache()
    assert use.compiles_of(use.too_large, use.array(), use.array())[:2] == (1, 0)
    assert cache() == written
    assert len(PlanFile(tmp_path / AUTO_NAME).read()) == 1

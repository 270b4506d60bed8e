"""pytest plugin: kernels are checked against chips that are not here, in the project's own test run.

  def test_attention_fits(vmem_check):
      vmem_check(attend, q, k, v)

  @pytest.mark.vmem(topology=["v5e:2x2", "tpu7x:2x2x1"], max_share=0.8)
  def test_step_fits(vmem_check):
      vmem_check(step, state, batch)

This is a module beside the package, and imports nothing of it until a test asks for the fixture: pytest loads plugins
before any `conftest.py`, and importing JAX there would be too early for those that set JAX's environment variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jax_vmem_guard.check import Checked
    from jax_vmem_guard.policy import Policy

MARKER = "vmem"
_REPORTED = "jax_vmem_guard_rows"
_KNOWN = ("topology", "mode", "max_share", "remedies")
_ROWS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vmem", "scoped VMEM of TPU kernels (jax_vmem_guard)")
    group.addoption("--vmem-topology", action="append", metavar="NAME", default=None,
                    help="chips or topologies that `vmem_check` compiles for, as in v5e or v5e:2x2; may be given "
                         "several times; wins over the marker (default v5e)")
    group.addoption("--vmem-mode", choices=("fix", "report", "off"), default=None,
                    help="fix: a kernel that the guard repairs passes; report (default) or off: it must fit as it is")
    group.addoption("--vmem-max-share", type=float, metavar="SHARE", default=None,
                    help="fail where a kernel needs more than this share of the chip's VMEM, as in 0.8")
    group.addoption("--no-vmem-summary", action="store_true", default=False,
                    help="no table of what was checked at the end of the run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}(topology=[...], mode='report', max_share=None, remedies=(...)): what `vmem_check` compiles "
                   "for, whether repairs count as fitting, and how much of the chip a kernel may need")
    if not config.getoption("--no-vmem-summary") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(), "jax_vmem_guard_summary")


@pytest.fixture
def vmem_check(request: pytest.FixtureRequest) -> Iterator[VmemCheck]:
    """Call it like `jax_vmem_guard.check`: `vmem_check(fun, *args, **kwargs)`. It fails the test where a kernel does not
    fit, and gives the results, one per topology."""
    options = _options(request)
    yield VmemCheck(request.node, **options)


def _options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The marker's values, closest one first; the command line wins."""
    values: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers(MARKER))):
        unknown = set(marker.kwargs) - set(_KNOWN)
        if unknown or marker.args:
            what = f"`{sorted(unknown)[0]}`" if unknown else "positional values"
            raise pytest.UsageError(f"marker `{MARKER}` does not know {what}; it takes {', '.join(_KNOWN)}, as in "
                                    f"@pytest.mark.{MARKER}(topology=['v5e:2x2'])")
        values.update(marker.kwargs)
    config = request.config
    for name in ("topology", "mode", "max_share"):
        given = config.getoption(f"--vmem-{name.replace('_', '-')}")
        if given is not None:
            values[name] = given
    topology = values.get("topology") or ["v5e"]
    return {"topologies": (topology,) if isinstance(topology, str) else tuple(topology),
            "mode": values.get("mode") or "report", "max_share": values.get("max_share"),
            "remedies": values.get("remedies")}


class VmemCheck:
    """What the fixture gives: calling it compiles a function for the test's topologies."""

    def __init__(self, node: pytest.Item, *, topologies: tuple[str, ...], mode: str, max_share: float | None,
                 remedies: tuple[str, ...] | None):
        self._node = node
        self.topologies, self.mode, self.max_share, self.remedies = topologies, mode, max_share, remedies

    def __call__(self, fun: Any, *args: Any, **kwargs: Any) -> tuple[Checked, ...]:
        """Compile `fun(*args, **kwargs)` for each topology.

        Returns:
          The results, one per topology.

        Raises:
          pytest.fail.Exception: a kernel does not fit; the message is the table with the reasons.
        """
        from jax_vmem_guard.check import check
        from jax_vmem_guard.matrix import plain_text
        from jax_vmem_guard.rows import exit_code

        results = tuple(check(fun, *args, topology=topology, policy=self._policy(), **kwargs)
                        for topology in self.topologies)
        rows = [row for result in results for row in result.rows]
        self._node.stash.setdefault(_ROWS, []).extend(row.to_dict() for row in rows)
        if exit_code(rows, max_share=self.max_share):
            __tracebackhide__ = True
            pytest.fail(f"kernels do not fit\n{plain_text(rows, max_share=self.max_share)}", pytrace=False)
        return results

    def _policy(self) -> Policy:
        from jax_vmem_guard.policy import Policy

        return Policy(mode=self.mode) if self.remedies is None else Policy(mode=self.mode, remedies=self.remedies)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    rows = item.stash.get(_ROWS, None)
    if rows and call.when == "call":
        # An attribute of a report travels from xdist's workers to the process that prints.
        setattr(outcome.get_result(), _REPORTED, rows)


class _Summary:
    """Collects the rows of all tests and prints them at the end of the run."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.rows += getattr(report, _REPORTED, ())

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.rows:
            return
        from jax_vmem_guard.matrix import table
        from jax_vmem_guard.rows import GOOD, Row

        rows = [Row.from_dict(row) for row in self.rows]
        terminalreporter.write_sep("=", "scoped VMEM, MiB")
        for line, row in table(rows):
            terminalreporter.write_line(line, red=row is not None and row.verdict not in GOOD)

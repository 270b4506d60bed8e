"""A kernel's jaxpr as a tree of frames, so that every value has one definition.

The same jaxpr object can stand in several equations (JAX caches traced functions) and play another role in each, so a
value is a (frame, variable) pair. Frames say where the inputs of a nested jaxpr come from; nothing is inlined.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax_vmem_guard import _jax_pallas as jp
from jax_vmem_guard.splitting.errors import Refused

RefId = tuple[Any, ...]  # ("operand", position) or ("scoped", frame number, position)


@dataclass(eq=False)
class Frame:
    """One jaxpr at one place.

    Attributes:
      jaxpr: its equations.
      number: position in a walk of the tree; identifies the frame.
      parent: the frame of the equation it belongs to; None for the kernel itself.
      eqn_index: position of that equation in the parent.
      role: "kernel", "call", "branch", "scan", "while_cond", "while_body" or "scoped".
      sources: variable -> ("operand", i), ("outer", atom of the parent), ("carry", i), ("xs", atom of the parent),
        ("fresh", i) or ("const", value).
      definitions: variable -> (equation position, output position).
      controls: equation position -> its control flow.
      children: equation position -> the frames of its bodies.
    """

    jaxpr: Any
    number: int
    parent: Frame | None
    eqn_index: int
    role: str
    sources: dict[Any, tuple[str, Any]] = field(default_factory=dict)
    definitions: dict[Any, tuple[int, int]] = field(default_factory=dict)
    controls: dict[int, jp.Control] = field(default_factory=dict)
    children: dict[int, tuple[Frame, ...]] = field(default_factory=dict)

    def walk(self) -> Iterator[Frame]:
        """This frame and all below it."""
        yield self
        for frames in self.children.values():
            for child in frames:
                yield from child.walk()

    def outer(self, position: int) -> Any:
        """The atom at this input position of the equation the frame belongs to."""
        assert self.parent is not None
        return self.parent.jaxpr.eqns[self.eqn_index].invars[position]


_ROLES = {"call": ("call",), "scan": ("scan",), "while": ("while_cond", "while_body"), "scoped": ("scoped",)}


def build(jaxpr: Any) -> Frame:
    """The frame tree of a kernel jaxpr, whose inputs are its operands."""
    counter = iter(range(1 << 30))
    root = Frame(jaxpr=jaxpr, number=next(counter), parent=None, eqn_index=-1, role="kernel")
    root.sources = {v: ("operand", i) for i, v in enumerate(jaxpr.invars)}
    if jaxpr.constvars:
        raise Refused("the kernel captures a constant array")
    _fill(root, counter)
    return root


def _fill(frame: Frame, counter: Iterator[int]) -> None:
    for index, eqn in enumerate(frame.jaxpr.eqns):
        for position, var in enumerate(eqn.outvars):
            if not jp.is_dropped(var):
                frame.definitions[var] = (index, position)
        control = jp.control(eqn)
        if control is None:
            continue
        frame.controls[index] = control
        roles = _ROLES.get(control.kind) or ("branch",) * len(control.bodies)
        children = []
        for role, body in zip(roles, control.bodies, strict=True):
            child = Frame(jaxpr=body.jaxpr, number=next(counter), parent=frame, eqn_index=index, role=role)
            inputs = list(body.jaxpr.invars)
            if body.consts is None:
                inputs = [*body.jaxpr.constvars, *inputs]
            else:
                child.sources = {v: ("const", c) for v, c in zip(body.jaxpr.constvars, body.consts, strict=True)}
            for var, (kind, i) in zip(inputs, body.sources, strict=True):
                child.sources[var] = (kind, child.outer(i)) if kind in ("outer", "xs") else (kind, i)
            _fill(child, counter)
            children.append(child)
        frame.children[index] = tuple(children)


def resolve_ref(frame: Frame, atom: Any) -> RefId:
    """Which buffer a reference variable is.

    Raises:
      Refused: the reference is the result of an equation or is carried by a loop.
    """
    while True:
        source = frame.sources.get(atom)
        if source is None:
            raise Refused("a reference is computed in the kernel")
        kind, value = source
        if kind == "operand":
            return ("operand", value)
        if kind == "fresh":
            return ("scoped", frame.number, value)
        if kind != "outer" or frame.parent is None:
            raise Refused("a loop carries a reference")
        frame, atom = frame.parent, value

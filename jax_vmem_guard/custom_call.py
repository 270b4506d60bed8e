"""The TPU custom calls of a StableHLO module: find them, read and write their configuration, take one out alone.

JAX caches lowerings and the modules in them, so nothing here edits a module that JAX made: editing starts with `clone`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from jax_vmem_guard import _jax

#: Custom call targets that are kernels compiled by Mosaic.
TARGETS = ("tpu_custom_call",)

#: Key of the guard's label in a kernel's metadata.
LABEL = "vmem_guard"

_CONFIG = "backend_config"
_FRONTEND = "mhlo.frontend_attributes"
_METADATA = "kernel_metadata"
#: How a custom call is to be split over devices; means nothing to a kernel alone on one device.
_SHARDING_ATTRIBUTES = ("mhlo.sharding", "sdy.sharding")


def custom_calls(module: Any) -> list[Any]:
    """The module's TPU custom calls as MLIR operations, in walk order: the order `Kernel.ordinal` counts in."""
    ir = _jax.ir()
    found: list[Any] = []

    def visit(op: Any) -> Any:
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value in TARGETS:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


def read_config(op: Any) -> dict[str, Any]:
    """The `backend_config` of a TPU custom call.

    Raises:
      ValueError: it has none, or one that is no JSON object.
    """
    text = _jax.ir().StringAttr(op.attributes[_CONFIG]).value if _CONFIG in op.attributes else ""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the backend_config of a TPU custom call is no JSON: {text[:80]!r}") from error
    if not isinstance(config, dict):
        raise ValueError(f"the backend_config of a TPU custom call must be a JSON object, got {text[:80]!r}")
    return config


def write_config(op: Any, config: dict[str, Any]) -> None:
    """Replace the `backend_config` of a TPU custom call."""
    with op.context:
        op.attributes[_CONFIG] = _jax.ir().StringAttr.get(json.dumps(config))


def clone(module: Any) -> Any:
    """A copy of a StableHLO module, in a context of its own, locations included."""
    return _jax.parse_stablehlo(_jax.stablehlo_bytecode(module))


def edit(module: Any, change: Callable[[int, dict[str, Any]], bool]) -> Any:
    """A clone of `module` in which `change(ordinal, config)` edited the configuration of its TPU custom calls.

    Custom calls for which `change` answers False keep their configuration to the byte.
    """
    copy = clone(module)
    for ordinal, op in enumerate(custom_calls(copy)):
        config = read_config(op)
        if change(ordinal, config):
            write_config(op, config)
    return copy


def label(module: Any, labels: Iterable[str] | None = None) -> Any:
    """A clone of `module` whose TPU custom calls carry a label that the compiler repeats in its error messages.

    The label goes into the metadata of the kernel (frontend attribute `kernel_metadata`), beside what the author put
    there. It tells kernels apart that share a name and a source line; `labels_in` finds it in a message.

    Args:
      module: the module to copy.
      labels: one for each custom call in walk order, of letters, digits and `_.-`; "k0", "k1", ... where not given.
    """
    ir = _jax.ir()
    copy = clone(module)
    calls = custom_calls(copy)
    names = [f"k{ordinal}" for ordinal in range(len(calls))] if labels is None else list(labels)
    if len(names) != len(calls):
        raise ValueError(f"the module has {len(calls)} TPU custom calls, got {len(names)} labels")
    for op, name in zip(calls, names, strict=True):
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"a label may have letters, digits and `_.-` only, got {name!r}")
        attributes = _named(op.attributes[_FRONTEND]) if _FRONTEND in op.attributes else {}
        metadata = _json_object(attributes.get(_METADATA))
        if metadata is None:
            continue  # the author's metadata is in a form of its own: leave it alone
        with op.context:
            attributes[_METADATA] = ir.StringAttr.get(json.dumps({**metadata, LABEL: name}))
            op.attributes[_FRONTEND] = ir.DictAttr.get(attributes)
    return copy


def metadata_text(op: Any) -> str:
    """The kernel's metadata as its author, and the guard, put it there: usually JSON, "{}" where there is none."""
    attributes = _named(op.attributes[_FRONTEND]) if _FRONTEND in op.attributes else {}
    return str(_jax.ir().StringAttr(attributes[_METADATA]).value) if _METADATA in attributes else "{}"


def labels_in(text: str) -> tuple[str, ...]:
    """The labels in a compiler message, in the order of the text."""
    return tuple(re.findall(rf'\\?"{LABEL}\\?":\s*\\?"([\w.-]+)', text))


def isolate(module: Any, ordinal: int) -> Any:
    """A module for one device that does nothing but call one kernel of `module`.

    The kernel's operands are the arguments of `main`, its results are what `main` returns. The custom call keeps its
    configuration, layouts, aliases and source location; its sharding is dropped, for shapes in a TPU custom call are
    those of one device already.

    Args:
      module: a StableHLO module.
      ordinal: position among the module's TPU custom calls.

    Raises:
      IndexError: the module has no such custom call.
    """
    ir = _jax.ir()
    calls = custom_calls(module)
    if not 0 <= ordinal < len(calls):
        raise IndexError(f"the module has {len(calls)} TPU custom calls, there is no number {ordinal}")
    op = calls[ordinal]
    operands = [value.type for value in op.operands]
    results = [value.type for value in op.results]
    attributes = {name: attribute for name, attribute in _named(op.attributes).items()
                  if name not in _SHARDING_ATTRIBUTES}
    with op.context, op.location:
        alone = ir.Module.create()
        one = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
        alone.operation.attributes["sym_name"] = ir.StringAttr.get("kernel_alone")
        alone.operation.attributes["mhlo.num_partitions"] = one
        alone.operation.attributes["mhlo.num_replicas"] = one
        with ir.InsertionPoint(alone.body):
            main = ir.Operation.create("func.func", regions=1, attributes={
                "sym_name": ir.StringAttr.get("main"),
                "sym_visibility": ir.StringAttr.get("public"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(operands, results)),
                "arg_attrs": _donate_aliased(op, len(operands)),
            })
        body = main.regions[0].blocks.append(*operands)
        with ir.InsertionPoint(body):
            call = ir.Operation.create("stablehlo.custom_call", results=results, operands=list(body.arguments),
                                       attributes=attributes)
            ir.Operation.create("func.return", operands=list(call.results))
    # Into a context of its own: probes run in threads, and JAX's contexts are not made for several at once.
    return clone(alone)


def aliases(op: Any) -> dict[int, int]:
    """Operands whose memory a result of the custom call takes over: operand -> result."""
    found: dict[int, int] = {}
    for alias in _named(op.attributes).get("output_operand_aliases", ()):
        operand = re.search(r"operand_index = (\d+)", str(alias))
        result = re.search(r"output_tuple_indices = \[(\d*)", str(alias))
        if operand:
            found[int(operand.group(1))] = int(result.group(1) or 0) if result else 0
    return found


def _donate_aliased(op: Any, count: int) -> Any:
    """Argument attributes that give up the operands the kernel writes over, or XLA would copy them first."""
    ir = _jax.ir()
    i32 = ir.IntegerType.get_signless(32)
    donated = aliases(op)
    return ir.ArrayAttr.get([
        ir.DictAttr.get({"tf.aliasing_output": ir.IntegerAttr.get(i32, donated[i])} if i in donated else {})
        for i in range(count)])


def _named(attributes: Any) -> dict[str, Any]:
    """The attributes of an operation, or a `DictAttr`, as a Python dictionary."""
    ir = _jax.ir()
    if isinstance(attributes, ir.Attribute):
        attributes = ir.DictAttr(attributes)
    named: dict[str, Any] = {}
    for position in range(len(attributes)):
        entry = attributes[position]
        named[entry.name] = entry.attr
    return named


def _json_object(attribute: Any) -> dict[str, Any] | None:
    """The JSON object in a string attribute, {} where there is no attribute, None where it holds something else."""
    if attribute is None:
        return {}
    try:
        value = json.loads(_jax.ir().StringAttr(attribute).value)
    except (ValueError, TypeError):
        return None
    return value if isinstance(value, dict) else None

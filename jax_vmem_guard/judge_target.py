"""Judges one target of `jax-vmem-guard check`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_vmem_guard import _jax, hook
from jax_vmem_guard.check import judge_function
from jax_vmem_guard.judge import Judgement, did_not_lower, judge
from jax_vmem_guard.policy import Policy
from jax_vmem_guard.stand_in import NotEnoughChips, Topology
from jax_vmem_guard.targets import ExportTarget, FunctionTarget, ModuleTarget, Target, TargetError


def judge_target(target: Target, *, topology: Topology, policy: Policy) -> Judgement:
    """Compile a target for a topology; what cannot be traced or lowered is a judgement too."""
    try:
        if isinstance(target, FunctionTarget):
            return judge_function(target.fun, target.args, target.kwargs, topology=topology, policy=policy,
                                  program=target.name)
        hook.ensure_seams()
        with _jax.answering_for_chip(topology.devices[0]):
            if isinstance(target, ModuleTarget):
                computation = _of_module(target, topology, policy)
            else:
                computation = _of_export(target, topology, policy)
            return judge(computation, topology, program=target.name)
    except Exception as error:
        return did_not_lower(error, topology, program=target.name)


def _of_module(target: ModuleTarget, topology: Topology, policy: Policy) -> Any:
    """A StableHLO module in the place of a program with its signature."""
    module = _jax.parse_stablehlo(target.stablehlo)
    inputs, outputs, devices = _jax.signature(module)
    sharding = NamedSharding(_mesh(topology, devices), PartitionSpec())

    def stub(*arguments: Any) -> Any:
        return [jax.numpy.zeros(shape, dtype) for shape, dtype in outputs]

    stub.__name__ = hook.GuardedName(target.name, policy)
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in inputs]
    lowered = jax.jit(stub, keep_unused=True, out_shardings=sharding).lower(*arguments)
    return _jax.with_module(_jax.computation_of(lowered), module)


def _of_export(target: ExportTarget, topology: Topology, policy: Policy) -> Any:
    """An exported program, called on the topology's chips."""
    try:
        exported = jax.export.deserialize(bytearray(target.blob))
    except Exception as error:
        raise TargetError(f"`{target.name}` is not a serialised `jax.export.Exported` that jax {jax.__version__} reads: "
                          f"{error}") from error
    if "tpu" not in exported.platforms:
        raise TargetError(f"`{target.name}` was exported for {', '.join(exported.platforms)}; export it with "
                          "`jax.export.export(f, platforms=['tpu'])`")
    mesh = _mesh(topology, exported.nr_devices)
    shardings = [sharding if sharding is not None else NamedSharding(mesh, PartitionSpec())
                 for sharding in exported.in_shardings_jax(mesh)]
    arguments = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
                 for aval, sharding in zip(exported.in_avals, shardings, strict=True)]

    def call(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(exported.in_tree, leaves)
        return exported.call(*args, **kwargs)

    call.__name__ = hook.GuardedName(target.name, policy)
    return _jax.computation_of(jax.jit(call).lower(*arguments))


def _mesh(topology: Topology, devices: int) -> Mesh:
    if devices > len(topology.devices):
        raise NotEnoughChips(f"the program is for {devices} devices, topology `{topology.name}` has "
                             f"{len(topology.devices)} chips; name a larger one")
    return Mesh(np.array(topology.devices[:devices], dtype=object), ("devices",))

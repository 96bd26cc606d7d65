"""One attention of a model on one engine, cut out along its own edges and fed recorded values.

This is how a runtime that gets one attention wrong is found without adding an output to the model:
the small graph holds the same nodes the runtime would fuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import onnx_ir as ir

from mha_export.evaluator import Evaluator
from mha_export.measure._plain_ort import PlainOrt
from mha_export.measure.model_inputs import ModelCase
from mha_export.measure.parity import judge_case
from mha_export.measure.reference_run import ModelReference
from mha_export.recognise import Recognition, Site
from mha_export.report.records import DifferenceRecord
from mha_export.targets.reference import ReferenceSession


def first_failing_site(
    recognition: Recognition, evaluator: Evaluator, case: ModelCase
) -> DifferenceRecord | None:
    """The first site that ``evaluator`` gets wrong on the values it would see in ``case``.

    None where each is right by itself, or none can be cut out.
    """
    cuts = [(site, cut) for site in recognition.sites if (cut := cut_out(site)) is not None]
    wanted = {name for _, model in cuts for name in _input_names(model)}
    recorded = _recorded(recognition.model, wanted, case)
    for site, model in cuts:
        names = _input_names(model)
        if not all(name in recorded for name in names):
            continue
        inputs = {name: recorded[name] for name in names}
        _give_types(model, inputs)
        small = ModelCase(name=case.name, inputs=inputs, dims={})
        expected = ModelReference(model).expected(small)
        if expected.problem is not None:
            continue
        record = judge_case(expected, partial(evaluator.run, model))
        if record.status in ("fail", "error"):
            return DifferenceRecord(
                site=site.id,
                stage="output",
                message=f"{evaluator.name} gets this attention wrong by itself: {record.message}",
                max_abs=record.max_abs,
                bound=record.bound,
                case=case.name,
            )
    return None


def cut_out(site: Site) -> ir.Model | None:
    """The nodes of a site as a model whose inputs are what they read; None where they leak."""
    if not isinstance(site.graph, ir.Graph) or not site.nodes:
        return None
    inside = set(site.nodes)
    read = dict.fromkeys(
        value
        for node in site.nodes
        for value in node.inputs
        if value is not None and value.producer() not in inside and value.const_value is None
    )
    try:
        graph = ir.convenience.extract(site.graph, list(read), [site.output.value])
    except ValueError:  # the output is not bounded by what the nodes read
        return None
    return ir.Model(graph, ir_version=10)


def _input_names(model: ir.Model) -> list[str]:
    return [value.name or "" for value in model.graph.inputs]


def _give_types(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> None:
    """Inner values often carry no type; a graph input must."""
    for value in model.graph.inputs:
        array = inputs[value.name or ""]
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        value.shape = ir.Shape(array.shape)


def _recorded(model: ir.Model, wanted: set[str], case: ModelCase) -> dict[str, np.ndarray]:
    """Values by name, from a copy of the model run plainly in its own precision."""
    copy = model.clone()
    present = {value.name for value in copy.graph.outputs}
    for node in copy.graph:
        for value in node.outputs:
            if value.name in wanted - present:
                copy.graph.outputs.append(value)
    plain = PlainOrt.of(copy)
    try:
        found = ReferenceSession(copy).run(case.inputs) if plain is None else plain.run(case.inputs)
    except Exception:  # the copy runs nowhere: nothing is recorded
        return {}
    return {**case.inputs, **found}

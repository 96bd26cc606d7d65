"""What every softmax and every fused attention node of a model is."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from mha_export.frontends import LoadedModel, open_source
from mha_export.jobs._casting import cast_model
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult
from mha_export.jobs._settings import SourceSettings
from mha_export.recognise import Recognition, recognise
from mha_export.report.records import InspectRecord, ModelRecord, SiteRecord, validate


def inspect_model(
    source: Any, *, settings: SourceSettings | None = None, progress: Progress = silent
) -> JobResult:
    """Recognise ``source`` and return a verdict for every softmax and fused attention node.

    Returns:
        A document valid under the ``inspect`` schema. A model without attention is no error.

    Errors:
        InputError: ``source`` cannot be read.
    """
    settings = settings or SourceSettings()
    progress("reading the model")
    loaded = open_source(source, settings.for_frontend())
    model = cast_model(loaded.model, settings.dtype, progress)
    progress("recognising attention")
    recognition = recognise(model)
    record = InspectRecord(
        model=model_record(loaded), sites=site_records(recognition), notes=tuple(loaded.notes)
    )
    document = record.to_json()
    validate("inspect", document)
    return JobResult(document=document, notices=tuple(loaded.notes))


def model_record(loaded: LoadedModel) -> ModelRecord:
    """What a record says of the model as it was read."""
    graph = loaded.model.graph
    return ModelRecord(
        name=loaded.name,
        sha256=loaded.sha256,
        opsets=dict(graph.opset_imports),
        producer=loaded.model.producer_name,
        nodes=count_nodes(loaded.model),
    )


def count_nodes(model: ir.Model) -> int:
    """Nodes of the graph and of its subgraphs; a function's body counts where it is defined."""
    own = sum(1 for _ in model.graph.all_nodes())
    return own + sum(1 for function in model.functions.values() for _ in function.all_nodes())


def site_records(recognition: Recognition) -> tuple[SiteRecord, ...]:
    """Every verdict, in the order of the graph."""
    return tuple(SiteRecord.from_json(verdict.to_json()) for verdict in recognition.verdicts)

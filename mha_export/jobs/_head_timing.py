"""Time of a model with and without some of its heads."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

from mha_export.errors import InputError
from mha_export.heads.surgery import Pruned
from mha_export.jobs._head_work import Opened
from mha_export.jobs._store import write_models
from mha_export.measure.latency import Contender, LatencySettings, measure_latency
from mha_export.measure.model_inputs import ordinary_inputs
from mha_export.targets import CompileOptions, Program, TargetWorker


def timed(opened: Opened, pruned: Pruned) -> dict[str, float]:
    """Medians on cpu in ms, in turn, of the model as it was and without heads.

    Errors:
        InputError: one of them does not run on cpu.
    """
    models = {"original": opened.heads.model, "pruned": pruned.model}
    contenders = []
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="mha_export-", ignore_cleanup_errors=True)
            )
        )
        write_models(folder, models, standalone=False)
        for name, model in models.items():
            worker = stack.enter_context(TargetWorker("cpu"))
            built = folder / f"{name}.built"
            built.mkdir()
            program = Program(graphs={"main": folder / f"{name}.onnx"})
            compiled = worker.compile(program, CompileOptions(workdir=built))
            for outcome in (compiled, worker.load("main")):
                if not outcome.ok:
                    raise InputError(f"the {name} model can't be timed: {outcome.reason}")
            inputs = ordinary_inputs(model).inputs
            contenders.append(Contender(name=name, worker=worker, inputs=inputs))
        timings = measure_latency(contenders, settings=LatencySettings.quick())
    found = {}
    for name, timing in timings.items():
        if timing.latency is None:
            raise InputError(f"the {name} model can't be timed: {timing.problem}")
        found[name] = timing.latency.p50
    return found

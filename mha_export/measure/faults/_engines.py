"""What a wrong graph is shown to: this package's check, and Polygraphy's comparator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from mha_export.measure._plain_ort import PlainOrt
from mha_export.measure.model_inputs import ModelCase
from mha_export.measure.parity import judge_case
from mha_export.measure.reference_run import Expected
from mha_export.report.records import CaseRecord
from mha_export.targets.reference import ReferenceSession

Arrays = Mapping[str, np.ndarray]


class Engine(Protocol):
    """Runs one model as often as asked."""

    def run(self, inputs: Arrays) -> dict[str, np.ndarray]: ...


def engine(target: str, model: ir.Model) -> Engine | None:
    """``model`` on ``cpu`` (optimised) or ``reference``; None: it cannot be loaded there."""
    if target == "cpu":
        return PlainOrt.of(model, optimise=True)
    try:
        return ReferenceSession(model)
    except Exception:  # the evaluator's own words: an op it does not have
        return None


def verdict(expected: Iterable[Expected], candidate: Engine) -> CaseRecord | None:
    """The first case that is not a ``pass``; None: all are."""
    coarse = None
    for item in expected:
        if item.problem is None:
            record = judge_case(item, candidate.run)
            if record.status in ("fail", "error"):
                return record
            if record.status == "imprecise":
                coarse = coarse or record
    return coarse


class Polygraphy:
    """Two models side by side as ``polygraphy run A --onnxrt`` compares, every default kept.

    Args:
        right: the model that is right.
        sized: a case whose shapes are given to it, as with ``--input-shapes``.
    """

    def __init__(self, right: ir.Model, sized: ModelCase) -> None:
        from polygraphy.logger import G_LOGGER

        G_LOGGER.module_severity = G_LOGGER.CRITICAL
        import onnxruntime

        onnxruntime.set_default_logger_severity(4)  # what it refuses comes back as an exception
        session = _session(right)
        self._own = _Shown(session, None)
        self._sized = _Shown(session, sized)

    def differ(self, wrong: ir.Model) -> tuple[bool | None, bool | None]:
        """Whether it tells the two apart, on inputs of its own shapes and of the given ones.

        Its own shapes are 1 wherever a dimension is not a number. None: the right model does not
        run on them, so nothing is compared.
        """
        try:
            session = _session(wrong)
        except Exception:  # the runtime's own words, or Polygraphy's: a difference, and seen
            session = None
        return self._own.differ(wrong, session), self._sized.differ(wrong, session)


class _Shown:
    """What Polygraphy feeds at one choice of shapes, and what the right model gives there."""

    def __init__(self, session: Any, shapes: ModelCase | None) -> None:
        from polygraphy.backend.onnxrt import OnnxrtRunner
        from polygraphy.common import TensorMetadata
        from polygraphy.comparator import DataLoader

        metadata = None
        if shapes is not None:
            metadata = TensorMetadata()
            for name, array in shapes.inputs.items():
                metadata.add(name, dtype=array.dtype, shape=array.shape)
        loader = DataLoader(input_metadata=metadata)
        with OnnxrtRunner(session) as runner:
            loader.input_metadata = runner.get_input_metadata(use_numpy_dtypes=False)
        self._feeds = [dict(loader[i]) for i in range(loader.iterations)]
        self._right = _results(session, self._feeds)

    def differ(self, wrong: ir.Model, session: Any) -> bool | None:
        from polygraphy.comparator import SimpleCompareFunc

        if self._right is None:
            return None
        read = {value.name for value in wrong.graph.inputs}
        feeds = [{n: a for n, a in feed.items() if n in read} for feed in self._feeds]
        other = None if session is None else _results(session, feeds)
        if other is None:
            return True
        compare = SimpleCompareFunc()
        pairs = zip(self._right, other, strict=True)
        return not all(bool(ok) for a, b in pairs for ok in compare(a, b).values())


def _session(model: ir.Model) -> Any:
    from polygraphy.backend.onnxrt import SessionFromOnnx

    from mha_export.targets._files import model_bytes

    return SessionFromOnnx(model_bytes(model))()


def _results(session: Any, feeds: list[dict[str, np.ndarray]]) -> list[Any] | None:
    """Polygraphy's record of each run; None where the runtime refuses."""
    from polygraphy.backend.onnxrt import OnnxrtRunner
    from polygraphy.comparator import IterationResult

    with OnnxrtRunner(session) as runner:
        try:
            return [IterationResult(outputs=dict(runner.infer(feed))) for feed in feeds]
        except Exception:  # the runtime's own words, or Polygraphy's
            return None

"""Whether the targets load what an export made for them, before it is written.

The graph is the whole one; its weights are zeros. Every weight points into one sparse file, so
the check costs neither the time nor the space of writing them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from mha_export.targets import Job, Limits, Outcome, Target, Worker
from mha_export.targets._loading import refusal_of

_REAL_BYTES = 64 * 1024
"""Tensors up to this size keep their content: shapes, masks, tables."""
_ZEROS = "zeros.bin"
_LIMITS = Limits(seconds=120.0)


class LoadCheck:
    """Asks targets, in one worker process, whether they load a model.

    ``unanswered`` says of each target (and precision) that gave no answer within its limits why;
    it is not asked again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker = Worker()
        self.unanswered: dict[str, str] = {}

    def refusal(self, model: ir.Model, targets: Sequence[tuple[Target, str | None]]) -> str | None:
        """Why the first of ``targets`` (each with a precision) to refuse the model does so."""
        path = self._folder / "model.onnx"
        if targets:
            _write_with_zeros(model, path)
        for target, precision in targets:
            name = _named(target, precision)
            if name in self.unanswered:
                continue
            outcome: Outcome[str | None] = self._worker.call(
                Job(function=refusal_of, args=(target.name, precision, path)), limits=_LIMITS
            )
            if outcome.kind in ("timeout", "out-of-memory"):
                self.unanswered[name] = outcome.reason
            elif outcome.value is not None or not outcome.ok:
                return f"{target.name}: {outcome.value or outcome.reason}"
        return None

    def notes(self, targets: Sequence[tuple[Target, str | None]]) -> list[str]:
        """Of which of ``targets`` nobody knows whether they load the model, and why."""
        return [
            f"whether {name} loads the file is not known: it gave no answer to the export "
            f"({self.unanswered[name]}); mha-export run asks it without this limit"
            for name in dict.fromkeys(_named(*target) for target in targets)
            if name in self.unanswered
        ]

    def close(self) -> None:
        self._worker.close()


def _named(target: Target, precision: str | None) -> str:
    return target.name if precision is None else f"{target.name}:{precision}"


@contextmanager
def load_check() -> Iterator[LoadCheck]:
    """A :class:`LoadCheck` whose worker and files end with the block."""
    with tempfile.TemporaryDirectory(prefix="mha_export-", ignore_cleanup_errors=True) as folder:
        check = LoadCheck(Path(folder))
        try:
            yield check
        finally:
            check.close()


def _write_with_zeros(model: ir.Model, path: Path) -> None:
    copy = model.clone()
    graphs = [copy.graph, *copy.graph.subgraphs()]
    largest = 0
    for graph in graphs:
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None:
                continue
            if tensor.nbytes <= _REAL_BYTES:
                if isinstance(tensor, ir.ExternalTensor):  # of a file that lies elsewhere
                    value.const_value = ir.tensor(tensor.numpy(), name=tensor.name)
                continue
            if tensor.dtype is ir.DataType.STRING:
                continue
            largest = max(largest, tensor.nbytes)
            value.const_value = ir.ExternalTensor(
                _ZEROS,
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=value.name or "",
                base_dir=path.parent,
            )
    with (path.parent / _ZEROS).open("wb") as file:
        file.truncate(largest)
    ir.save(copy, path)

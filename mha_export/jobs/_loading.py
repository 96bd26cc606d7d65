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

    ``unanswered`` collects the targets that gave no answer in time.
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
            outcome: Outcome[str | None] = self._worker.call(
                Job(function=refusal_of, args=(target.name, precision, path)), limits=_LIMITS
            )
            if outcome.kind in ("timeout", "out-of-memory"):
                self.unanswered[target.name] = outcome.reason
            elif outcome.value is not None or not outcome.ok:
                return f"{target.name}: {outcome.value or outcome.reason}"
        return None

    def close(self) -> None:
        self._worker.close()


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

"""What runs a small graph for recognition and for proof.

``recognise`` and ``rewrite`` know this protocol and never a runtime: the caller injects one
(:class:`mha_export.targets.reference.ReferenceTarget`, ONNX Runtime CPU, or the target itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import onnx_ir as ir

Arrays = Mapping[str, np.ndarray]


class Evaluator(Protocol):
    """Runs a model once.

    Attributes:
        name: what a proof records as its ``engine``, e.g. ``cpu (onnxruntime 1.32.0)``.
    """

    name: str

    def run(self, model: ir.Model, inputs: Arrays) -> dict[str, np.ndarray]:
        """Outputs by name. A model that was run is not changed afterwards: its session is kept.

        Errors:
            mha_export.errors.MhaExportError: the model could not be loaded or run; the message
                carries the runtime's own words.
        """
        ...

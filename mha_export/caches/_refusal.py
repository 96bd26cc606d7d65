"""Why a decoder cannot be given a cache."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from mha_export.recognise import Reason


class Refused(Exception):  # noqa: N818 (an answer that ends a walk, not an error)
    """Ends an analysis with the first thing that stands in the way; never leaves this package."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        value: ir.Value | None = None,
        nodes: Sequence[ir.Node] = (),
    ) -> None:
        super().__init__(message)
        self.reason = Reason(
            code=code,
            message=message,
            value=None if value is None else value.name,
            nodes=tuple(node.name or node.op_type for node in nodes),
        )

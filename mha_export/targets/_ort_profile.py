"""Which provider ran each node, read off ONNX Runtime's own profile of a run.

The profile says what *ran* and with which element types; the list of providers of a session only
says what was asked for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mha_export.targets._files import NOT_COMPUTE
from mha_export.targets._target import Placement

FLOATS = frozenset({"float", "float16", "bfloat16", "double"})
ONNX_TYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(bfloat16)": "bfloat16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({name})": name for name in ("int8", "int16", "int32", "int64")},
    **{f"tensor(u{name})": f"u{name}" for name in ("int8", "int16", "int32", "int64")},
}


def profiled_placement(
    model: Path, setup: Any, inputs: Mapping[str, np.ndarray] | None
) -> Placement:
    """Run the model once under the profiler and count where its floating-point nodes ran.

    ``inputs``: those of an earlier run; without them zeros of size 1 in every symbolic dimension.
    """
    import onnxruntime as ort

    from mha_export.targets._ort import open_session, session_options, to_ort_value

    with tempfile.TemporaryDirectory(prefix="mha_export-profile-") as folder:
        options = session_options(ort, setup)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "run")
        session = open_session(str(model), setup, options)
        feeds = inputs if inputs is not None else zeros_for(session.get_inputs())
        names = [value.name for value in session.get_inputs()]
        values = {name: to_ort_value(np.asarray(feeds[name])) for name in names}
        session.run_with_ort_values(None, values)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    return placement_of(events, provider=setup.provider)


def placement_of(events: Iterable[Mapping[str, Any]], *, provider: str) -> Placement:
    """Count the nodes of a profile by provider: those that compute in floats, and the others."""
    ran: dict[str, tuple[str, str]] = {}
    others: dict[str, str] = {}
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != "Node" or "provider" not in args:
            continue
        name = str(event["name"]).removesuffix("_kernel_time")
        op, where = str(args.get("op_name", "?")), str(args["provider"])
        if _computes(args):
            ran[name] = (op, where)
        elif not op.startswith("Memcpy"):  # which the runtime puts between its providers
            others[name] = where
    elsewhere = tuple(
        f"{name} ({op}) -> {where}" for name, (op, where) in ran.items() if where != provider
    )
    return Placement(
        float_compute_nodes=len(ran),
        on_target=len(ran) - len(elsewhere),
        elsewhere=elsewhere,
        evidence="onnxruntime profile of one run",
        other_nodes=len(others),
        other_on_target=sum(where == provider for where in others.values()),
    )


def _computes(args: Mapping[str, Any]) -> bool:
    op, made = args.get("op_name"), args.get("output_type_shape") or ()
    if op in NOT_COMPUTE:
        return False
    if op == "Cast":  # integers made floats: positions, lengths; the computing comes after
        made = args.get("input_type_shape") or ()
    return any(FLOATS.intersection(entry) for entry in made)


def zeros_for(declared: Iterable[Any]) -> dict[str, np.ndarray]:
    """Arrays a session accepts when nobody gave any: zeros, each symbolic dimension 1."""
    import ml_dtypes

    feeds = {}
    for value in declared:
        shape = [dim if isinstance(dim, int) else 1 for dim in value.shape]
        name = ONNX_TYPES[value.type]
        feeds[value.name] = np.zeros(shape, ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return feeds

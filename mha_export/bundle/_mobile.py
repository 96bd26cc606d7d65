"""ORT format: what a mobile or other reduced build of ONNX Runtime loads."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from mha_export.bundle._manifest import MobileRecord
from mha_export.errors import InputError


def write_mobile(folder: Path, place: str, source: str) -> MobileRecord:
    """Convert ``folder / place / source`` to ``mobile.ort``, beside it, with its weights inside.

    Only hardware-independent optimisations: the phone it runs on is not this machine.

    Errors:
        InputError: ONNX Runtime is not here, or refuses the graph.
    """
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise InputError(
            f"--mobile needs ONNX Runtime: {error}", fix="pip install 'mha-export[cpu]'"
        ) from None
    file, operators = f"{place}/mobile.ort", f"{place}/mobile.operators.config"
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(folder / file)
    options.add_session_config_entry("session.save_model_format", "ORT")
    try:
        ort.InferenceSession(
            str(folder / place / source), options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # the runtime's own kinds
        raise InputError(f"--mobile: ONNX Runtime refuses {source}: {error}") from None
    (folder / operators).write_text(_operators(folder / place / source), encoding="utf-8")
    return MobileRecord(file=file, operators=operators, runtime_version=ort.__version__)


def _operators(path: Path) -> str:
    """Lines ``domain;opset;Op1,Op2``: the configuration of a reduced build."""
    model = ir.load(path)
    bodies = [model.graph.all_nodes()]
    bodies += [function.all_nodes() for function in model.functions.values()]
    used: dict[str, set[str]] = {}
    own = {(function.domain, function.name) for function in model.functions.values()}
    for body in bodies:
        for node in body:
            if (node.domain, node.op_type) not in own or node.domain == "com.microsoft":
                used.setdefault(node.domain or "ai.onnx", set()).add(node.op_type)
    opsets = {domain or "ai.onnx": v for domain, v in model.graph.opset_imports.items()}
    return "".join(
        f"{domain};{opsets.get(domain, 1)};{','.join(sorted(names))}\n"
        for domain, names in sorted(used.items())
    )

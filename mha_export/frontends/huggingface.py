"""A Hugging Face folder: ``config.json`` and safetensors weights, loaded without the network."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from mha_export.errors import InputError
from mha_export.frontends import _export, _tasks
from mha_export.frontends._digest import model_digest
from mha_export.frontends._frontend import LoadedModel, SourceOptions

_ORG_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GENERIC_NAMES = frozenset({"", ".", "checkpoint", "hf", "model", "snapshot", "weights"})


class HuggingFaceFolder:
    """Loads with ``transformers`` in float32 and exports with ``torch.onnx.export``."""

    name = "huggingface"
    summary = "a Hugging Face folder (config.json, safetensors)"

    def accepts(self, source: object) -> bool:
        if not isinstance(source, (str, Path)):
            return False
        path = Path(source)
        return path.is_dir() or (not path.exists() and _is_org_name(str(source)))

    def load(self, source: object, options: SourceOptions) -> LoadedModel:
        folder = Path(str(source))
        if not folder.is_dir():
            raise InputError(
                f"{source}: no such folder, and models are not downloaded from here",
                fix=f"hf download {source} --local-dir {str(source).split('/')[-1]}, "
                "then give that folder",
            )
        folder = folder.absolute()
        config = _read_config(folder)
        _check_code(folder, config, trust=options.trust_code)
        _check_weights(folder)
        _require_transformers()
        return _export_folder(folder, config, options)


def _is_org_name(source: str) -> bool:
    suffix = Path(source).suffix.lower()
    return bool(_ORG_NAME.fullmatch(source)) and suffix not in {
        *(".onnx", ".onnxtxt", ".pb", ".ort"),
        *(".yaml", ".yml", ".json", ".py", ".pt2", ".pt", ".bin", ".safetensors"),
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        files = sorted(folder.glob("*.onnx"))
        raise InputError(
            f"{folder}: not a Hugging Face folder, it has no config.json",
            fix=f"it holds an ONNX file: give {files[0]}"
            if files
            else "give the folder that holds config.json and the weights",
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(
            f"{path}: not readable as JSON: {error}", fix="download it again"
        ) from error
    if not isinstance(config, dict) or not (config.get("model_type") or config.get("auto_map")):
        raise InputError(
            f"{path}: states no model_type, so it is not the config of a transformers model",
            fix="give the folder of the transformers model itself",
        )
    return config


def _check_code(folder: Path, config: dict[str, Any], *, trust: bool) -> None:
    if "auto_map" in config and not trust:
        files = (
            ", ".join(sorted(item.name for item in folder.glob("*.py"))) or "code from elsewhere"
        )
        raise InputError(
            f"{folder}: the model needs Python code that comes with it ({files}); "
            "it is not run unasked",
            fix="read that code, then allow it with --trust-code",
        )


def _check_weights(folder: Path) -> None:
    """Every weight file that the folder promises is there and complete (headers only are read)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{index}: not a weight index: {error}", fix="download it again"
            ) from error
        files = [folder / str(name) for name in names]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise InputError(
                f"{folder}: {len(missing)} of {len(files)} weight files are missing: "
                f"{', '.join(missing[:3])}",
                fix="download the folder again",
            )
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files and not list(folder.glob("pytorch_model*.bin")):
        raise InputError(
            f"{folder}: has no weights (model.safetensors)",
            fix="download the whole folder, not only its config",
        )
    for file in files:
        _check_safetensors(file)


def _check_safetensors(file: Path) -> None:
    """Header length, header JSON, and that the file is as long as its last tensor's end."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > size - 8:
            raise InputError(
                f"{file}: not safetensors, or cut off ({size:,} bytes)", fix="download it again"
            )
        try:
            header = json.loads(stream.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise InputError(
                f"{file}: its safetensors header is damaged", fix="download it again"
            ) from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise InputError(
            f"{file}: cut off, {size:,} bytes of {expected:,}", fix="download it again"
        )


def _require_transformers() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"a Hugging Face folder needs {error.name}, which is not installed",
            fix="pip install 'mha-export[hf]'",
        ) from error


def _export_folder(folder: Path, config: dict[str, Any], options: SourceOptions) -> LoadedModel:
    with _export.quiet():
        loaded = _load_config(folder, options)
    task = options.task or _tasks.task_of(loaded)
    notes: list[str] = []
    with _export.quiet():
        model = _load_weights(folder, loaded, task, options, notes)
        traceable, samples = _tasks.traceable_for(model, task, dims=options.dims, seed=options.seed)
    graph = _export.export(
        traceable, exporter=options.exporter, opset=options.opset, what=str(folder)
    )
    return LoadedModel(
        model=graph.model,
        name=_name_of(folder, config),
        sha256=model_digest(graph.model),
        origin=f"Hugging Face folder {folder} ({type(model).__name__}, task {task})",
        notes=(*notes, *graph.notes),
        sample_inputs=samples,
    )


def _load_config(folder: Path, options: SourceOptions) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=options.trust_code
        )
    except Exception as error:
        raise InputError(
            f"{folder / 'config.json'}: transformers can't use it: {_export.last_words(error)}",
            fix="check model_type, or upgrade transformers for a newer architecture",
        ) from error


def _load_weights(
    folder: Path, config: Any, task: str, options: SourceOptions, notes: list[str]
) -> Any:
    """The model in float32; weights that are missing are an error, never made up."""
    import torch
    import transformers

    auto_class = getattr(transformers, _tasks.task_named(task).auto_class)
    try:
        model, info = auto_class.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=options.trust_code,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except Exception as error:
        raise InputError(
            f"{folder}: can't be loaded for task {task}: {_export.last_words(error)}",
            fix=f"try --task {_tasks.task_of(config)}, or download the folder again",
        ) from error
    missing = sorted(str(key) for key in info["missing_keys"])
    unread = [key for key in missing if "pooler." in key and task == "feature-extraction"]
    needed = [key for key in missing if key not in unread]
    if needed:
        raise InputError(
            f"{folder}: holds no weights for {', '.join(needed[:3])}"
            f"{' and others' if len(needed) > 3 else ''}, which task {task} needs",
            fix=f"choose the task it was made for: --task {_tasks.task_of(config)}",
        )
    stored = getattr(config, "dtype", None)
    if stored not in (None, torch.float32):
        notes.append(f"weights stored as {str(stored).removeprefix('torch.')}, loaded as float32")
    return model.eval()


def _name_of(folder: Path, config: dict[str, Any]) -> str:
    """The folder's name, or where that says nothing, the name the model was saved under."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.split("--")[-1]
    if folder.name.lower() not in _GENERIC_NAMES:
        return folder.name
    stated = str(config.get("_name_or_path") or "").rstrip("/").split("/")[-1]
    return stated or str(config.get("model_type", "model"))


FRONTEND = HuggingFaceFolder()

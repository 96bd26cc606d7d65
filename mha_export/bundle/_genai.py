"""``genai_config.json``: what onnxruntime-genai needs to know of a decoder.

Source: the configuration reference of onnxruntime-genai. Names of the cache must be numbered by
layer, which its templates (``present.%d.key``) presuppose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mha_export.decode import CacheLayout
from mha_export.errors import InputError


def read_config(path: Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face folder (or the folder).

    Errors:
        InputError: it is missing, or no JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--genai {file}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"--genai {file}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"--genai {file}: expected an object, as in a config.json")
    return config


def genai_config(config: Mapping[str, Any], cache: CacheLayout | None, file: str) -> dict[str, Any]:
    """The configuration for graph ``file``.

    Errors:
        InputError: not a decoder with a cache that onnxruntime-genai can drive, or a number is
            missing from ``config``.
    """
    if cache is None:
        raise InputError(
            "--genai: the model keeps no cache", fix="export a decoder with --cache concat"
        )
    if cache.growth != "concat" or cache.total_length is not None:
        raise InputError(
            f"--genai: onnxruntime-genai does not drive a {cache.growth} cache with an input of "
            "lengths",
            fix="export with --cache concat",
        )
    keys, values = cache.tensors[::2], cache.tensors[1::2]
    inputs = {"input_ids": cache.tokens[0]}
    for name, value in (("attention_mask", cache.mask), ("position_ids", cache.positions)):
        if value is not None:
            inputs[name] = value
    inputs["past_key_names"] = _template([t.past for t in keys])
    inputs["past_value_names"] = _template([t.past for t in values])
    outputs = {
        "logits": cache.logits,
        "present_key_names": _template([t.present for t in keys]),
        "present_value_names": _template([t.present for t in values]),
    }
    eos = _number(config, "eos_token_id")
    context = int(_number(config, "max_position_embeddings"))
    return {
        "model": {
            "type": str(config.get("model_type", "llama")),
            "bos_token_id": config.get("bos_token_id", eos),
            "eos_token_id": eos,
            "pad_token_id": _pad(config, eos),
            "vocab_size": _number(config, "vocab_size"),
            "context_length": context,
            "decoder": {
                "filename": file,
                "hidden_size": _number(config, "hidden_size"),
                "num_attention_heads": _number(config, "num_attention_heads"),
                "num_key_value_heads": keys[0].heads,
                "num_hidden_layers": len(keys),
                "head_size": keys[0].dim,
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "inputs": inputs,
                "outputs": outputs,
            },
        },
        "search": {
            "do_sample": False,
            "max_length": context,
            "past_present_share_buffer": False,
        },
    }


def _template(names: Sequence[str]) -> str:
    """``present.0.key``, ``present.1.key`` ... as ``present.%d.key``."""
    for match in re.finditer(r"\d+", names[0]):
        template = f"{names[0][: match.start()]}%d{names[0][match.end() :]}"
        if [template % layer for layer in range(len(names))] == list(names):
            return template
    raise InputError(
        f"--genai: cache names {', '.join(names[:2])} are not numbered by layer",
        fix="leave --genai out",
    )


def _number(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise InputError(f"--genai: config.json states no {name}")
    return config[name]


def _pad(config: Mapping[str, Any], eos: Any) -> Any:
    pad = config.get("pad_token_id")
    if pad is not None:
        return pad
    return eos[0] if isinstance(eos, list) else eos

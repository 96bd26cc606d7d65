"""What an app embeds: a folder (or zip) of graphs, weights, known answers and examples.

See docs/embedding.md.
Names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mha_export.bundle._answers import Answers, make_answers, read_answers
    from mha_export.bundle._embedding import options_of, preference, runs_on
    from mha_export.bundle._examples import write_examples
    from mha_export.bundle._files import hash_files
    from mha_export.bundle._genai import genai_config
    from mha_export.bundle._interface import describe_interface
    from mha_export.bundle._manifest import (
        MANIFEST,
        AnswerCase,
        FileRecord,
        Manifest,
        MobileRecord,
        TensorRecord,
        VariantEntry,
        parse_manifest,
        read_manifest,
        write_manifest,
    )
    from mha_export.bundle._pages import bundle_readme
    from mha_export.bundle._verify import (
        CheckedFiles,
        OpenedBundle,
        Problem,
        check_files,
        is_bundle,
        open_bundle,
    )
    from mha_export.bundle._zip import write_zip

_MEMBERS = {
    "_answers": ("Answers", "make_answers", "read_answers"),
    "_embedding": ("options_of", "preference", "runs_on"),
    "_examples": ("write_examples",),
    "_files": ("hash_files",),
    "_genai": ("genai_config",),
    "_interface": ("describe_interface",),
    "_manifest": (
        "MANIFEST",
        "AnswerCase",
        "FileRecord",
        "Manifest",
        "MobileRecord",
        "TensorRecord",
        "VariantEntry",
        "parse_manifest",
        "read_manifest",
        "write_manifest",
    ),
    "_pages": ("bundle_readme",),
    "_verify": (
        "CheckedFiles",
        "OpenedBundle",
        "Problem",
        "check_files",
        "is_bundle",
        "open_bundle",
    ),
    "_zip": ("write_zip",),
}
_HOME_OF = {name: module for module, names in _MEMBERS.items() for name in names}

__all__ = [
    "MANIFEST",
    "AnswerCase",
    "Answers",
    "CheckedFiles",
    "FileRecord",
    "Manifest",
    "MobileRecord",
    "OpenedBundle",
    "Problem",
    "TensorRecord",
    "VariantEntry",
    "bundle_readme",
    "check_files",
    "describe_interface",
    "genai_config",
    "hash_files",
    "is_bundle",
    "make_answers",
    "open_bundle",
    "options_of",
    "parse_manifest",
    "preference",
    "read_answers",
    "read_manifest",
    "runs_on",
    "write_examples",
    "write_manifest",
    "write_zip",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)

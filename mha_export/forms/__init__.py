"""One file per ONNX form. A file that defines ``FORM`` is found by itself."""

from __future__ import annotations

import functools

from mha_export.discovery import members
from mha_export.errors import InputError
from mha_export.forms._build import build_model
from mha_export.forms._form import Emitted, Form, FormParams, Supported, Unsupported
from mha_export.forms._scope import Scope

__all__ = [
    "Emitted",
    "Form",
    "FormParams",
    "Scope",
    "Supported",
    "Unsupported",
    "all_forms",
    "build_model",
    "form_named",
]


@functools.cache
def all_forms() -> dict[str, Form]:
    """Every form of the package by name, in alphabetical order of their files."""
    return {form.name: form for form in members(__name__, "FORM")}


def form_named(name: str) -> Form:
    """The form called ``name``.

    Errors:
        InputError: no such form; the message lists those there are.
    """
    forms = all_forms()
    if name not in forms:
        raise InputError(f"unknown form {name!r}", fix=f"choose one of: {', '.join(sorted(forms))}")
    return forms[name]

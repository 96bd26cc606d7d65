"""One file per ONNX form. A file that defines ``FORM`` is found by itself."""

from __future__ import annotations

import functools
import importlib
import pkgutil

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
    forms: dict[str, Form] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            form: Form = importlib.import_module(f"{__name__}.{module.name}").FORM
            forms[form.name] = form
    return forms


def form_named(name: str) -> Form:
    """The form called ``name``.

    Errors:
        InputError: no such form; the message lists those there are.
    """
    forms = all_forms()
    if name not in forms:
        raise InputError(f"unknown form {name!r}", fix=f"choose one of: {', '.join(sorted(forms))}")
    return forms[name]

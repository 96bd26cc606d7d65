"""Imported first by scripts that need the development environment: outside it, they start again
inside.

``scripts/test`` builds it; ``MHA_EXPORT_VENV`` says where it lies, as for the scripts in bash.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("MHA_EXPORT_VENV") or ROOT / ".venv")


def enter() -> None:
    """Go on in the environment where the package is not installed for this interpreter."""
    if importlib.util.find_spec("mha_export") is not None:
        return
    python = VENV / "bin" / "python"
    if python.exists() and Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(python, [str(python), *sys.argv])
    print(
        f"error: {sys.executable} has no mha_export, and there is no environment in {VENV}\n"
        "  fix: run scripts/test once, which builds it",
        file=sys.stderr,
    )
    raise SystemExit(2)


enter()

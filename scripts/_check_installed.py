"""Run by the interpreter of a clean environment: ``_check_installed.py CHECKOUT``.

The package that was installed there from the wheel holds every file of the checkout's package, its
presets, and works with base dependencies only.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ABSENT = ("jinja2", "matplotlib", "onnxruntime", "onnxscript", "openvino", "torch", "transformers")


def main(checkout: Path) -> int:
    import mha_export
    from mha_export.forms import all_forms
    from mha_export.frontends import all_frontends
    from mha_export.presets import preset_names
    from mha_export.targets import all_targets

    package = Path(mha_export.__file__).parent
    problems = []
    if package.is_relative_to(checkout):
        problems.append(f"imported from the checkout: {package}")
    present = [name for name in ABSENT if importlib.util.find_spec(name)]
    if present:
        problems.append(f"base dependencies pull in {', '.join(present)}")
    for path in sorted((checkout / "mha_export").rglob("*")):
        inside = path.relative_to(checkout / "mha_export")
        if path.is_file() and "__pycache__" not in path.parts and not (package / inside).is_file():
            problems.append(f"not in the wheel: mha_export/{inside}")
    presets = {path.stem for path in (checkout / "graphs" / "specs").glob("*.yaml")}
    if set(preset_names()) != presets:
        problems.append(f"presets differ: {sorted(presets ^ set(preset_names()))}")
    if not (all_forms() and all_frontends()):
        problems.append("a registry is empty")
    for target in all_targets().values():
        target.availability()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))

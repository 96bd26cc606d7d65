"""Ways to break a bundle that ``--check`` must name; each returns what is to be said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from mha_export.bundle import Manifest
from mha_export.bundle._manifest import manifest_bytes


def rewritten(bundle: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change the manifest and put its own hash right."""
    path = bundle / "manifest.json"
    document = json.loads(path.read_bytes())
    change(document)
    path.write_bytes(manifest_bytes(Manifest.from_json(document)))


def needs_a_later_version(document: dict[str, object]) -> None:
    for variant in document["variants"]:  # type: ignore[attr-defined]
        for place in variant["runs_on"]:
            place["minimum"] = "9999.0"  # OpenVINO counts years


def tampered_weight(bundle: Path) -> str:
    path = bundle / "model" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    return "model/weights.bin: changed"


def missing_file(bundle: Path) -> str:
    (bundle / "answers" / "holes.bin").unlink()
    return "answers/holes.bin: missing"


def older_runtime(bundle: Path) -> str:
    rewritten(bundle, needs_a_later_version)
    return "older: "


def damaged_manifest(bundle: Path) -> str:
    path = bundle / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"name"', b'"nahe"', 1))
    return "manifest.json: changed"


def wrong_answer(bundle: Path) -> str:
    """Every hash right, the model not: another weight, as a mistaken build would ship."""
    path = bundle / "model" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[0:400] = bytes(400)
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()

    def restate(document: dict[str, object]) -> None:
        document["files"]["model/weights.bin"]["sha256"] = digest  # type: ignore[index]

    rewritten(bundle, restate)
    return "answer "


BREAKS = [tampered_weight, missing_file, older_runtime, damaged_manifest, wrong_answer]

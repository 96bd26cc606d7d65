"""A bundle's manifest as a person reads it."""

from __future__ import annotations

from typing import Any

from mha_export.cli._terminal import print_json, print_line, print_table


def show_bundle(document: dict[str, Any], *, as_json: bool = False) -> None:
    """One line a variant, then what goes in, and what is in the bundle besides."""
    if as_json:
        print_json(document)
        return
    print_table(
        document["model"]["name"],
        ["variant", "file", "KB", "forms", "runs on"],
        [
            [
                variant["target"],
                variant["file"],
                round(document["files"][variant["file"]]["bytes"] / 1e3),
                ", ".join(f"{form} {count}" for form, count in variant["forms"].items()),
                ", ".join(
                    f"{place['runtime']} {place['minimum']} {place['provider']}"
                    for place in variant["runs_on"]
                ),
            ]
            for variant in document["variants"]
        ],
    )
    print_table(
        "inputs",
        ["input", "type", "shape", "meaning"],
        [
            [value["name"], value["dtype"], str(value["shape"]), value["meaning"]]
            for value in document["inputs"]
        ],
    )
    total = sum(file["bytes"] for file in document["files"].values())
    weights = document["weights"]
    shared = (
        ""
        if weights is None
        else f", {document['files'][weights]['bytes'] / 1e6:.1f} of it weights"
    )
    print_line(
        f"{total / 1e6:.1f} MB in {len(document['files'])} files{shared}; "
        f"{len(document['answers'])} known answers; cache: "
        f"{'none' if document['cache'] is None else document['cache']['growth']}"
    )

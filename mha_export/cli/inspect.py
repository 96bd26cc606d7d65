"""``mha-export inspect``: a verdict for every softmax and every fused attention node."""

from __future__ import annotations

from typing import Any

import click

from mha_export.cli._bundle_view import show_bundle
from mha_export.cli._options import json_option, seed_option, shape_option, source_options
from mha_export.cli._terminal import print_json, print_line, print_table, progress_shown


@click.command("inspect")
@click.argument("model")
@source_options
@shape_option
@seed_option
@json_option
@click.pass_context
def command(ctx: click.Context, /, model: str, as_json: bool, **source: Any) -> None:
    """Say what every softmax and every fused attention node of MODEL is; or what a bundle holds.

    \b
    Example:
      mha-export inspect model.onnx --json
      mha-export inspect app-model
    """
    from mha_export.jobs import SourceSettings, inspect_bundle, inspect_model, is_bundle

    if is_bundle(model):
        show_bundle(inspect_bundle(model).document, as_json=as_json)
        return
    with progress_shown() as progress:
        result = inspect_model(model, settings=SourceSettings(**source), progress=progress)
    if as_json:
        print_json(result.document)
    else:
        _show(result.document)
    ctx.exit(result.exit_code)


def _show(document: dict[str, Any]) -> None:
    sites = document["sites"]
    print_table(
        document["model"]["name"],
        ["site", "verdict", "heads", "head_dim", "scale", "mask", "rotary", "cache", "reason"],
        [_row(site) for site in sites],
    )
    counts = dict.fromkeys(("attention", "not_attention", "rejected"), 0)
    for site in sites:
        counts[site["verdict"]] += 1
    print_line(
        f"{counts['attention']} attention, {counts['not_attention']} not attention, "
        f"{counts['rejected']} rejected"
    )


def _row(site: dict[str, Any]) -> list[object]:
    spec, reason = site["spec"], site["reason"]
    why = None if reason is None else f"{reason['code']}: {reason['message']}"
    if spec is None:
        return [site["id"], site["verdict"], None, None, None, None, None, None, why]
    heads = f"{spec['q_heads']}/{spec['kv_heads']}"
    dims = (
        spec["head_dim"]
        if spec["v_head_dim"] == spec["head_dim"]
        else (f"{spec['head_dim']}/{spec['v_head_dim']}")
    )
    return [
        site["id"],
        site["verdict"] if site["fused_as"] is None else f"{site['verdict']} ({site['fused_as']})",
        heads,
        dims,
        spec["scale"],
        mask_words(spec),
        None if spec["rotary"] is None else f"{spec['rotary']['style']} {spec['rotary']['dim']}",
        spec["cache"],
        why,
    ]


def mask_words(spec: dict[str, Any]) -> str | None:
    """A mask in a few words: ``causal bottom_right, window 3, padding``."""
    words = [] if spec["causal"] is None else [f"causal {spec['causal']}"]
    for side in ("left_window", "right_window"):
        if spec[side] is not None:
            words.append(f"{side} {spec[side]}")
    words += spec["mask"]
    if spec["softcap"] is not None:
        words.append(f"softcap {spec['softcap']:g}")
    if spec["sinks"]:
        words.append("sinks")
    return ", ".join(words) or None

"""``README.md`` of a bundle: what is in it, for the person who embeds it."""

from __future__ import annotations

from collections.abc import Iterable

from mha_export.bundle._manifest import Manifest, ValueRecord

_TEXT = """\
# {name}

Made by {generator}. Everything here is described in `manifest.json`; `mha-export verify` on this
folder, or `--check` of any example, says whether it is whole and right on your machine.

## Which graph

In order of preference; take the first whose runtime you ship (each example does this: `choose`).
All graphs compute the same, share `{weights}` and take the same inputs.

{variants}

## Inputs

{inputs}

## Outputs

{outputs}
{cache}
## Examples

| language | from this folder |
| --- | --- |
| Python | `pip install onnxruntime numpy`, then `python examples/python/run.py --check` |
| Node | `npm install` in `examples/javascript`, then `node examples/javascript/run.mjs --check` |
| browser | `npm install` in `examples/javascript`, then `node examples/javascript/serve.mjs` |
| C++ | `cmake -S examples/cpp -B build`, build it, then `build/openvino_app . --check` |
| C#, Rust, Swift | short programs to start from, in `examples` |
"""


def bundle_readme(manifest: Manifest) -> str:
    """The text, made of the manifest alone."""
    return _TEXT.format(
        name=manifest.model.name,
        generator=manifest.generator,
        weights=manifest.weights or "no weights file",
        variants=_table(
            ("variant", "file", "runs on"),
            (
                (
                    variant.target,
                    f"`{variant.file}`",
                    "; ".join(f"{p.runtime} >= {p.minimum}, {p.provider}" for p in variant.runs_on)
                    or "-",
                )
                for variant in manifest.variants
            ),
        ),
        inputs=_values(manifest.inputs),
        outputs=_values(manifest.outputs),
        cache=_cache(manifest),
    )


def _values(values: Iterable[ValueRecord]) -> str:
    return _table(
        ("name", "type", "shape", "meaning"),
        (
            (
                f"`{v.name}`",
                v.dtype,
                f"[{', '.join(map(str, v.shape))}]",
                v.meaning + ("" if v.below is None else f", below {v.below}"),
            )
            for v in values
        ),
    )


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _cache(manifest: Manifest) -> str:
    if manifest.cache is None:
        return ""
    if manifest.cache["growth"] == "static":
        how = (
            "Make each buffer once, as long as the longest text you will allow, filled with zeros; "
            "bind it as input and as output, and count the tokens in "
            f"`{manifest.cache['total_length']}`."
        )
    else:
        how = (
            "Feed pasts of 0 tokens first; each step's present outputs are the next step's pasts. "
            "Feed only the new tokens."
        )
    return f"\n## The cache\n\n{how} Which output follows which input: `cache` in the manifest.\n"

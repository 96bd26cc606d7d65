"""Heads of a model on the page: heat maps of layers by heads, attention maps, pruning curves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mha_export.report._figures import figure, plural
from mha_export.report._merge import Report
from mha_export.report.charts import Chart
from mha_export.report.charts._curve import quality_chart
from mha_export.report.html._heat import Heat, HeatCell, HeatRow
from mha_export.report.records import (
    AttentionMapRecord,
    HeadRecord,
    HeadsRecord,
    LayerHeadsRecord,
    SurgeryRecord,
)

_METRICS = (
    ("importance", "Importance"),
    ("entropy_share", "Entropy, as a share of the most there can be"),
    ("previous", "Weight on the previous token"),
    ("next", "Weight on the next token"),
    ("same", "Weight on the same token"),
    ("first", "Weight on the first token"),
    ("separator", "Weight on separators"),
    ("rare", "Weight on the rarest word, over chance"),
    ("induction", "Induction: weight after the first occurrence"),
    ("norm", "Norm of what the head adds"),
    ("qk_effective_rank", "Effective rank of W_Q W_Kᵀ"),
    ("vo_effective_rank", "Effective rank of W_V W_O"),
)
"""Fields of :class:`HeadRecord` and what the page calls them; the first is open, others fold."""


@dataclass(frozen=True, kw_only=True)
class MapView:
    """One attention map as a shaded table."""

    title: str
    words: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[float, str], ...]], ...]


@dataclass(frozen=True, kw_only=True)
class HeadsView:
    """One model's heads."""

    model: str
    facts: str
    heats: tuple[tuple[str, Heat], ...]
    maps: tuple[MapView, ...]
    redundant: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SurgeryView:
    """One model with other heads: figures, layers, and the curve where there is one."""

    title: str
    facts: tuple[tuple[str, str], ...]
    layers: tuple[tuple[str, str, str, str], ...]
    chart: Chart | None
    notes: tuple[str, ...]


def heads_views(report: Report) -> tuple[HeadsView, ...]:
    """Every analysis of the report."""
    return tuple(_view(record) for record in report.heads)


def surgery_views(report: Report) -> tuple[SurgeryView, ...]:
    """Every pruned or regrouped model of the report."""
    return tuple(_surgery(record) for record in report.surgeries)


def _view(record: HeadsRecord) -> HeadsView:
    facts = [plural(record.samples, "sample"), plural(record.tokens, "token"), record.data]
    if record.importance_method:
        facts.append(
            f"importance: {record.importance_method} of {record.loss}, {record.importance_by}"
        )
    layers = [layer for layer in record.layers if layer.heads]
    heats = [(label, heat) for name, label in _METRICS if (heat := _heat(layers, name)) is not None]
    return HeadsView(
        model=record.model.name,
        facts=" · ".join(facts),
        heats=tuple(heats),
        maps=tuple(_map(drawn) for drawn in record.maps),
        redundant=tuple(_redundant(layers)),
    )


def _heat(layers: Sequence[LayerHeadsRecord], name: str) -> Heat | None:
    values = [getattr(head, name) for layer in layers for head in layer.heads]
    known = [value for value in values if value is not None]
    if not known:
        return None
    low, high = min(0.0, *known), max(known)
    widest = max(len(layer.heads) for layer in layers)
    return Heat(
        columns=tuple(str(head) for head in range(widest)),
        rows=tuple(_row(layer, name, low, high, widest) for layer in layers),
    )


def _row(layer: LayerHeadsRecord, name: str, low: float, high: float, widest: int) -> HeatRow:
    heads: list[HeadRecord | None] = [*layer.heads, *[None] * (widest - len(layer.heads))]
    return HeatRow(
        label=f"layer {layer.layer}",
        cells=tuple(_cell(layer, head, name, low, high) for head in heads),
    )


def _cell(
    layer: LayerHeadsRecord, head: HeadRecord | None, name: str, low: float, high: float
) -> HeatCell:
    value = None if head is None else getattr(head, name)
    if head is None or value is None:
        return HeatCell(text="", status="none", shade=0.0, title="not known")
    shade = (value - low) / (high - low) if high > low else 0.0
    return HeatCell(
        text=figure(value),
        status="pass",
        shade=round(2.0 * shade, 3),
        title=f"layer {layer.layer} ({layer.site}), head {head.head}: {value:.4g}",
    )


def _map(drawn: AttentionMapRecord) -> MapView:
    rows = []
    for word, weights in zip(drawn.words, drawn.weights, strict=True):
        cells = tuple(
            (weight, f"{word} → {key}: {weight:.2f}")
            for key, weight in zip(drawn.words, weights, strict=True)
        )
        rows.append((word, cells))
    return MapView(
        title=f"Layer {drawn.layer}, head {drawn.head}", words=drawn.words, rows=tuple(rows)
    )


def _redundant(layers: Iterable[LayerHeadsRecord]) -> Iterable[str]:
    """The pair of each layer whose contributions are most alike."""
    for layer in layers:
        pairs = [
            (layer.similarity[i][j], i, j)
            for i in range(len(layer.similarity))
            for j in range(i + 1, len(layer.similarity))
        ]
        if pairs:
            most, i, j = max(pairs)
            yield f"layer {layer.layer}: heads {i} and {j}, CKA {most:.2f}"


def _surgery(record: SurgeryRecord) -> SurgeryView:
    facts = [
        ("how", record.how),
        ("heads", f"{record.heads_before} → {record.heads_after}"),
        ("weights", f"{record.bytes_before / 1e6:.1f} → {record.bytes_after / 1e6:.1f} MB"),
        ("cache a token", f"{record.cache_bytes_before} → {record.cache_bytes_after} bytes"),
    ]
    if record.quality is not None:
        facts.append((record.quality_name or "quality", f"{record.quality:.4f}"))
    facts += [(f"quality, {name}", f"{v:.4f}") for name, v in record.quality_other.items()]
    if record.check_max_abs is not None:
        facts.append((f"from {record.check}", f"{record.check_max_abs:.2g} at most"))
    facts += [(f"median, {name}", f"{value:.3g} ms") for name, value in record.latency_ms.items()]
    curves = {
        name: [(point.removed, point.quality) for point in points if point.quality is not None]
        for name, points in record.curves.items()
    }
    curves = {name: points for name, points in curves.items() if len(points) > 1}
    title = f"{record.model.name}: {'pruned' if record.kind == 'prune' else 'regrouped'}"
    return SurgeryView(
        title=title,
        facts=tuple(facts),
        layers=tuple(
            (
                f"{layer.layer} ({layer.site})",
                f"{layer.q_heads_before} → {layer.q_heads}",
                f"{layer.kv_heads_before} → {layer.kv_heads}",
                ", ".join(map(str, layer.removed))
                or " ".join("+".join(map(str, group)) for group in layer.groups),
            )
            for layer in record.layers
        ),
        chart=quality_chart(title, record.quality_name or "quality", curves) if curves else None,
        notes=record.notes,
    )

"""The attention layers of a model as analysis and surgery see them: their projections by head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.heads._affine import Affine, OutputMap, output_projection_of, projection_of
from mha_export.operands import Heads
from mha_export.recognise import Recognition, Rejection, Site
from mha_export.recognise._evaluate import Context
from mha_export.recognise._region import sizes_of
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why something can't be done to a layer: a stable code and words."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One attention of a model, numbered from 0 among attentions and refused softmaxes.

    Attributes:
        site: None where the softmax was refused; ``refusal`` then says why.
        query, key, value, output: the projections, in float64; None where there is no single
            linear layer to be found, and ``refusal`` says where.
        refusal: why heads can't be removed from this layer, None where they can.
    """

    number: int
    id: str
    site: Site | None
    query: Affine | None = None
    key: Affine | None = None
    value: Affine | None = None
    output: OutputMap | None = None
    refusal: Refusal | None = None
    by_head: Mapping[str, int] = field(default_factory=dict)
    """Mask operands that have a row a head (``bias``, ``keep``, ``score_mask``), and their axis."""

    @property
    def spec(self) -> AttentionSpec:
        return self.known_site.spec

    @property
    def heads(self) -> int:
        """Query heads; 0 where the softmax was refused."""
        return 0 if self.site is None else self.site.spec.q_heads

    @property
    def context(self) -> Heads:
        return self.known_site.output

    @property
    def has_gates(self) -> bool:
        """Whether each head's context can be multiplied by a number."""
        return self.site is not None and self.site.spec.combine == "concat"

    @property
    def known_site(self) -> Site:
        """The site of a layer that was not refused."""
        assert self.site is not None, f"layer {self.number} was refused"
        return self.site


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadModel:
    """A recognised model and its layers. Everything in this package starts from one."""

    recognition: Recognition
    layers: tuple[Layer, ...]

    @property
    def model(self) -> ir.Model:
        """The recogniser's copy: what layers speak of. Never changed by this package."""
        return self.recognition.model

    def layer(self, name: str) -> Layer:
        """By number or by site id.

        Errors:
            InputError: there is none.
        """
        for layer in self.layers:
            if name in (str(layer.number), layer.id):
                return layer
        known = ", ".join(f"{layer.number} ({layer.id})" for layer in self.layers)
        raise InputError(
            f"there is no layer {name}",
            fix=f"the layers are: {known}" if known else "the model has no attention",
        )


def head_model(recognition: Recognition) -> HeadModel:
    """The layers of a recognised model, their projections read off by evaluation."""
    context = Context(recognition.model)
    shared = {site.spec.kv_source for site in recognition.sites}
    layers = []
    verdicts = [v for v in recognition.verdicts if isinstance(v, (Site, Rejection))]
    for number, verdict in enumerate(verdicts):
        if isinstance(verdict, Rejection):
            layers.append(_refused(number, verdict))
        else:
            layers.append(_layer(number, verdict, context, lends=verdict.id in shared))
    return HeadModel(recognition=recognition, layers=tuple(layers))


def _refused(number: int, verdict: Rejection) -> Layer:
    refusal = Refusal(code=verdict.reason.code, message=verdict.reason.message)
    return Layer(number=number, id=verdict.id, site=None, refusal=refusal)


def _layer(number: int, site: Site, context: Context, *, lends: bool) -> Layer:
    operands = site.operands
    found = {
        name: projection_of(getattr(operands, name), context) for name in ("query", "key", "value")
    }
    output = (
        output_projection_of(site.output, context)
        if site.spec.combine == "concat"
        else "the heads are averaged, not concatenated"
    )
    words = [part for part in (*found.values(), output) if isinstance(part, str)]
    refusal = _hindrance(site, context.model.graph, lends=lends)
    if refusal is None and words:
        refusal = Refusal(code="projection", message=words[0])
    return Layer(
        number=number,
        id=site.id,
        site=site,
        refusal=refusal,
        by_head=_masks_by_head(site, context),
        output=None if isinstance(output, str) else output,
        **{name: None if isinstance(part, str) else part for name, part in found.items()},
    )


def _masks_by_head(site: Site, context: Context) -> dict[str, int]:
    """By their sizes: annotations are often missing."""
    operands, heads = site.operands, site.spec.q_heads
    score_mask = None if operands.score_mask is None else operands.score_mask.value
    found = {}
    for name, value in (
        ("keep", operands.keep),
        ("bias", operands.bias),
        ("score_mask", score_mask),
    ):
        sizes = None if value is None else sizes_of(context, value)
        if value is None or sizes is None or heads == 1:
            continue
        shape = context.sized(sizes).shape(value)
        if shape is not None and len(shape) >= 3 and shape[-3] == heads:
            found[name] = len(shape) - 3
    return found


def _hindrance(site: Site, main: ir.Graph, *, lends: bool) -> Refusal | None:
    """What makes a head of this site more than its own slices of the projections."""
    spec = site.spec
    if site.cannot_replace is not None:
        reason = site.cannot_replace
        return Refusal(code=reason.code, message=reason.message)
    if site.graph is not main:
        return Refusal(code="in-a-subgraph", message="it stands in the body of another node")
    checks: Sequence[tuple[bool, str, str]] = (
        (spec.kv_source != "own" or lends, "shared-keys", "its keys are those of another layer"),
        (spec.value_source != "own", "latent-values", "its values are part of its keys"),
        (spec.qk_output is not None, "scores-read", "its scores or weights are an output too"),
        (
            spec.qk_norm is not None and spec.qk_norm.over == "hidden",
            "norm-over-heads",
            "a norm goes over the channels of all heads, so a head is not alone",
        ),
    )
    return next((Refusal(code=code, message=words) for wrong, code, words in checks if wrong), None)

"""The proof of one replacement, on adversarial inputs, against the oracle and the original.

Both the nodes a site covers and the emission that is to take their place are cut out as small
models over the same inputs: the bound operands, and whatever else they read (an
``attention_mask`` from which the original builds its mask, shapes). Masks are built by the graph,
so what is proven is not only the arithmetic but that the spec says what those nodes do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.bounds import (
    ErrorBounds,
    Judgement,
    copy_floor,
    error_bounds,
    judge,
    numpy_dtype,
    score_bounds,
)
from mha_export.cases import Battery, Case, cases
from mha_export.errors import MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.oracle import OracleResult, attention
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import with_values
from mha_export.rewrite._emit import emit_site
from mha_export.rewrite._feeds import (
    HEADS,
    PLAIN,
    ROOT,
    WEIGHTS,
    Feeder,
    Feeds,
    UnfeedableError,
    input_dtype,
    to_bhsd,
)
from mha_export.rewrite._outcome import Choice, Proof, ProofCase, RewriteSettings
from mha_export.rewrite._sizes import SizedSite, sized_sites
from mha_export.rewrite._slice import Slice, as_graph, backward_slice
from mha_export.rewrite._structure import structure_key
from mha_export.spec import AttentionSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Exhibit:
    """A site cut out of its graph: the original nodes, and what a replacement would read.

    Attributes:
        original: slice that computes the site's own outputs.
        operands: slice that computes the bound operands.
        stops: inputs of either. cuts: those that are operands, by name.
        outputs: the site's values by role.
    """

    site: Site
    original: Slice
    operands: Slice
    stops: tuple[ir.Value, ...]
    shape_only: frozenset[ir.Value]
    cuts: Mapping[ir.Value, str]
    outputs: Mapping[str, ir.Value]


def exhibit(site: Site, context: Context) -> Exhibit:
    """Cut ``site`` out; operands that the slices leak around are computed inside instead."""
    outputs = {"output": site.output.value}
    if site.qk_output is not None:
        outputs["qk_output"] = site.qk_output
    if site.present_key is not None:
        outputs["present_key"] = site.present_key.value
    if site.present_value is not None:
        outputs["present_value"] = site.present_value.value
    cuts = _operand_cuts(site)
    while True:
        original = backward_slice(
            tuple(outputs.values()), cuts=cuts, inside=site.nodes, context=context
        )
        bound = tuple(dict.fromkeys(value for _, value in site.operands.values()))
        operands = backward_slice(bound, cuts=cuts, inside=(), context=context)
        stops = tuple(dict.fromkeys([*original.stops, *operands.stops]))
        shape_only = (original.shape_only | operands.shape_only) - {
            value
            for part in (original, operands)
            for value in part.stops
            if value not in part.shape_only
        }
        leaking = _leaking(cuts, original, shape_only, context)
        if not leaking:
            break
        cuts = {value: name for value, name in cuts.items() if value not in leaking}
        cuts.update(_weight_roots(leaking, site, original))
    return Exhibit(
        site=site,
        original=original,
        operands=operands,
        stops=stops,
        shape_only=shape_only,
        cuts={value: name for value, name in cuts.items() if value in stops},
        outputs=outputs,
    )


def _operand_cuts(site: Site) -> dict[ir.Value, str]:
    cuts: dict[ir.Value, str] = {}
    for name in HEADS:
        heads = getattr(site.operands, name)
        if heads is not None:
            cuts.setdefault(heads.value, name)
    for name in PLAIN:
        value = getattr(site.operands, name)
        if value is not None:
            cuts.setdefault(value, name)
    return cuts


def _leaking(
    cuts: Mapping[ir.Value, str],
    original: Slice,
    shape_only: frozenset[ir.Value],
    context: Context,
) -> set[ir.Value]:
    """Cut values that the original does not read, or whose own sources it reads by another way too.

    Feeding both would be feeding two truths: such an operand is computed inside the slices.
    """
    others = {v for v in original.stops if v not in cuts and v not in shape_only}
    leaking = set()
    for value in cuts:
        sources = context.sources(value)
        derived = value.producer() is not None and value not in original.stops
        if sources != frozenset({value}) and (sources & others or derived):
            leaking.add(value)
    return leaking


def _weight_roots(leaking: set[ir.Value], site: Site, original: Slice) -> dict[ir.Value, str]:
    """The initializers that derived sinks and norm weights come from: cut there instead.

    Left in, every layer would be a structure of its own, and zero sinks would prove nothing.
    """
    roots: dict[ir.Value, str] = {}
    for name in WEIGHTS:
        value = getattr(site.operands, name)
        if value is None or value not in leaking:
            continue
        node = value.producer()
        while node is not None and node.op_type in ("Identity", "Reshape", "Squeeze", "Unsqueeze"):
            source = node.inputs[0]
            if source is not None and source in original.initializers:
                roots[source] = f"{ROOT}{name}"
            node = None if source is None else source.producer()
    return roots


class Prover:
    """Proves replacements of the sites of one model; equal structures are proven once."""

    def __init__(self, context: Context, evaluator: Evaluator, settings: RewriteSettings) -> None:
        self._context = context
        self._evaluator = evaluator
        self._settings = settings
        self._known: dict[str, tuple[str, Proof]] = {}
        self.sizes: list[Mapping[str, int]] = []
        """Choices of sizes at which some site was run, the first ones found."""

    @property
    def engine(self) -> str:
        return self._evaluator.name

    def prove(self, site: Site, choice: Choice) -> Proof:
        """The proof that ``choice`` may take the site's place; its status says whether it may."""
        shown = exhibit(site, self._context)
        key = structure_key(site, choice, shown.original, shown.operands, shown.cuts)
        known = self._known.get(key)
        if known is not None:
            representative, proof = known
            return dataclasses.replace(
                proof, representative=representative, weights="structural", by_case=()
            )
        try:
            proof = self._run(shown, choice)
        except UnfeedableError as error:
            proof = self._failed(f"the site cannot be run on its own: {error}")
        self._known[key] = (site.id, proof)
        return proof

    def _failed(self, reason: str) -> Proof:
        return Proof(engine=self._evaluator.name, against=(), status="fail", reason=reason)

    def _run(self, shown: Exhibit, choice: Choice) -> Proof:
        sizes = sized_sites(shown.site, self._context)
        if not sizes:
            return self._failed("no lengths were found at which the site's operands fit together")
        if len(self.sizes) < len(sizes):
            self.sizes = [sized.numbers for sized in sizes]
        original = self._model(shown, _original_graph(shown))
        try:
            emitted = _replacement_graph(shown, choice)
        except ValueError as error:
            return self._failed(f"form {choice.form.name} could not be emitted: {error}")
        replacement = self._model(shown, emitted)
        trial = _Trial(self._evaluator, shown.site, original, replacement)
        for index, sized in enumerate(sizes):
            feeder = Feeder(
                shown.site,
                sized,
                self._context,
                stops=shown.stops,
                shape_only=shown.shape_only,
                cuts=shown.cuts,
            )
            for case in self._cases(shown.site, sized, index):
                trial.add(case, feeder.feeds(case), index)
                if trial.is_decided:
                    return trial.verdict()
        return trial.verdict()

    def _cases(self, site: Site, sized: SizedSite, index: int) -> Iterator[Case]:
        """The whole battery at the first lengths; less at the others, which test lengths."""
        tiers: tuple[Battery, ...] = (self._settings.battery, "ordinary", "quick")
        battery = tiers[min(index, 2)]
        return cases(
            _spec_at(site, sized), seed=self._settings.seed, dims=sized.dims, battery=battery
        )

    def _model(self, shown: Exhibit, graph: ir.Graph) -> ir.Model:
        source = self._context.model
        graph.opset_imports.update({**source.graph.opset_imports, **graph.opset_imports})
        io_dtype = numpy_dtype(shown.site.spec.io_dtype)
        stops = {stop.name: stop for stop in shown.stops}
        for value in graph.inputs:
            stop = stops[value.name]
            dtype = input_dtype(stop, shown.cuts.get(stop), io_dtype)
            value.type = ir.TensorType(ir.DataType.from_numpy(dtype))
        return ir.Model(
            graph,
            ir_version=source.ir_version,
            functions=[function.clone() for function in source.functions.values()],
        )


def _spec_at(site: Site, sized: SizedSite) -> AttentionSpec:
    """The spec with the lengths left open, and masks of the shapes they have at these sizes."""
    shapes: dict[str, Any] = {}
    for name in ("keep", "bias"):
        value = getattr(site.operands, name)
        shape = None if value is None else sized.view.shape(value)
        if shape is not None and getattr(site.spec.mask, name) is not None:
            shapes[name] = (1,) * (1 - len(shape)) + shape
    mask = dataclasses.replace(site.spec.mask, **shapes)
    return site.spec.replace(batch="batch", q_len="q_len", kv_len="kv_len", mask=mask)


def _original_graph(shown: Exhibit) -> ir.Graph:
    graph, values = as_graph(shown.original)
    _name_outputs(graph, dict(zip(shown.outputs, values, strict=True)))
    return graph


def _replacement_graph(shown: Exhibit, choice: Choice) -> ir.Graph:
    graph, values = as_graph(shown.operands)
    mapping = dict(zip(shown.operands.targets, values, strict=True))
    operands = with_values(shown.site.operands, mapping)
    emission = emit_site(shown.site, choice, operands, prefix=f"{shown.site.id}.new")
    for value in emission.initializers:
        graph.register_initializer(value)
    graph.extend(emission.nodes)
    for domain in {node.domain for node in emission.nodes} - {""}:
        graph.opset_imports.setdefault(domain, 1)
    new = {id(old): value for old, value in emission.replacements}
    _name_outputs(graph, {role: new[id(old)] for role, old in shown.outputs.items()})
    return graph


def _name_outputs(graph: ir.Graph, outputs: Mapping[str, ir.Value]) -> None:
    """Give the graph outputs named by role, each behind an Identity of its own."""
    for role, value in outputs.items():
        node = ir.node("Identity", [value])
        node.outputs[0].name = f"proof.{role}"
        node.outputs[0].type = value.type
        node.name = f"proof.{role}"
        graph.append(node)
        graph.outputs.append(node.outputs[0])


class _Trial:
    """Case after case through both models, and the judgements so far."""

    def __init__(
        self, evaluator: Evaluator, site: Site, original: ir.Model, replacement: ir.Model
    ) -> None:
        self._evaluator = evaluator
        self._site = site
        self._original: ir.Model | None = original
        self._replacement = replacement
        self._cases: list[ProofCase] = []
        self._failure: str | None = None
        self._note: str | None = None
        self._against_original = 0

    @property
    def is_decided(self) -> bool:
        return self._failure is not None

    def add(self, case: Case, feeds: Feeds, size_index: int) -> None:
        exact = attention(feeds.spec, feeds.inputs)
        bounds = _bounds(self._site, feeds, exact)
        try:
            actual = self._outputs(self._replacement, feeds)
        except MhaExportError as error:
            self._failure = f"the replacement does not run: {error}"
            return
        expected = self._original_outputs(feeds)
        name = case.name if size_index == 0 else f"{case.name}@{size_index + 1}"
        judgements = []
        for role, (want, rows) in bounds.items():
            found = judge(actual[role], want, rows.ensemble, rows.floor, coarse=rows.coarse)
            found = _tolerating_overflow(found, actual[role], want, rows)
            judgements.append((f"{role} against the oracle", found))
            if expected is None:
                continue
            own = judge(expected[role], want, rows.ensemble, rows.floor, coarse=rows.coarse)
            own = _tolerating_overflow(own, expected[role], want, rows)
            if own.status == "fail":
                self._failure = (
                    f"case {name}: the original graph does not compute this spec: {role}: "
                    f"{own.reason}"
                )
            twice = judge(
                actual[role], expected[role], 2 * rows.ensemble, 2 * rows.floor, coarse=rows.coarse
            )
            twice = _tolerating_overflow(twice, actual[role], want, rows)
            judgements.append((f"{role} against the original", twice))
        if expected is not None:
            self._against_original += 1
        self._record(name, judgements)

    def _record(self, name: str, judgements: Sequence[tuple[str, Judgement]]) -> None:
        what, worst = max(judgements, key=lambda pair: _severity(pair[1]))
        self._cases.append(
            ProofCase(
                name=name,
                status=worst.status,
                max_err=worst.factor * worst.bound if worst.bound else worst.max_abs,
                bound=worst.bound,
                reason=worst.reason,
            )
        )
        if worst.status == "fail" and self._failure is None:
            self._failure = f"case {name}: {what}: {worst.reason}"

    def _outputs(self, model: ir.Model, feeds: Feeds) -> dict[str, np.ndarray]:
        arrays = {value.name or "": array for value, array in feeds.arrays.items()}
        needed = {value.name for value in model.graph.inputs}
        found = self._evaluator.run(
            model, {name: array for name, array in arrays.items() if name in needed}
        )
        return {
            role: self._canonical(role, found[f"proof.{role}"])
            for role in (name.removeprefix("proof.") for name in found)
        }

    def _canonical(self, role: str, array: np.ndarray) -> np.ndarray:
        heads = getattr(self._site, role, None)
        if role == "qk_output":
            return array[..., None]  # every score is a row of its own
        if role == "output" and self._site.spec.combine == "mean":
            return array
        assert heads is not None
        return to_bhsd(array, heads)

    def _original_outputs(self, feeds: Feeds) -> dict[str, np.ndarray] | None:
        if self._original is None:
            return None
        try:
            return self._outputs(self._original, feeds)
        except MhaExportError as error:
            self._note = f"the original does not run here: {error}"
            self._original = None
            return None

    def verdict(self) -> Proof:
        against = ("oracle", "original") if self._against_original else ("oracle",)
        worst = max(self._cases, key=_case_severity, default=None)
        status = "fail" if self._failure or worst is None else worst.status
        if any(case.status == "imprecise" for case in self._cases) and status != "fail":
            status = "imprecise"
        reason = self._failure or self._note
        if worst is None and reason is None:
            reason = "the battery has no case at any length that fits"
        return Proof(
            engine=self._evaluator.name,
            against=against if self._cases else (),
            status=status,
            cases=len(self._cases),
            max_err=None if worst is None else worst.max_err,
            bound=None if worst is None else worst.bound,
            by_case=tuple(self._cases),
            reason=reason,
        )


def _severity(found: Judgement) -> tuple[int, float]:
    return ("pass", "imprecise", "fail").index(found.status), found.factor


def _case_severity(case: ProofCase) -> tuple[int, float]:
    share = case.max_err / case.bound if case.bound else case.max_err
    return ("pass", "imprecise", "fail").index(case.status), share


def _bounds(
    site: Site, feeds: Feeds, exact: OracleResult
) -> dict[str, tuple[np.ndarray, ErrorBounds]]:
    """By role: the exact array, and the bounds of its rows."""
    spec = feeds.spec
    found = {"output": (exact.output, error_bounds(spec, feeds.inputs, exact))}
    if site.qk_output is not None and spec.qk_output is not None:
        scores = exact.scores(spec.qk_output)
        rows = score_bounds(spec, feeds.inputs, exact, spec.qk_output)
        found["qk_output"] = (scores[..., None], rows)
    for role in ("present_key", "present_value"):
        array = getattr(exact, role)
        if getattr(site, role) is not None and array is not None:
            floor = copy_floor(spec, array)
            found[role] = (
                array,
                ErrorBounds(
                    ensemble=np.zeros_like(floor),
                    floor=floor,
                    coarse=np.zeros_like(floor),
                    overflow=np.zeros(floor.shape, dtype=bool),
                ),
            )
    return found


def _tolerating_overflow(
    found: Judgement, actual: np.ndarray, want: np.ndarray, rows: ErrorBounds
) -> Judgement:
    """The judgement of the rows that some plain implementation of this precision can do at all."""
    if found.status != "fail" or not np.any(rows.overflow) or actual.shape != want.shape:
        return found
    usable = ~np.broadcast_to(rows.overflow, want.shape[:-1])
    if not np.any(usable):
        return dataclasses.replace(found, status="pass", reason=None, factor=0.0, nan_mismatch=0)
    return judge(
        actual[usable],
        want[usable],
        np.broadcast_to(rows.ensemble, usable.shape)[usable],
        np.broadcast_to(rows.floor, usable.shape)[usable],
        coarse=np.broadcast_to(rows.coarse, usable.shape)[usable],
    )

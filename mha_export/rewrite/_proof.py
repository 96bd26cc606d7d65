"""The proof of one replacement, on adversarial inputs, against the oracle and the original.

Both the nodes a site covers and the emission that is to take their place are cut out as small
models over the same inputs: the bound operands, and whatever else they read (an
``attention_mask`` from which the original builds its mask, shapes). Masks are built by the graph,
so what is proven is not only the arithmetic but that the spec says what those nodes do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from mha_export.bounds import numpy_dtype
from mha_export.cases import Battery, Case, cases
from mha_export.errors import InputError, MhaExportError
from mha_export.evaluator import Evaluator
from mha_export.recognise import Site
from mha_export.recognise._evaluate import Context
from mha_export.rewrite._clone import with_values
from mha_export.rewrite._emit import emit_site
from mha_export.rewrite._exhibit import Exhibit, exhibit
from mha_export.rewrite._feeds import Feeder, UnfeedableError, input_dtype
from mha_export.rewrite._outcome import Choice, Proof, RewriteSettings
from mha_export.rewrite._sizes import SizedSite, fixed_lengths, long_site, sized_sites
from mha_export.rewrite._slice import as_graph
from mha_export.rewrite._structure import structure_key
from mha_export.rewrite._trial import Trial
from mha_export.rewrite._twin import judge_twin, small_twin
from mha_export.spec import AttentionSpec


class Prover:
    """Proves replacements of the sites of one model; equal structures are proven once.

    Args:
        evaluators: the engine, and what stands in where it cannot run the original.
        known_sizes: numbers for the symbols that fit the graph.
    """

    def __init__(
        self,
        context: Context,
        evaluators: Sequence[Evaluator],
        settings: RewriteSettings,
        *,
        known_sizes: Sequence[Mapping[str, int]] = (),
    ) -> None:
        self._context = context
        self._known_sizes = known_sizes
        self._evaluators = evaluators
        self._evaluator = evaluators[0]
        self._settings = settings
        self._known: dict[str, tuple[str, Proof]] = {}
        self.sizes: list[Mapping[str, int]] = []
        """Choices of sizes at which some site was run, the first ones found."""
        self.fixed_lengths: dict[str, int] = {}
        """Symbols of the graph inputs at whose one number alone some site can be run."""

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
        except InputError as error:
            proof = self._failed(f"no inputs can be made for it: {error.what}")
        self._known[key] = (site.id, proof)
        return proof

    def _failed(self, reason: str) -> Proof:
        return Proof(engine=self._evaluator.name, against=(), status="fail", reason=reason)

    def _run(self, shown: Exhibit, choice: Choice) -> Proof:
        sizes = sized_sites(shown.site, self._context, known=self._known_sizes)
        if not sizes:
            return self._failed("no lengths were found at which the site's operands fit together")
        if len(self.sizes) < len(sizes):
            self.sizes = [sized.numbers for sized in sizes]
        self.fixed_lengths |= fixed_lengths(shown.site, self._context, sizes[0])
        original = self._model(shown, _original_graph(shown))
        try:
            emitted, functions = _replacement_graph(shown, choice)
        except ValueError as error:
            return self._failed(f"form {choice.form.name} could not be emitted: {error}")
        replacement = self._model(shown, emitted, functions)
        trial = Trial(self._evaluators, shown.site, original, replacement)
        for index, sized in enumerate(sizes):
            feeder = self._feeder(shown, sized)
            for case in self._cases(shown.site, sized, index):
                trial.add(case, feeder.feeds(case), at=f"@{index + 1}" if index else "")
                if trial.is_decided:
                    return trial.verdict()
        self._add_long(shown, sizes[0], trial)
        if not trial.is_decided:
            self._add_twin(shown.site, choice, sizes, trial)
        return trial.verdict()

    def _add_long(self, shown: Exhibit, first: SizedSite, trial: Trial) -> None:
        """Lengths at which a kernel may be another, where the graph goes on to them."""
        sized = long_site(shown.site, self._context, first)
        if sized is None:
            return
        feeder = self._feeder(shown, sized)
        for case in cases(
            _spec_at(shown.site, sized),
            seed=self._settings.seed,
            dims=sized.dims,
            battery="quick",
        ):
            try:
                feeds = feeder.feeds(case)
            except UnfeedableError:
                return
            if not trial.runs(feeds):
                return
            trial.add(case, feeds, at="@long")
            if trial.is_decided:
                return

    def _feeder(self, shown: Exhibit, sized: SizedSite) -> Feeder:
        return Feeder(
            shown.site,
            sized,
            self._context,
            stops=shown.stops,
            shape_only=shown.shape_only,
            cuts=shown.cuts,
        )

    def _add_twin(
        self, site: Site, choice: Choice, sizes: Sequence[SizedSite], trial: Trial
    ) -> None:
        """Windows beyond every length above are judged on a small twin of the attention."""
        twin = small_twin(site.spec, reach=max(sized.t for sized in sizes) - 2)
        if twin is None:
            return
        try:
            for name, found in judge_twin(twin, choice, self._evaluator, seed=self._settings.seed):
                trial.record(name, [("output against the oracle", found)])
        except MhaExportError as error:
            trial.note(f"its window was not reached, and no small one can be tried: {error}")

    def _cases(self, site: Site, sized: SizedSite, index: int) -> Iterator[Case]:
        """The whole battery at the first lengths; less at the others, which test lengths."""
        tiers: tuple[Battery, ...] = (self._settings.battery, "ordinary", "quick")
        battery = tiers[min(index, 2)]
        return cases(
            _spec_at(site, sized), seed=self._settings.seed, dims=sized.dims, battery=battery
        )

    def _model(
        self, shown: Exhibit, graph: ir.Graph, functions: Iterable[ir.Function] = ()
    ) -> ir.Model:
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
            functions=[*(function.clone() for function in source.functions.values()), *functions],
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


def _replacement_graph(shown: Exhibit, choice: Choice) -> tuple[ir.Graph, Collection[ir.Function]]:
    graph, values = as_graph(shown.operands)
    mapping = dict(zip(shown.operands.targets, values, strict=True))
    operands = with_values(shown.site.operands, mapping)
    emission = emit_site(shown.site, choice, operands, prefix=f"{shown.site.id}.new")
    for value in emission.initializers:
        graph.register_initializer(value)
    graph.extend(emission.nodes)
    for domain in sorted({node.domain for node in emission.nodes} - {""}):
        graph.opset_imports.setdefault(domain, 1)
    new = {id(old): value for old, value in emission.replacements}
    _name_outputs(graph, {role: new[id(old)] for role, old in shown.outputs.items()})
    return graph, emission.functions.values()


def _name_outputs(graph: ir.Graph, outputs: Mapping[str, ir.Value]) -> None:
    """Give the graph outputs named by role, each behind an Identity of its own."""
    for role, value in outputs.items():
        node = ir.node("Identity", [value])
        node.outputs[0].name = f"proof.{role}"
        node.outputs[0].type = value.type
        node.name = f"proof.{role}"
        graph.append(node)
        graph.outputs.append(node.outputs[0])

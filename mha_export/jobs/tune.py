"""Measure every legal form of every attention on one target, and write the fastest as a plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mha_export.errors import InputError
from mha_export.frontends import LoadedModel, open_source
from mha_export.jobs._casting import cast_model
from mha_export.jobs._defaults import opset_for
from mha_export.jobs._phases import Graph, plan_name
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import CANNOT_RUN, FAILED, OK, JobResult
from mha_export.jobs._settings import RunSettings, SourceSettings
from mha_export.jobs._store import check_file
from mha_export.measure.machine import machine_record
from mha_export.measure.model_inputs import workload_sizes
from mha_export.measure.tuning import SPENT, Tried, Way, lengths_at, try_ways, ways
from mha_export.recognise import Site, recognise
from mha_export.report.records import validate, write_json
from mha_export.spec import AttentionSpec
from mha_export.targets import TargetRequest, Unavailable, capabilities_for, parse_target

SCHEMA_VERSION = "1.0"
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What a tuning is asked for.

    Attributes:
        run: workloads, seed, and whether to be quick; nothing else of it.
        budget: seconds to spend, reading the model and building included; None for as long as it
            takes.
    """

    run: RunSettings
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and not self.budget > 0:
            raise InputError(f"--budget {self.budget}: not a time", fix="give seconds above 0")
        run = self.run
        if run != RunSettings(workloads=run.workloads, seed=run.seed, quick=run.quick):
            raise InputError(
                "a tuning reads workloads, seed and quick of its run settings, and nothing else",
                fix="leave the others out; the budget of a tuning is TuneSettings(budget=...)",
            )


def tune_model(
    source: Any,
    *,
    target: str,
    output: str | Path,
    source_settings: SourceSettings | None = None,
    settings: TuneSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Time the legal forms of every site at every workload, and write a plan of the fastest.

    Where workloads of one query and of more were asked for, the plan has a row for each graph of
    ``--split prefill-decode`` beside the one that serves all.

    Sites of one structure are measured once. The file is written after every measurement, and what
    it holds of the same model, target, machine and versions is not measured again.

    Returns:
        The plan, as ``export --plan`` takes it. ``exit_code`` 1: nothing could be timed; 3: the
        target cannot run here.

    Errors:
        InputError: bad source, target, sizes or budget; a model without a replaceable attention;
            an ``output`` that is there and is no plan.
    """
    started = time.monotonic()
    source_settings = source_settings or SourceSettings()
    settings = settings or TuneSettings(run=RunSettings())
    request = parse_target(target)
    output = Path(output)
    check_file(output, source=source)
    earlier = _earlier(output)
    state = request.target.availability().run
    if isinstance(state, Unavailable):
        document = _document(request, "", {}, {})
        return JobResult(
            document=document,
            exit_code=CANNOT_RUN,
            notices=(f"{target} cannot run here: {state.reason}; {state.fix}",),
        )
    progress("reading the model")
    loaded = open_source(source, source_settings.for_frontend())
    model = cast_model(loaded.model, source_settings.dtype, progress)
    progress("recognising attention")
    sites = [site for site in recognise(model).sites if site.replaceable]
    if not sites:
        raise InputError(
            f"{loaded.name} has no attention that may be replaced",
            fix="mha-export inspect says why, for every softmax",
        )
    opset = source_settings.opset or opset_for(
        request.target.name,
        request.target.default_forms,
        [site.spec for site in sites],
        own=int(model.graph.opset_imports.get("", 1)),
        most=request.target.max_opset,
    )
    sizes = [
        workload_sizes(model, dims=workload.dims, shapes=workload.shapes)
        for workload in settings.run.workloads
    ]
    tuner = _Tuner(request, opset, settings, output, loaded, progress, sizes, started, earlier)
    document, notices = tuner.tune(_grouped(sites))
    chosen = any(document["targets"].values())
    return JobResult(
        document=document,
        exit_code=OK if chosen else FAILED,
        notices=tuple(notices),
        files=(output,),
    )


def _earlier(output: Path) -> Row:
    """The plan in ``output``, to go on with; empty without one.

    Errors:
        InputError: another file is there: it is somebody's, and hours may be in it.
    """
    if not output.exists() or output.stat().st_size == 0:
        return {}
    try:
        document = json.loads(output.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        document = None
    if not isinstance(document, dict) or not isinstance(document.get("targets"), dict):
        raise InputError(
            f"{output} is there, and is no plan that could be gone on with",
            fix="choose another -o, or remove the file",
        )
    return document


def _grouped(sites: Sequence[Site]) -> dict[AttentionSpec, list[str]]:
    """Site ids by what they state: weights and neighbours apart, equal sites are one."""
    found: dict[AttentionSpec, list[str]] = {}
    for site in sites:
        found.setdefault(site.spec.replace(kv_source="own"), []).append(site.id)
    return found


class _Tuner:
    """One tuning under way; ``rows`` is all that has been measured."""

    def __init__(
        self,
        request: TargetRequest,
        opset: int,
        settings: TuneSettings,
        output: Path,
        loaded: LoadedModel,
        progress: Progress,
        sizes: Sequence[Mapping[str, int]],
        started: float,
        earlier: Row,
    ) -> None:
        self._sizes = sizes
        self._request = request
        self._opset = opset
        self._settings = settings
        self._output = output
        self._loaded = loaded
        self._progress = progress
        self._started = started
        self._earlier = earlier
        self._capabilities = capabilities_for(request.target, request.precision)
        self._rows: dict[str, list[Row]] = {}

    def tune(self, groups: Mapping[AttentionSpec, list[str]]) -> tuple[Row, list[str]]:
        chosen: dict[str, dict[str, Row]] = {plan_name(self._request.target.name, "main"): {}}
        notices: list[str] = []
        known = self._known()
        left = len(groups) * len(self._sizes)
        for spec, ids in groups.items():
            rows: list[Row] = []
            for lengths in self._lengths(spec):
                earlier = [row for row in known if row["site"] in ids and row["lengths"] == lengths]
                rows += earlier or self._measured(spec, ids[0], lengths, self._share(left))
                left -= 1
                self._rows[ids[0]] = rows
                self._write(chosen)
            spent = dict.fromkeys(_words(row["lengths"]) for row in rows if row["problem"] == SPENT)
            if spent:
                notices.append(f"{ids[0]}: not timed at {'; '.join(spent)}: {SPENT}")
            for graph, own in _by_graph(rows).items():
                if best := _fastest(own):
                    row = chosen.setdefault(plan_name(self._request.target.name, graph), {})
                    row |= dict.fromkeys(ids, best)
            if not any(row.get("latency_ms") for row in rows):
                notices.append(f"{ids[0]}: {len(ids)} sites: nothing could be timed: {_why(rows)}")
            self._write(chosen)
        return self._write(chosen), notices

    def _lengths(self, spec: AttentionSpec) -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        for sizes in self._sizes:
            lengths = lengths_at(spec, sizes)
            if lengths not in found:
                found.append(lengths)
        return found

    def _share(self, left: int) -> float | None:
        budget = self._settings.budget
        if budget is None:
            return None
        return (budget - (time.monotonic() - self._started)) / max(left, 1)

    def _measured(
        self, spec: AttentionSpec, site: str, lengths: dict[str, int], seconds: float | None
    ) -> list[Row]:
        if seconds is not None and seconds <= 0:
            return [{"site": site, "lengths": lengths, "problem": SPENT}]
        wanted = ways(
            spec,
            opset=self._opset,
            q_len=lengths["q_len"],
            veto=self._capabilities.refusal,
            told=self._request.target.form_options,
        )
        self._progress(f"{site}: timing {len(wanted)} ways at {_words(lengths)}")
        tried = try_ways(
            spec,
            wanted,
            target=self._request.target.name,
            precision=self._request.precision,
            opset=self._opset,
            lengths=lengths,
            seconds=seconds,
            quick=self._settings.run.quick,
            seed=self._settings.run.seed,
        )
        return [_row(site, lengths, one) for one in tried]

    def _known(self) -> list[Row]:
        """What an earlier, perhaps broken off, run wrote of the very same question."""
        if self._earlier.get("question") != self._question():
            return []
        rows = self._earlier.get("measured", [])
        # Ways are compared with one another: a workload that was cut short is measured anew.
        cut = [(row["site"], row["lengths"]) for row in rows if row["problem"] == SPENT]
        return [row for row in rows if (row["site"], row["lengths"]) not in cut]

    def _question(self) -> Row:
        availability = self._request.target.availability()
        run = self._settings.run
        return {
            "model_sha256": self._loaded.sha256,
            "target": self._request.name,
            "opset": self._opset,
            "runtime": availability.runtime,
            "runtime_version": availability.version,
            "machine": machine_record().id,
            "quick": run.quick,
            "seed": run.seed,
        }

    def _write(self, chosen: Mapping[str, Mapping[str, Row]]) -> Row:
        document = _document(self._request, self._loaded.sha256, self._question(), chosen)
        document["model"] = self._loaded.name
        document["measured"] = [row for rows in self._rows.values() for row in rows]
        validate("plan", document)
        write_json(self._output, document)
        return document


def _document(
    request: TargetRequest, sha256: str, question: Row, chosen: Mapping[str, Mapping[str, Row]]
) -> Row:
    return {
        "schema_version": SCHEMA_VERSION,
        "model_sha256": sha256,
        "machine": machine_record().to_json(),
        "question": question,
        "targets": {request.target.name: {}} | {name: dict(row) for name, row in chosen.items()},
        "measured": [],
    }


def _row(site: str, lengths: Mapping[str, int], one: Tried) -> Row:
    row: Row = {
        "site": site,
        "lengths": dict(lengths),
        "form": one.way.form,
        "params": dict(one.way.options),
        "problem": one.problem,
        "latency_ms": None,
        "vs": None,
    }
    timing = one.timing
    if timing is not None and timing.latency is not None:
        row["latency_ms"] = timing.latency.to_json()
        row["vs"] = None if timing.vs is None else timing.vs.to_json()
    return row


def _fastest(rows: Sequence[Row]) -> Row | None:
    """The way whose times, each as a share of the best of its workload, add up to the least."""
    best: dict[str, float] = {}
    totals: dict[str, list[float]] = {}
    timed = [row for row in rows if row.get("latency_ms")]
    for row in timed:
        where = _words(row["lengths"])
        best[where] = min(best.get(where, float("inf")), row["latency_ms"]["p50"])
    for row in timed:
        share = row["latency_ms"]["p50"] / best[_words(row["lengths"])]
        totals.setdefault(_name(row), []).append(share)
    complete = {name: sum(parts) for name, parts in totals.items() if len(parts) == len(best)}
    if not complete:
        return None
    winner = min(complete, key=lambda name: complete[name])
    row = next(row for row in timed if _name(row) == winner)
    return {"form": row["form"], "params": row["params"]}


def _by_graph(rows: Sequence[Row]) -> dict[Graph, list[Row]]:
    """All rows, and those of one query and of more apart where there are both."""
    one = [row for row in rows if row["lengths"]["q_len"] == 1]
    more = [row for row in rows if row["lengths"]["q_len"] != 1]
    found: dict[Graph, list[Row]] = {"main": list(rows)}
    return found | ({"prefill": more, "decode": one} if one and more else {})


def _name(row: Row) -> str:
    return Way(form=row["form"], options=row["params"]).name


def _why(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(str(row["problem"]) for row in rows if row["problem"])) or "-"


def _words(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in lengths.items())

"""From an export folder to what an app embeds."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from mha_export import __version__
from mha_export.bundle import (
    MANIFEST,
    Manifest,
    VariantEntry,
    bundle_readme,
    describe_interface,
    genai_config,
    hash_files,
    make_answers,
    options_of,
    preference,
    read_manifest,
    runs_on,
    write_examples,
    write_manifest,
    write_zip,
)
from mha_export.bundle._files import names_in
from mha_export.bundle._genai import read_config
from mha_export.bundle._generation import greedy_continuation
from mha_export.bundle._mobile import write_mobile
from mha_export.decode import CacheLayout
from mha_export.errors import InputError
from mha_export.jobs._export_folder import ExportFolder, open_export
from mha_export.jobs._progress import Progress, silent
from mha_export.jobs._result import JobResult
from mha_export.jobs._store import (
    PORTABLE,
    WEIGHTS,
    check_file,
    check_folder,
    staged_file,
    staged_folder,
    write_models,
)
from mha_export.jobs.inspect import count_nodes
from mha_export.report.records import VariantRecord
from mha_export.targets._capabilities import shipped

MODEL = "model"
_ATTENTION = frozenset(
    {"Attention", "MultiHeadAttention", "GroupQueryAttention", "MatMul", "Softmax"}
)
"""Ops that compute attention; what prepares a mask or a shape may stay on the CPU."""
LICENSES = "licenses"


@dataclass(frozen=True, kw_only=True)
class BundleSettings:
    """What a bundle is asked for beyond the export it is made of.

    Attributes:
        targets: variants to take; none: all. ``portable`` is always taken.
        single_files: targets of which there is also a graph with its weights inside.
        mobile: also ORT format, for mobile builds.
        genai: ``config.json`` of the decoder: also a configuration for onnxruntime-genai.
        licenses: files to carry along.
        archive: also a ``.zip`` beside the folder.
    """

    targets: tuple[str, ...] = ()
    single_files: tuple[str, ...] = ()
    mobile: bool = False
    genai: Path | None = None
    licenses: tuple[Path, ...] = ()
    archive: bool = False
    seed: int = 0


def bundle_export(
    export_dir: str | Path,
    *,
    out: str | Path,
    settings: BundleSettings | None = None,
    progress: Progress = silent,
) -> JobResult:
    """Make a bundle of the export in ``export_dir``.

    ``out`` is a folder, or a ``.zip``. It is complete or untouched, and equal exports give equal
    bytes.

    Returns:
        The manifest as a document.

    Errors:
        InputError: not an export folder, a target it holds no graph for, or a file that cannot be
            read or written.
    """
    settings = settings or BundleSettings()
    out, source = Path(out), Path(export_dir)
    as_zip = out.suffix == ".zip"
    (check_file if as_zip else _check_new_folder)(out)
    maker = _Maker(source, settings, progress)
    with tempfile.TemporaryDirectory(prefix="mha_export-bundle-") as scratch:
        maker.read(Path(scratch))
        if as_zip:
            built = Path(scratch) / "bundle"
            built.mkdir()
            manifest = maker.write(built)
            with staged_file(out) as stage:
                write_zip(built, stage)
            files = [out]
        else:
            with _replaced(out) as stage:
                manifest = maker.write(stage)
            files = [out]
            if settings.archive:
                with staged_file(out.with_name(f"{out.name}.zip")) as stage:
                    write_zip(out, stage)
                files.append(out.with_name(f"{out.name}.zip"))
    return JobResult(document=manifest.to_json(), notices=tuple(maker.notices), files=tuple(files))


def _check_new_folder(out: Path) -> None:
    check_folder(out)
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        known = {MANIFEST, *read_manifest(out).files}
    except InputError:
        known = set()
    if stranger := next((name for name in names_in(out) if name not in known), None):
        raise InputError(
            f"{out} holds other files ({stranger}); expected an empty folder, a new one, or an "
            "earlier bundle with nothing added",
            fix="choose another -o, or remove it",
        )


@contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """An empty sibling folder that takes the place of ``out`` when the block ends without error."""
    old = out.with_name(f".{out.name}.partial-{os.getpid()}.old")
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # of a run that was killed
    with staged_folder(fresh) as stage:
        yield stage
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)


class _Maker:
    """The steps of one bundle."""

    def __init__(self, source: Path, settings: BundleSettings, progress: Progress) -> None:
        self._source = source
        self._settings = settings
        self._progress = progress
        self.notices: list[str] = []
        self._config = None if settings.genai is None else read_config(settings.genai)
        for path in settings.licenses:
            if not path.is_file():
                raise InputError(f"--license {path}: no such file")

    def read(self, scratch: Path) -> None:
        """Take in the export: its record, its original and its variants."""
        export = open_export(self._source)
        self._record = export.record
        self._original = export.original()
        self._variants = _chosen(export, self._settings.targets)
        self._models = {v.target: export.model_of(v) for v in self._variants}
        if PORTABLE not in self._models:
            self._progress("making the portable variant")
            made = _portable(export.original_file, scratch / PORTABLE)
            (variant,) = made.record.variants
            self._variants.append(variant)
            self._models[PORTABLE] = made.model_of(variant)
        self._variants.sort(key=lambda variant: (preference(variant.target), variant.target))
        self._models = {v.target: self._models[v.target] for v in self._variants}
        self._cache = CacheLayout.from_metadata(self._models[PORTABLE].metadata_props)
        self._check_same_interface()
        for target in self._settings.single_files:
            if target not in self._models:
                raise InputError(
                    f"--single-file {target}: the bundle holds no such variant",
                    fix=f"expected one of: {', '.join(self._models)}",
                )

    def write(self, folder: Path) -> Manifest:
        """Write everything into the empty ``folder``, the manifest last."""
        progress = self._progress
        progress("writing graphs and weights")
        (folder / MODEL).mkdir()
        write_models(folder / MODEL, self._models, standalone=False)
        progress("computing known answers")
        reference = self._reference()
        answers = make_answers(reference, folder, seed=self._settings.seed)
        generation = None
        if self._cache is not None:
            progress("generating the known continuation")
            generation = greedy_continuation(reference, self._cache, seed=self._settings.seed)
        inputs, outputs = describe_interface(self._models[PORTABLE], self._cache)
        manifest = Manifest(
            generator=f"mha_export {__version__}",
            model=self._record.model,
            licenses=self._licenses(folder),
            inputs=inputs,
            outputs=outputs,
            cache=None if self._cache is None else self._cache.to_json(),
            weights=f"{MODEL}/{WEIGHTS}" if (folder / MODEL / WEIGHTS).is_file() else None,
            variants=tuple(self._entry(variant, folder) for variant in self._variants),
            answers=answers.cases,
            answers_against=answers.against,
            generation=generation,
            mobile=write_mobile(folder, MODEL, self._mobile_source())
            if self._settings.mobile
            else None,
            genai=self._genai(folder),
        )
        write_examples(folder, {"NAME": self._record.model.name})
        (folder / "README.md").write_text(bundle_readme(manifest), encoding="utf-8", newline="\n")
        manifest = replace(manifest, files=hash_files(folder))
        write_manifest(folder, manifest)
        return manifest

    def _reference(self) -> ir.Model:
        """What known answers come from: the original, where the variants kept its interface."""
        if _names(self._original) == _names(self._models[PORTABLE]):
            return self._original
        return self._models[PORTABLE]

    def _check_same_interface(self) -> None:
        expected = _names(self._models[PORTABLE])
        for target, model in self._models.items():
            if _names(model) != expected:
                raise InputError(
                    f"{self._source}: the graphs of {target} and {PORTABLE} have other inputs or "
                    f"outputs: {', '.join(sorted(set(_names(model)) ^ set(expected)))}",
                    fix=f"export them together: -t {target} -t {PORTABLE}",
                )

    def _entry(self, variant: VariantRecord, folder: Path) -> VariantEntry:
        model = self._models[variant.target]
        opsets = {domain or "": int(v) for domain, v in model.graph.opset_imports.items()}
        single = None
        if variant.target in self._settings.single_files:
            single = f"{MODEL}/{variant.target}.single.onnx"
            write_models(folder / MODEL, {f"{variant.target}.single": model}, standalone=True)
        return VariantEntry(
            target=variant.target,
            file=f"{MODEL}/{variant.target}.onnx",
            single_file=single,
            dtype=variant.dtype,
            opsets=opsets,
            ir_version=int(model.ir_version),
            nodes=count_nodes(model),
            forms=Counter(site.form or "as exported" for site in variant.sites.values()),
            attention_nodes=tuple(
                node.name or ""
                for node in model.graph
                if "mha_export.site" in node.metadata_props and node.op_type in _ATTENTION
            ),
            runs_on=runs_on(
                variant.target, opset=opsets.get("", 0), ir_version=int(model.ir_version)
            ),
            options=options_of(variant.target, dtype=variant.dtype),
            evidence=self._evidence(variant),
        )

    def _evidence(self, variant: VariantRecord) -> dict[str, Any]:
        proofs = [site.proof for site in variant.sites.values() if site.proof is not None]
        worst = max(proofs, key=lambda p: (p.max_err or 0.0) / (p.bound or 1.0), default=None)
        known = None if variant.target == PORTABLE else shipped(variant.target)
        return {
            "proofs": None
            if worst is None
            else {
                "sites": len(proofs),
                "engine": worst.engine,
                "against": worst.against,
                "max_err": worst.max_err,
                "bound": worst.bound,
            },
            "probed": None
            if known is None
            else {"runtime": known.runtime, "version": known.version, "measured": known.measured},
        }

    def _licenses(self, folder: Path) -> tuple[str, ...]:
        names = []
        for path in self._settings.licenses:
            (folder / LICENSES).mkdir(exist_ok=True)
            name = f"{LICENSES}/{path.name}"
            if (folder / name).exists():
                raise InputError(f"--license {path}: two files are called {path.name}")
            shutil.copyfile(path, folder / name)
            names.append(name)
        if not names:
            self.notices.append("no --license was given: the bundle states no licence of the model")
        return tuple(names)

    def _mobile_source(self) -> str:
        return f"{'cpu' if 'cpu' in self._models else PORTABLE}.onnx"

    def _genai(self, folder: Path) -> str | None:
        if self._config is None:
            return None
        document = genai_config(self._config, self._cache, self._mobile_source())
        name = f"{MODEL}/genai_config.json"
        (folder / name).write_text(
            json.dumps(document, indent=2) + "\n", encoding="utf-8", newline="\n"
        )
        return name


def _chosen(export: ExportFolder, targets: Sequence[str]) -> list[VariantRecord]:
    graphs = {variant.target: variant for variant in export.record.variants}
    if other := {v.graph for v in export.record.variants if v.graph != "main"}:
        raise InputError(
            f"{export.path}: graphs {', '.join(sorted(other))} cannot be bundled",
            fix="export one graph a target",
        )
    for target in targets:
        if target not in graphs and target != PORTABLE:
            raise export.no_graph(target)
    wanted = {*targets, PORTABLE} if targets else set(graphs)
    return [variant for name, variant in graphs.items() if name in wanted]


def _portable(original: Path, out: Path) -> ExportFolder:
    from mha_export.jobs.export import export_model

    export_model(original, targets=[PORTABLE], out=out)
    return open_export(out)


def _names(model: ir.Model) -> tuple[str, ...]:
    values = (*model.graph.inputs, *model.graph.outputs)
    return tuple(value.name or "" for value in values)


def settings_from(options: Mapping[str, Any]) -> BundleSettings:
    """Settings of the command line's options."""
    return BundleSettings(**dict(options))

"""The inputs that heads are judged on: real ones, in batches, with labels where there are any.

Three kinds of file: ``.npz`` with an array an input of the model, samples along the first axis;
``.jsonl`` with an object a line, which holds ``text`` or the inputs themselves; and plain text,
a sample a line. Text needs a folder with a ``tokenizer.json`` (the ``tokenizers`` package).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from mha_export.errors import InputError
from mha_export.npz import read_npz

Arrays = dict[str, np.ndarray]
BATCH = 32
LABELS = "labels"


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Samples of about one length.

    Attributes:
        inputs: by input name, samples first.
        keep: [n, s] bool: which tokens are not padding.
        labels: as the file has them, samples first, or None.
        ids: token ids [n, s], or None where the model takes none.
    """

    inputs: Mapping[str, np.ndarray]
    keep: np.ndarray
    labels: np.ndarray | None = None
    ids: np.ndarray | None = None

    @property
    def samples(self) -> int:
        return len(self.keep)


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """All samples of a file, shortest first within the order they are batched in.

    Attributes:
        batches: of at most 32 samples.
        tokens: the words of the tokenizer by id, empty without one.
        separator: id of the separator (``[SEP]``, ``</s>``), None where unknown.
    """

    batches: tuple[Batch, ...]
    tokens: Mapping[int, str]
    separator: int | None = None

    @property
    def samples(self) -> int:
        return sum(batch.samples for batch in self.batches)


def read_samples(path: Path, model: ir.Model, *, tokenizer: Path | None = None) -> Samples:
    """The samples of ``path`` as inputs of ``model``.

    Errors:
        InputError: no such file, not of a known kind, an input it holds nothing for, text without
            a tokenizer.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file", fix="give .npz, .jsonl or text with --data")
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _from_arrays(path, model)
    if suffix == ".jsonl":
        rows = _json_rows(path)
        if all("text" in row for row in rows):
            return _from_texts(
                [str(row["text"]) for row in rows],
                [row.get("label") for row in rows],
                model,
                _tokenizer(tokenizer, path),
            )
        return _from_rows(path, rows, model)
    lines = [line.strip() for line in _lines(path)]
    texts = [line for line in lines if line and not line.startswith("#")]
    if not texts:
        raise InputError(f"{path}: holds no text", fix="put a sample on each line")
    return _from_texts(texts, [None] * len(texts), model, _tokenizer(tokenizer, path))


def samples_of(
    rows: Sequence[Mapping[str, Sequence[int]]],
    model: ir.Model,
    *,
    labels: Sequence[Any] | None = None,
    where: str = "the data",
) -> Samples:
    """Samples from token ids (and whatever else the model takes) of uneven lengths."""
    known = [label for label in labels or () if label is not None]
    numbers = {label: index for index, label in enumerate(sorted(set(known), key=str))}
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["input_ids"]))
    batches = []
    for start in range(0, len(order), BATCH):
        own = order[start : start + BATCH]
        arrays, keep = _padded([rows[index] for index in own])
        inputs = completed(arrays, keep, model, where=where)
        target = None
        if labels is not None and len(known) == len(rows):
            target = np.array([numbers[labels[index]] for index in own], np.int64)
        batches.append(Batch(inputs=inputs, keep=keep, labels=target, ids=arrays["input_ids"]))
    return Samples(batches=tuple(batches), tokens={})


def _padded(rows: Sequence[Mapping[str, Sequence[int]]]) -> tuple[Arrays, np.ndarray]:
    longest = max(len(row["input_ids"]) for row in rows)
    keep = np.zeros((len(rows), longest), bool)
    arrays = {name: np.zeros((len(rows), longest), np.int64) for name in rows[0]}
    for index, row in enumerate(rows):
        keep[index, : len(row["input_ids"])] = True
        for name, numbers in row.items():
            arrays[name][index, : len(numbers)] = numbers
    return arrays, keep


def completed(
    arrays: Mapping[str, np.ndarray], keep: np.ndarray, model: ir.Model, *, where: str
) -> Arrays:
    """The inputs of the model: those given, and those that follow from which tokens there are.

    Errors:
        InputError: an input that neither is given nor follows.
    """
    found = {}
    for value in model.graph.inputs:
        name = value.name or ""
        array = arrays[name] if name in arrays else _implied(value, keep)
        if array is None:
            raise InputError(
                f"{where} holds nothing for the model's input {name!r}; it holds "
                f"{', '.join(sorted(arrays)) or 'nothing'}",
                fix="give an .npz with an array for every input of the model",
            )
        kind = value.dtype
        found[name] = array if kind is None else array.astype(kind.numpy(), copy=False)
    return found


def _implied(value: ir.Value, keep: np.ndarray) -> np.ndarray | None:
    name, shape = (value.name or "").lower(), value.shape
    rank = 0 if shape is None else len(shape)
    if "mask" in name and rank == 2:
        return keep.astype(np.int64)
    if "token_type" in name:
        return np.zeros(keep.shape, np.int64)
    if "position" in name and rank == 2:
        positions: np.ndarray = np.maximum(np.cumsum(keep, axis=1) - 1, 0)
        return positions
    if ("past" in name or "cache" in name) and rank == 4 and shape is not None:
        sizes = [dim if isinstance(dim, int) else 0 for dim in shape]
        return np.zeros((len(keep), *sizes[1:]), np.float32)
    return None


def _from_arrays(path: Path, model: ir.Model) -> Samples:
    arrays = read_npz(path)
    labels = arrays.pop(LABELS, None)
    if not arrays:
        raise InputError(f"{path}: holds no arrays", fix="save an array for every input")
    count = len(next(iter(arrays.values())))
    if any(len(a) != count for a in (*arrays.values(), *([] if labels is None else [labels]))):
        raise InputError(
            f"{path}: its arrays hold different numbers of samples: "
            + ", ".join(f"{name} {len(array)}" for name, array in arrays.items()),
            fix="put samples along the first axis of every array",
        )
    keep = _kept(arrays)
    batches = []
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        own = {name: array[part] for name, array in arrays.items()}
        batches.append(
            Batch(
                inputs=completed(own, keep[part], model, where=str(path)),
                keep=keep[part],
                labels=None if labels is None else labels[part],
                ids=own.get("input_ids"),
            )
        )
    return Samples(batches=tuple(batches), tokens={})


def _kept(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    mask = arrays.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        kept: np.ndarray = np.asarray(mask) != 0
        return kept
    first = next(iter(arrays.values()))
    shape = first.shape[:2] if first.ndim > 1 else (len(first), 1)
    return np.ones(shape, bool)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: not UTF-8 text ({error})", fix="give .npz, .jsonl or text with --data"
        ) from error


def _json_rows(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected an object", fix='as in {"text": "..."}')
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no samples", fix="put an object on each line")
    return rows


def _from_rows(path: Path, rows: Sequence[Mapping[str, Any]], model: ir.Model) -> Samples:
    missing = [number for number, row in enumerate(rows, 1) if "input_ids" not in row]
    if missing:
        raise InputError(
            f"{path}:{missing[0]}: has neither text nor input_ids",
            fix='give {"text": ...} or {"input_ids": [...]} on every line',
        )
    inputs = [
        {name: row[name] for name in row if name not in ("label", LABELS, "text")} for row in rows
    ]
    for number, row in enumerate(inputs, 1):
        _require_numbers(row, inputs[0], where=f"{path}:{number}")
    labels = [row.get("label", row.get(LABELS)) for row in rows]
    return samples_of(inputs, model, labels=labels, where=str(path))


def _require_numbers(row: Mapping[str, Any], first: Mapping[str, Any], *, where: str) -> None:
    """Every array is a list of whole numbers as long as the ids, under the first row's names."""
    odd = sorted(set(row) ^ set(first))
    if odd:
        raise InputError(
            f"{where}: has {', '.join(sorted(row))}, the first sample has "
            f"{', '.join(sorted(first))}",
            fix=f"give {odd[0]!r} on every line, or on none",
        )
    for name, numbers in row.items():
        if not isinstance(numbers, list) or not all(isinstance(n, int) for n in numbers):
            raise InputError(f"{where}: {name!r} is no list of whole numbers")
    for name, numbers in row.items():
        expected = len(row["input_ids"])
        if not numbers or len(numbers) != expected:
            raise InputError(
                f"{where}: {name!r} holds {len(numbers)} numbers, expected "
                f"{expected or 'one at least'}"
            )


def _tokenizer(folder: Path | None, data: Path) -> Any:
    if folder is None:
        raise InputError(
            f"{data}: holds text, and there is no tokenizer to read it with",
            fix="name a folder with a tokenizer.json with --tokenizer, or give token ids (.npz)",
        )
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise InputError(f"{file}: no such file", fix="give the folder of the model's tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise InputError(
            "text is split into tokens with tokenizers, which is not installed",
            fix="pip install tokenizers, or give token ids (.npz)",
        ) from error
    try:
        found = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises bare exceptions
        raise InputError(f"{file}: not a tokenizer: {error}") from error
    found.no_padding()
    found.no_truncation()
    return found


_SEPARATORS = ("[SEP]", "</s>", "<|endoftext|>", "<eos>")


def _from_texts(
    texts: Sequence[str], labels: Sequence[Any], model: ir.Model, tokenizer: Any
) -> Samples:
    encodings = [tokenizer.encode(text) for text in texts]
    rows = [{"input_ids": encoding.ids} for encoding in encodings]
    found = samples_of(rows, model, labels=labels, where="text")
    used = {number for encoding in encodings for number in encoding.ids}
    ids = (tokenizer.token_to_id(word) for word in _SEPARATORS)
    return Samples(
        batches=found.batches,
        tokens={number: str(tokenizer.id_to_token(number)) for number in sorted(used)},
        separator=next((number for number in ids if number is not None), None),
    )

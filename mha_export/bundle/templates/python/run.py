"""Run the bundle with ONNX Runtime: needs onnxruntime and numpy, nothing else.

python run.py                    the known inputs, timed
python run.py --check            files, known answers, provider; exit 1 and a name if one is bad
python run.py --generate 20      a decoder: stream 20 tokens after the known prompt
python run.py --target portable  this variant, not the first that fits
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

BUNDLE = Path(__file__).resolve().parents[2]


class CheckError(Exception):
    """Something is not as it should be; the message names it."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """``manifest.json``, its own hash checked: of its bytes with the 64 digits set to zero."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise CheckError("manifest.json: missing")
    data = path.read_bytes()
    try:
        manifest: dict[str, Any] = json.loads(data)
        stated = str(manifest["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckError(f"manifest.json: damaged ({error})") from None
    if hashlib.sha256(data.replace(stated.encode(), b"0" * 64, 1)).hexdigest() != stated:
        raise CheckError("manifest.json: changed (its sha256 is not the one it states)")
    return manifest


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Every file is there and unchanged."""
    for name, stated in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckError(f"{name}: missing")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != stated["sha256"]:
            raise CheckError(f"{name}: changed (sha256 {digest.hexdigest()})")


def numbers(version: str) -> list[int]:
    """``1.30.0-dev`` is [1, 30, 0]."""
    found = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        found += [int(digits)] if digits else []
        if digits != part:
            break
    return found


def choose(
    manifest: dict[str, Any], runtime: str, version: str, providers: list[str], want: str | None
) -> tuple[dict[str, Any], str]:
    """The first variant, in the manifest's order, that ``runtime`` can run; and the provider.

    ``want`` leaves only that variant. The error says what came closest: a version too old, before
    a provider that is not there, before a runtime no variant is for.
    """
    variants = [v for v in manifest["variants"] if want in (None, v["target"])]
    if not variants:
        raise CheckError(f"unknown: the bundle holds no variant {want}")
    reasons: list[tuple[int, str]] = []
    for variant in variants:
        own = [place for place in variant["runs_on"] if place["runtime"] == runtime]
        here = [place for place in own if place["provider"] in providers]
        fits = [place for place in here if numbers(version) >= numbers(place["minimum"])]
        if fits:
            return variant, fits[0]["provider"]
        name = variant["target"]
        if here:
            need = here[0]["minimum"]
            reasons.append((0, f"older: {name} needs {runtime} {need}; this is {version}"))
        elif own:
            need = own[0]["provider"]
            have = ", ".join(providers)
            reasons.append((1, f"provider: {name} needs {need}; here are {have}"))
        else:
            reasons.append((2, f"runtime: {name} is not for {runtime}"))
    raise CheckError(min(reasons)[1])


def open_session(folder: Path, variant: dict[str, Any], provider: str) -> Any:
    """A session on ``provider``, told what the manifest says it must be told."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if hasattr(ort.InferenceSession, "get_provider_graph_assignment_info"):
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for name, value in variant["options"].get("onnxruntime", {}).items():
        if name == "enable_mem_pattern":
            options.enable_mem_pattern = value == "1"
        elif name != "execution_mode":  # sequential is what ONNX Runtime does anyway
            options.add_session_config_entry(name, value)
    return ort.InferenceSession(str(folder / variant["file"]), options, providers=[provider])


def check_placement(session: Any, variant: dict[str, Any], provider: str) -> None:
    """Attention ran on ``provider``: read off the session where this version tells it."""
    if provider not in session.get_providers():
        raise CheckError(f"provider: asked for {provider}, got {session.get_providers()[0]}")
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return
    attention = set(variant["attention_nodes"])
    for part in session.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            if node.name in attention and part.ep_name != provider:
                raise CheckError(f"provider: {node.name} ran on {part.ep_name}, not {provider}")


def read_tensor(data: bytes, tensor: dict[str, Any]) -> np.ndarray:
    piece = data[tensor["offset"] : tensor["offset"] + tensor["bytes"]]
    return np.frombuffer(piece, tensor["dtype"]).reshape(tensor["shape"])


def read_inputs(folder: Path, case: dict[str, Any]) -> dict[str, np.ndarray]:
    data = (folder / case["file"]).read_bytes()
    return {tensor["name"]: read_tensor(data, tensor) for tensor in case["inputs"]}


def check_answer(folder: Path, case: dict[str, Any], actual: dict[str, np.ndarray]) -> float:
    """The largest error, in units of its row's bound. Over 1 is imprecise; too far is an error."""
    data, worst = (folder / case["file"]).read_bytes(), 0.0
    for tensor in case["outputs"]:
        rows = tensor["rows"]
        exact = read_tensor(data, tensor).astype(np.float64).reshape(rows, -1)
        found = np.asarray(actual[tensor["name"]], np.float64)
        if found.shape != tuple(tensor["shape"]):
            raise CheckError(f"answer '{case['name']}': {tensor['name']} has shape {found.shape}")
        found = found.reshape(rows, -1)
        same = (found == exact) | (np.isnan(found) & np.isnan(exact))
        error = np.where(same, 0.0, np.abs(np.where(same, 0.0, found - np.where(same, 0, exact))))
        error = np.where(np.isnan(error), np.inf, error).max(axis=1, initial=0.0)
        bound = np.frombuffer(data, "<f4", rows, tensor["bound"])
        if (error > np.frombuffer(data, "<f4", rows, tensor["coarse"])).any():
            what = f"{tensor['name']} is off by {error.max():.3g}"
            raise CheckError(f"answer '{case['name']}': {what}, bound {bound.min():.3g}")
        worst = max(worst, float((error / bound).max(initial=0.0)))
    return worst


def run(session: Any, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def generate(
    session: Any, manifest: dict[str, Any], prompt: list[int], count: int, longest: int
) -> Iterator[int]:
    """Greedy tokens after ``prompt``, one at a time; keys and values stay in the cache."""
    cache, values = manifest["cache"], {v["name"]: v for v in manifest["inputs"]}
    room = None if cache["growth"] == "concat" else longest  # of a static cache
    past: dict[str, np.ndarray] = {}
    for tensor in cache["tensors"]:
        value, axis = values[tensor["past"]], tensor["axis"]
        shape = [size if isinstance(size, int) else 1 for size in value["shape"]]
        if room is not None and isinstance(value["shape"][axis], int):
            room = shape[axis]
        shape[axis] = room or 0
        past[tensor["past"]] = np.zeros(shape, value["dtype"])
    if room is not None and room < longest:
        raise CheckError(f"the cache has room for {room} tokens, prompt included, not {longest}")
    new, done = list(prompt), 0
    for _ in range(count):
        total = done + len(new)
        feeds = dict(past)
        width = total if room is None else room
        given: dict[str | None, Any] = {
            cache["tokens"][0]: [new],
            cache["positions"]: [list(range(done, total))],
            cache["mask"]: [[int(place < total) for place in range(width)]],
            cache["total_length"]: [total],
        }
        for name, integers in given.items():
            if name is not None:
                feeds[name] = np.array(integers, values[name]["dtype"])
        outputs = run(session, feeds)
        logits = outputs[cache["logits"]]
        token = int(logits.reshape(-1, logits.shape[-1])[-1].argmax())
        past = {tensor["past"]: outputs[tensor["present"]] for tensor in cache["tensors"]}
        new, done = [token], total
        yield token


def check_generation(session: Any, manifest: dict[str, Any]) -> None:
    known = manifest["generation"]
    if known is None:
        return
    longest = len(known["prompt"]) + len(known["tokens"])
    found = list(generate(session, manifest, known["prompt"], len(known["tokens"]), longest))
    if found != known["tokens"]:
        raise CheckError(f"generation: got tokens {found}; expected {known['tokens']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the bundle with ONNX Runtime.")
    parser.add_argument("--check", action="store_true", help="check everything; exit 1 if bad")
    parser.add_argument("--generate", type=int, metavar="N", help="stream N tokens of a decoder")
    parser.add_argument("--target", help="this variant, not the first that fits")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="another bundle's folder")
    asked = parser.parse_args()
    try:
        import onnxruntime as ort

        manifest = read_manifest(asked.bundle)
        if asked.check:
            check_files(asked.bundle, manifest)
        variant, provider = choose(
            manifest, "onnxruntime", ort.__version__, ort.get_available_providers(), asked.target
        )
        session = open_session(asked.bundle, variant, provider)
        print(f"{variant['target']} on {provider}, onnxruntime {ort.__version__}")
        if asked.generate:
            if manifest["generation"] is None:
                raise CheckError("this model does not generate tokens")
            prompt = manifest["generation"]["prompt"]
            longest = len(prompt) + asked.generate
            for token in generate(session, manifest, prompt, asked.generate, longest):
                print(token, end=" ", flush=True)
            print()
            return 0
        for case in manifest["answers"]:
            inputs = read_inputs(asked.bundle, case)
            actual = run(session, inputs)
            factor = check_answer(asked.bundle, case, actual)
            started = time.perf_counter()
            run(session, inputs)
            took = (time.perf_counter() - started) * 1e3
            verdict = "right" if factor <= 1 else "imprecise"
            print(f"{case['name']}: {verdict}, {factor:.2f} of the bound, {took:.1f} ms")
        if asked.check:
            check_generation(session, manifest)
            check_placement(session, variant, provider)
            print("all checks passed")
    except CheckError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not asked.check:
            raise
        print(f"FAILED: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Which targets there are, and what ``-t`` may name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from mha_export.discovery import members
from mha_export.errors import InputError
from mha_export.targets._target import Available, Target

FIRST = ("cpu", "reference", "openvino")
"""Listed before the others, which follow in alphabetical order."""


@dataclass(frozen=True, kw_only=True)
class TargetRequest:
    """One ``-t``: a target, and the precision asked of a runtime that chooses its own."""

    target: Target
    precision: str | None = None

    @property
    def name(self) -> str:
        """As it was written: ``openvino:bf16``."""
        return (
            self.target.name if self.precision is None else f"{self.target.name}:{self.precision}"
        )

    @property
    def runs_here(self) -> bool:
        return isinstance(self.target.availability().run, Available)


@cache
def all_targets() -> dict[str, Target]:
    """Every known target by name, installed or not."""
    found = {target.name: target for target in members("mha_export.targets", "TARGET")}
    order = {name: place for place, name in enumerate(FIRST)}
    return dict(sorted(found.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def target_named(name: str, *, besides: Sequence[str] = ("all",)) -> Target:
    """The target of that name.

    Args:
        name: as ``-t`` takes it, without a precision.
        besides: what the message lists after the targets, for the caller takes it too.

    Errors:
        mha_export.errors.InputError: there is none; the message lists those there are.
    """
    try:
        return all_targets()[name]
    except KeyError:
        raise InputError(
            f"unknown target '{name}'",
            fix=f"expected one of: {', '.join((*all_targets(), *besides))}",
        ) from None


def parse_target(text: str, *, besides: Sequence[str] = ("all",)) -> TargetRequest:
    """Read ``NAME`` or ``NAME:PRECISION``. ``besides``: see :func:`target_named`.

    Errors:
        mha_export.errors.InputError: unknown target, or a precision it cannot be told to use.
    """
    name, colon, precision = text.partition(":")
    target = target_named(name, besides=besides)
    if not colon:
        return TargetRequest(target=target)
    if precision not in target.precisions:
        allowed = ", ".join(f"{name}:{known}" for known in target.precisions)
        raise InputError(
            f"target '{name}' has no precision '{precision}'",
            fix=f"expected {name} or one of: {allowed}"
            if allowed
            else f"write {name} alone: its precision is that of the graph; cast it with --dtype",
        )
    return TargetRequest(target=target, precision=precision)


def parse_targets(texts: Iterable[str]) -> tuple[TargetRequest, ...]:
    """Read every ``-t``; ``all`` stands for each target that can build here; no duplicates.

    Errors:
        mha_export.errors.InputError: as :func:`parse_target`.
    """
    requests: dict[str, TargetRequest] = {}
    for text in texts:
        found = (
            [TargetRequest(target=t) for t in all_targets().values() if _builds(t)]
            if text == "all"
            else [parse_target(text)]
        )
        requests.update((request.name, request) for request in found)
    return tuple(requests.values())


def _builds(target: Target) -> bool:
    return isinstance(target.availability().build, Available)

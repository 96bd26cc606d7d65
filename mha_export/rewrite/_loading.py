"""Which rewritten sites a runtime does not load, when it does not load the whole.

A form can be right, and run on its own, and still stop the file from loading: a type that only the
whole graph shows, a kernel for one shape and not another. The sites at fault are looked for by
halves: each attempt is the original model with some of the sites rewritten.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

Attempt = Callable[[Collection[str]], str | None]
"""Rewrite only these sites: why the result does not load, or None where it does."""


def breaking_sites(groups: Sequence[Sequence[str]], attempt: Attempt) -> dict[str, str]:
    """The sites to undo, each with the runtime's words, so that the rest loads.

    Args:
        groups: sites by id; those of one group are equal in structure, and stand or fall together.
        attempt: is asked about ``2 k log2(n)`` times for k of n groups at fault.
    """
    found: dict[str, str] = {}
    _search(list(groups), attempt, found)
    rest = [group for group in groups if group[0] not in found]
    if attempt([site for group in rest for site in group]) is None:
        return found
    good: list[str] = []
    for group in rest:  # each loads by itself, and not all together
        refusal = attempt([*good, *group])
        if refusal is None:
            good += group
        else:
            found.update(dict.fromkeys(group, refusal))
    return found


def _search(groups: list[Sequence[str]], attempt: Attempt, found: dict[str, str]) -> None:
    refusal = attempt([site for group in groups for site in group])
    if refusal is None:
        return
    if len(groups) == 1:
        found.update(dict.fromkeys(groups[0], refusal))
        return
    middle = len(groups) // 2
    _search(groups[:middle], attempt, found)
    _search(groups[middle:], attempt, found)

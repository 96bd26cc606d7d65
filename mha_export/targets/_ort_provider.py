"""A target that is one execution provider of ONNX Runtime, told in a page of data.

The provider is built into a distribution of onnxruntime, or comes as a plugin library beside it.
Strict placement: the CPU is forbidden where the graph allows it, and placement is read off a
profile. Where the provider can save what it compiled (EPContext nodes) the artifact is that file.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from mha_export.errors import TargetUnavailableError
from mha_export.targets import _ort, _platform
from mha_export.targets._ort import Plugin, SessionSetup
from mha_export.targets._target import (
    Availability,
    Available,
    CompileOptions,
    Program,
    State,
    Target,
    Unavailable,
)


@dataclass(frozen=True, kw_only=True)
class PluginFiles:
    """Where a plugin's library lies in its package: file name by operating system."""

    module: str
    libraries: Mapping[str, str]

    def library(self, system: str) -> Path | None:
        found = util.find_spec(self.module)
        name = self.libraries.get(system)
        if found is None or found.origin is None or name is None:
            return None
        beside = sorted(Path(found.origin).parent.rglob(name))
        return beside[0] if beside else None


@dataclass(frozen=True, kw_only=True)
class OrtProviderTarget(Target):
    """One provider (:class:`mha_export.targets.Target`).

    Attributes:
        provider: its name in ONNX Runtime; options: what it is given.
        distribution: the Python distribution it comes in.
        plugin: where it is a library of its own; None: built into the distribution.
        systems: operating systems it exists for (``platform.system()``).
        device: what it runs on; device_file: a path that shows the device is there (Linux).
        context: whether it can save what it compiled as EPContext nodes.
    """

    name: str
    summary: str
    provider: str
    distribution: str
    fix: str
    device: str
    systems: tuple[str, ...]
    options: Mapping[str, str] = field(default_factory=dict)
    plugin: PluginFiles | None = None
    device_file: str | None = None
    context: bool = False
    default_forms: tuple[str, ...] = ("primitive",)
    max_opset: int = 22

    def availability(self) -> Availability:
        return self.availability_on(platform.system())

    def availability_on(self, system: str) -> Availability:
        """Availability as of an operating system."""
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            version = None
        state = self._state(system, version)
        return Availability(
            build=state,
            run=state,
            runtime=self.distribution,
            version=version,
            device=self.device if isinstance(state, Available) else None,
        )

    def _state(self, system: str, version: str | None) -> State:
        if system not in self.systems:
            reason = f"{self.provider} exists on {' and '.join(self.systems)}; this is {system}"
        elif clash := _ort.clash():
            return Unavailable(reason=clash[0], fix=clash[1])
        elif version is None:
            reason = f"{self.distribution} is not installed"
        elif system == "Linux" and self.device_file and not Path(self.device_file).exists():
            reason = f"there is no {self.device}: {self.device_file} does not exist"
        elif self.plugin is not None and self.plugin.library(system) is None:
            reason = f"{self.distribution} {version} brings no library for {system}"
        elif self.plugin is not None and not self._finds_a_device(system):
            reason = f"{self.provider} finds no {self.device}"
        else:
            return Available(detail=f"{self.distribution} {version}")
        return Unavailable(reason=reason, fix=self.fix)

    def _finds_a_device(self, system: str) -> bool:
        """Asked in a process of its own: registering a library may end the process."""
        from mha_export.targets._worker import Job, Limits, isolated

        plugin = self._plugin(system)
        job = Job(function=has_device, args=(plugin,))
        outcome = isolated(job, limits=Limits(seconds=60.0))
        return bool(outcome.value)

    def _plugin(self, system: str) -> Plugin | None:
        if self.plugin is None:
            return None
        library = self.plugin.library(system)
        if library is None:
            return None
        return Plugin(registration=self.provider, library=library, ep_name=self.provider)

    def setup(self, *, threads: int | None, system: str) -> SessionSetup:
        return SessionSetup(
            providers=((self.provider, dict(self.options)),),
            plugin=self._plugin(system),
            threads=threads or _platform.usable_cpus(),
            ep_context=self.context,
        )

    def compile(self, program: Program, options: CompileOptions) -> _ort.OrtArtifact:
        ort = _ort.import_ort(self.name, self.fix)
        setup = self.setup(threads=options.threads, system=platform.system())
        if setup.plugin is None and self.provider not in ort.get_available_providers():
            raise TargetUnavailableError(
                f"target '{self.name}': this onnxruntime has no {self.provider}", fix=self.fix
            )
        return _ort.optimise_strictly(program, setup, options)


def has_device(plugin: Plugin) -> bool:
    """Whether a plugin finds a device here. The body of one worker request."""
    return bool(_ort.plugin_devices(plugin))

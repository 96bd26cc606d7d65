"""What the set-up says when pip fails: the hint about torch comes where torch is the reason."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "_environment.sh"


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are bash's")
@pytest.mark.parametrize(
    ("log", "hint"),
    [
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cpu",
            True,
        ),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", True),
        (
            "The conflict is caused by:\n"
            "    mha-export[dev] 0.1.0 depends on torch>=2.6; extra == 'torch'\n"
            "    The user requested (constraint) torch==2.13.0+cpu\n"
            "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io",
            True,
        ),
        ("Collecting torch==2.13.0+cpu\nERROR: No space left on device", False),
        (
            "    The user requested (constraint) onnx==1.23.2\nERROR: ResolutionImpossible",
            False,
        ),
    ],
    ids=["no version", "no distribution", "conflict over torch", "disk", "conflict over onnx"],
)
def test_the_hint_about_torch(log: str, hint: bool, tmp_path: Path) -> None:
    file = tmp_path / "setup.log"
    file.write_text(log)
    command = f'. "{SCRIPT}"; lacks_cpu_torch "{file}"'
    done = subprocess.run(["bash", "-c", command], check=False, timeout=60)
    assert (done.returncode == 0) is hint

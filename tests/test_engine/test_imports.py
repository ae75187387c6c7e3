"""What a training imports: no part that only evaluations, conversions or pages need."""

import subprocess
import sys

UNNEEDED = (
    "mapet_mm.evaluation.protocol",
    "mapet_mm.evaluation.protocols",
    "mapet_mm.evaluation.image_sets",
    "mapet_mm.evaluation.models",
    "mapet_mm.visualization",
    "sklearn",
    "matplotlib",
)


def test_a_trainings_parts_import_no_protocols_and_no_pages():
    code = "import sys, mapet_mm.engine; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "mapet_mm.evaluation.metrics.neighbours" in loaded.split()
    assert not set(UNNEEDED) & set(loaded.split())

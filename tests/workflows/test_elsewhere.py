"""Training, evaluation and measurements on a device that is not the CPU: nobody forgets where a tensor belongs.

The device is made of the CPU (shared_cases/elsewhere_cases.py); what only a GPU can show has the mark `gpu`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

SCRIPT = Path(__file__).parents[1] / "shared_cases" / "elsewhere_cases.py"
# Every objective, flatness method, inner attack and optimizer once.
TRAINED = (
    "digits_standard digits_entropy_sgd digits_hat digits_gat",
    "digits_trades_awp_rat_swa digits_alp digits_at_l2",
    "digits_trades_trh digits_trades_s2o digits_mart digits_at_sam digits_atent digits_smooth",
)

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot be given a device in Python",
)


@pytest.mark.parametrize(
    "case", ["refusals", "evaluations", "measurements", "choices", *(f"trainings {n}" for n in TRAINED)]
)
def test_no_device_is_forgotten(case: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), *case.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

"""What must hold for a kernel path to be taken: tensor specs, violations, and the gates themselves as data."""

from weightprep.contracts.gates import GATES, TARGETS, Gate, Prediction, predict
from weightprep.contracts.tensor_spec import Place, TensorSpec
from weightprep.contracts.violation import ModelContractError, Violation, raise_violations

__all__ = [
    "GATES",
    "TARGETS",
    "Gate",
    "ModelContractError",
    "Place",
    "Prediction",
    "TensorSpec",
    "Violation",
    "predict",
    "raise_violations",
]

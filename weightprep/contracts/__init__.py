"""What must hold for a kernel path to be taken: tensor specs, violations, and the gates themselves as data."""

from weightprep.contracts.engine_version import READ_RELEASES, unread_note
from weightprep.contracts.gates import GATES, TARGETS, Gate, Prediction, name_targets, predict
from weightprep.contracts.tensor_spec import Place, TensorSpec
from weightprep.contracts.violation import ModelContractError, Violation, raise_violations

__all__ = [
    "GATES",
    "READ_RELEASES",
    "TARGETS",
    "Gate",
    "ModelContractError",
    "Place",
    "Prediction",
    "TensorSpec",
    "Violation",
    "name_targets",
    "predict",
    "raise_violations",
    "unread_note",
]

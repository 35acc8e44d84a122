"""The interface of an implementation under test. Read docs/subjects.md to add your own."""

from __future__ import annotations

from loragate.protocol.boundary import CheckedInstance, CheckedSubject
from loragate.protocol.capabilities import (
    Capabilities,
    Guard,
    HotPath,
    Others,
    Rounding,
    unsupported,
)
from loragate.protocol.error_origin import (
    BrokenProtocol,
    forget_errors,
    original_of,
    raised_by_subject,
    subject_code,
    was_dropped,
)
from loragate.protocol.subject import (
    AnyInstance,
    Instance,
    MoEInstance,
    Resident,
    Subject,
    apply_step,
)
from loragate.protocol.tensors import BaseExperts, BaseLayer, Batch, Pool, Routes
from loragate.protocol.trial import Trial

__all__ = [
    "AnyInstance",
    "BaseExperts",
    "BaseLayer",
    "Batch",
    "BrokenProtocol",
    "Capabilities",
    "CheckedInstance",
    "CheckedSubject",
    "Guard",
    "HotPath",
    "Instance",
    "MoEInstance",
    "Others",
    "Pool",
    "Resident",
    "Rounding",
    "Routes",
    "Subject",
    "Trial",
    "apply_step",
    "forget_errors",
    "original_of",
    "raised_by_subject",
    "subject_code",
    "unsupported",
    "was_dropped",
]

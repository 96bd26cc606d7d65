"""The records behind every JSON file of this package, and how they are read and written.

Each is a frozen dataclass with ``to_json`` and ``from_json``; files are checked against the JSON
Schemas of :mod:`mha_export.report.schemas` on the way in and out.
"""

from mha_export.report.records._cache import CacheRecord, StepProofRecord
from mha_export.report.records._codec import Record, to_plain
from mha_export.report.records._compare import ComparisonRecord, SideRecord, SitePairRecord
from mha_export.report.records._doctor import (
    CapabilityRecord,
    DoctorRecord,
    StateRecord,
    TargetRecord,
)
from mha_export.report.records._export import (
    ExportRecord,
    InspectRecord,
    ModelRecord,
    ProofCaseRecord,
    ProofRecord,
    ReasonRecord,
    SiteOutcomeRecord,
    SiteRecord,
    VariantRecord,
)
from mha_export.report.records._files import (
    Damaged,
    Loaded,
    read_export,
    read_record,
    read_results,
    validate,
    write_json,
    write_text,
)
from mha_export.report.records._heads import (
    AttentionMapRecord,
    CurvePointRecord,
    HeadRecord,
    HeadsRecord,
    LayerHeadsRecord,
    SurgeryLayerRecord,
    SurgeryRecord,
)
from mha_export.report.records._latency import LatencyRecord, RatioRecord
from mha_export.report.records._machine import MachineRecord
from mha_export.report.records._plan import MeasuredRecord, PlannedRecord, PlanRecord
from mha_export.report.records._results import (
    CaseRecord,
    CaseStatus,
    DifferenceRecord,
    ParityRecord,
    PlacementRecord,
    ResultRecord,
    ResultsRecord,
    ResultStatus,
    UnfinishedRecord,
)
from mha_export.report.records._version import SCHEMA_VERSION

__all__ = [
    "SCHEMA_VERSION",
    "AttentionMapRecord",
    "CacheRecord",
    "CapabilityRecord",
    "CaseRecord",
    "CaseStatus",
    "ComparisonRecord",
    "CurvePointRecord",
    "Damaged",
    "DifferenceRecord",
    "DoctorRecord",
    "ExportRecord",
    "HeadRecord",
    "HeadsRecord",
    "InspectRecord",
    "LatencyRecord",
    "LayerHeadsRecord",
    "Loaded",
    "MachineRecord",
    "MeasuredRecord",
    "ModelRecord",
    "ParityRecord",
    "PlacementRecord",
    "PlanRecord",
    "PlannedRecord",
    "ProofCaseRecord",
    "ProofRecord",
    "RatioRecord",
    "ReasonRecord",
    "Record",
    "ResultRecord",
    "ResultStatus",
    "ResultsRecord",
    "SideRecord",
    "SiteOutcomeRecord",
    "SitePairRecord",
    "SiteRecord",
    "StateRecord",
    "StepProofRecord",
    "SurgeryLayerRecord",
    "SurgeryRecord",
    "TargetRecord",
    "UnfinishedRecord",
    "VariantRecord",
    "read_export",
    "read_record",
    "read_results",
    "to_plain",
    "validate",
    "write_json",
    "write_text",
]

"""Every reason that Slurm documents has words, and a remedy unless it passes by itself."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm_words import NEVER, REASONS, explained, is_stuck, reason_words, remedy_of

PASSES = frozenset(
    [
        "Priority",
        "Resources",
        "Dependency",
        "BeginTime",
        "Cleaning",
        "JobArrayTaskLimit",
        "JobLaunchFailure",
        "Reservation",
        "Prolog",
        "SchedDefer",
        "FedJobLock",
        "Reconfiguring",
        "Power",
        "BurstBufferResources",
        "BurstBufferStageIn",
        "NonZeroExitCode",
        "TimeLimit",
        "OutOfMemory",
        "AssocMaxJobsLimit",
        "AssocGrpJobsLimit",
        "AssocMaxSubmitJobLimit",
        "AssocGrpSubmitJobsLimit",
        "QOSJobLimit",
        "QOSGrpJobsLimit",
        "QOSGrpSubmitJobsLimit",
        "QOSMaxJobsPerUserLimit",
        "QOSMaxSubmitJobPerUserLimit",
    ]
)
# what the words say → reasons of which they say it
NEVER_STARTS = [
    "DependencyNeverSatisfied",
    "BadConstraints",
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionConfig",
    "AccountNotAllowed",
    "QOSNotAllowed",
    "InvalidAccount",
    "InvalidQOS",
    "DeadLine",
    "MaxMemPerLimit",
    "AssocMaxCpuPerJobLimit",
    "AssocMaxNodePerJobLimit",
    "AssocMaxMemPerJob",
    "AssocMaxMemPerNode",
    "AssocMaxGRESPerJob",
    "AssocMaxCpuMinutesPerJobLimit",
    "AssocMaxWallDurationPerJobLimit",
    "QOSMaxCpuPerJobLimit",
    "QOSMaxNodePerJobLimit",
    "QOSMaxMemoryPerJob",
    "QOSMaxGRESPerNode",
    "QOSMaxWallDurationPerJobLimit",
    "QOSMinCpuNotSatisfied",
    "QOSMinGRES",
    "QOSMinMemory",
]
HELD = ["JobHoldMaxRequeue", "launch failed requeued held", "job requeued in held state", "ReservationDeleted"]
HELD += ["JobHeldUser", "JobHeldAdmin"]
OTHERS_MUST_ACT = [
    "PartitionDown",
    "PartitionInactive",
    "NodeDown",
    "FrontEndDown",
    "ReqNodeNotAvail",
    "Licenses",
    "BurstBufferOperation",
    "InactiveLimit",
    "SystemFailure",
    "AssocGrpCPUMinutesLimit",
    "AssocGrpCPURunMinutesLimit",
    "AssocGrpBillingMinutes",
    "AssocGrpCpuLimit",
    "AssocGrpMemLimit",
    "AssocGrpNodeLimit",
    "AssocGrpWallLimit",
    "AssocGrpGRES",
    "AssocGrpGRESMinutes",
    "QOSGrpCPUMinutesLimit",
    "QOSGrpCpuLimit",
    "QOSGrpMemLimit",
    "QOSGrpNodeLimit",
    "QOSGrpWallLimit",
    "QOSGrpGRES",
    "QOSResourceLimit",
    "QOSTimeLimit",
    "QOSUsageThreshold",
    "QOSMaxCpuPerUserLimit",
    "QOSMaxMemoryPerUser",
    "QOSMaxGRESPerUser",
    "QOSMaxNodePerUserLimit",
]
OTHERS_MUST_ACT += [
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
    "ReqNodeNotAvail, Reserved for maintenance",
]


def remedies(reasons: Iterable[str], state: TaskState = TaskState.PENDING) -> dict[str, str]:
    return {reason: remedy_of(state, reason, "12") for reason in reasons}


def test_what_passes_by_itself_is_no_alarm_but_has_words() -> None:
    assert set(remedies(PASSES).values()) == {""}
    assert [reason for reason in PASSES if reason_words(reason) == reason] == []
    assert [reason for reason in PASSES if reason_words(reason).startswith(NEVER)] == []


def test_what_never_starts_as_it_is_has_a_remedy_and_is_stuck() -> None:
    assert [reason for reason, remedy in remedies([*NEVER_STARTS, *HELD]).items() if not remedy] == []
    assert all(is_stuck(TaskState.PENDING, reason_words(reason)) for reason in (*NEVER_STARTS, *HELD))
    assert all(reason_words(reason).startswith(NEVER) for reason in (*NEVER_STARTS, *HELD))


def test_what_others_must_end_has_a_remedy() -> None:
    assert [reason for reason, remedy in remedies(OTHERS_MUST_ACT).items() if not remedy] == []
    assert [reason for reason in OTHERS_MUST_ACT if reason_words(reason) == reason] == []


def test_every_reason_of_the_table_is_in_one_of_the_lists() -> None:
    listed = {*PASSES, *NEVER_STARTS, *HELD, *OTHERS_MUST_ACT, "Nodes required for job are DOWN", "", "None"}
    assert set(REASONS) <= listed


def test_no_reason_keeps_a_running_task() -> None:
    assert set(remedies([*PASSES, *NEVER_STARTS, *HELD, *OTHERS_MUST_ACT], TaskState.RUNNING).values()) == {""}


def test_a_remedy_names_the_job() -> None:
    assert remedy_of(TaskState.PENDING, "JobHeldUser", "12,13") == "scontrol release 12,13"
    assert "JobId=12 Dependency=" in remedy_of(TaskState.PENDING, "DependencyNeverSatisfied", "12")


def test_a_held_state_is_an_alarm_whatever_its_reason() -> None:
    assert remedy_of(TaskState.REQUEUE_HOLD, "", "12") == "scontrol release 12"
    assert remedy_of(TaskState.RESV_DEL_HOLD, "SomethingNew", "12") == "scontrol release 12"


def test_an_unknown_reason_is_shown_in_its_own_words_and_is_no_alarm() -> None:
    assert explained("SomethingNew, of a later Slurm") == ("SomethingNew, of a later Slurm", "")


def test_details_are_kept() -> None:
    assert "UnavailableNodes:n1" in reason_words("ReqNodeNotAvail, UnavailableNodes:n1")

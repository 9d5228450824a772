"""Every reason that Slurm documents has words, and a remedy unless it passes by itself."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("reason", sorted(PASSES))
def test_what_passes_by_itself_is_no_alarm(reason: str) -> None:
    assert remedy_of(TaskState.PENDING, reason, "12") == ""
    assert reason_words(reason) != reason, "it has words all the same"


@pytest.mark.parametrize("reason", [*NEVER_STARTS, *HELD])
def test_what_never_starts_as_it_is_has_a_remedy_and_is_stuck(reason: str) -> None:
    assert remedy_of(TaskState.PENDING, reason, "12")
    assert is_stuck(TaskState.PENDING, reason_words(reason))


@pytest.mark.parametrize("reason", OTHERS_MUST_ACT)
def test_what_others_must_end_has_a_remedy(reason: str) -> None:
    assert remedy_of(TaskState.PENDING, reason, "12")
    assert reason_words(reason) != reason


def test_every_reason_of_the_table_is_in_one_of_the_lists() -> None:
    listed = {*PASSES, *NEVER_STARTS, *HELD, *OTHERS_MUST_ACT, "Nodes required for job are DOWN", "", "None"}
    assert set(REASONS) <= listed


@pytest.mark.parametrize("reason", sorted({*PASSES, *NEVER_STARTS, *HELD, *OTHERS_MUST_ACT}))
def test_no_reason_keeps_a_running_task(reason: str) -> None:
    assert remedy_of(TaskState.RUNNING, reason, "12") == ""


def test_a_remedy_names_the_job() -> None:
    assert remedy_of(TaskState.PENDING, "JobHeldUser", "12,13") == "scontrol release 12,13"
    assert "JobId=12 Dependency=" in remedy_of(TaskState.PENDING, "DependencyNeverSatisfied", "12")


def test_a_held_state_is_an_alarm_whatever_its_reason() -> None:
    assert remedy_of(TaskState.REQUEUE_HOLD, "", "12") == "scontrol release 12"
    assert remedy_of(TaskState.RESV_DEL_HOLD, "SomethingNew", "12") == "scontrol release 12"


def test_an_unknown_reason_is_shown_in_its_own_words_and_is_no_alarm() -> None:
    assert explained("SomethingNew, of a later Slurm") == ("SomethingNew, of a later Slurm", "")


def test_details_are_kept() -> None:
    assert reason_words("ReqNodeNotAvail, UnavailableNodes:n1") == (
        "nodes it needs are not available (UnavailableNodes:n1)"
    )


def test_words_say_whether_it_ever_starts() -> None:
    assert all(reason_words(reason).startswith(NEVER) for reason in (*NEVER_STARTS, *HELD))
    assert not any(reason_words(reason).startswith(NEVER) for reason in PASSES)

"""Every reason that Slurm documents has words, and a remedy unless it passes by itself."""

from __future__ import annotations

from pipeline.cluster.job_spec import TaskState
from pipeline.cluster.slurm_words import NEVER, REASONS, explained, is_stuck, reason_words, remedy_of

ONE_WORD = {
    "passes": """
    Priority Resources Dependency BeginTime Cleaning JobArrayTaskLimit JobLaunchFailure Reservation Prolog SchedDefer
    FedJobLock Reconfiguring Power BurstBufferResources BurstBufferStageIn NonZeroExitCode TimeLimit OutOfMemory
    AssocMaxJobsLimit AssocGrpJobsLimit AssocMaxSubmitJobLimit AssocGrpSubmitJobsLimit QOSJobLimit QOSGrpJobsLimit
    QOSGrpSubmitJobsLimit QOSMaxJobsPerUserLimit QOSMaxSubmitJobPerUserLimit
""",
    "will never start": """
    DependencyNeverSatisfied BadConstraints PartitionNodeLimit PartitionTimeLimit PartitionConfig AccountNotAllowed
    QOSNotAllowed InvalidAccount InvalidQOS DeadLine MaxMemPerLimit AssocMaxCpuPerJobLimit AssocMaxNodePerJobLimit
    AssocMaxMemPerJob AssocMaxMemPerNode AssocMaxGRESPerJob AssocMaxCpuMinutesPerJobLimit
    AssocMaxWallDurationPerJobLimit QOSMaxCpuPerJobLimit QOSMaxNodePerJobLimit QOSMaxMemoryPerJob QOSMaxGRESPerNode
    QOSMaxWallDurationPerJobLimit QOSMinCpuNotSatisfied QOSMinGRES QOSMinMemory
    JobHoldMaxRequeue ReservationDeleted JobHeldUser JobHeldAdmin
""",
    "others must act": """
    PartitionDown PartitionInactive NodeDown FrontEndDown ReqNodeNotAvail Licenses BurstBufferOperation InactiveLimit
    SystemFailure AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpBillingMinutes AssocGrpCpuLimit
    AssocGrpMemLimit AssocGrpNodeLimit AssocGrpWallLimit AssocGrpGRES AssocGrpGRESMinutes QOSGrpCPUMinutesLimit
    QOSGrpCpuLimit QOSGrpMemLimit QOSGrpNodeLimit QOSGrpWallLimit QOSGrpGRES QOSResourceLimit QOSTimeLimit
    QOSUsageThreshold QOSMaxCpuPerUserLimit QOSMaxMemoryPerUser QOSMaxGRESPerUser QOSMaxNodePerUserLimit
""",
}
PASSES, NEVER_STARTS, OTHERS_MUST_ACT = (text.split() for text in ONE_WORD.values())
NEVER_STARTS += ["launch failed requeued held", "job requeued in held state"]
OTHERS_MUST_ACT += [
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
    "ReqNodeNotAvail, UnavailableNodes:n[1-2]",
    "ReqNodeNotAvail, Reserved for maintenance",
]


def remedy(reason: str, state: TaskState = TaskState.PENDING) -> str:
    return remedy_of(state, reason, "12")


def test_each_reason_has_words_and_a_remedy_unless_it_passes_by_itself() -> None:
    every = [*PASSES, *NEVER_STARTS, *OTHERS_MUST_ACT]
    assert set(REASONS) <= {*every, "Nodes required for job are DOWN", "", "None"}
    assert [reason for reason in PASSES + OTHERS_MUST_ACT if reason_words(reason) == reason] == []
    assert [reason for reason in every if bool(remedy(reason)) == (reason in PASSES)] == []
    assert [reason for reason in every if remedy(reason, TaskState.RUNNING)] == []
    for reason in PASSES + NEVER_STARTS:
        assert reason_words(reason).startswith(NEVER) == (reason in NEVER_STARTS), reason
    assert all(is_stuck(TaskState.PENDING, reason_words(reason)) for reason in NEVER_STARTS)


def test_a_remedy_names_the_job_and_a_held_state_has_one_whatever_its_reason() -> None:
    assert remedy_of(TaskState.PENDING, "JobHeldUser", "12,13") == "scontrol release 12,13"
    assert "JobId=12 Dependency=" in remedy("DependencyNeverSatisfied")
    assert (
        remedy("", TaskState.REQUEUE_HOLD) == remedy("SomethingNew", TaskState.RESV_DEL_HOLD) == "scontrol release 12"
    )


def test_an_unknown_reason_is_shown_in_its_own_words_and_details_are_kept() -> None:
    assert explained("SomethingNew, of a later Slurm") == ("SomethingNew, of a later Slurm", "")
    assert "UnavailableNodes:n1" in reason_words("ReqNodeNotAvail, UnavailableNodes:n1")

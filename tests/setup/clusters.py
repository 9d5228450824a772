"""What clusters print, in the formats of several versions: 22.05 as recorded, the others with what differs there."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.site import NODES, PARTITIONS, Site
from pipeline.cluster.slurm_commands import CONFIG
from pipeline.config.schema_cluster import SlurmSection

# Slurm 22.05.8, recorded; shortened to a third
PLAIN_CONFIG = """\
Configuration data as of 2026-11-21T22:51:39
AccountingStorageEnforce = associations,limits,qos
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu
AccountingStorageType   = accounting_storage/slurmdbd
AuthAltTypes            = (null)
ClusterName             = plain
GresTypes               = gpu
JobAcctGatherType       = jobacct_gather/cgroup
JobAcctGatherParams     = (null)
JobRequeue              = 1
MaxArraySize            = 6
PowerPlugin             =
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
SchedulerParameters     = bf_interval=1,bf_continue,batch_sched_delay=0
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldHost[0]        = vm(127.0.0.1)
SLURM_VERSION           = 22.05.8
TaskPlugin              = task/cgroup
TaskPluginParam         = (null type)

Cgroup Support Configuration:
AllowedRAMSpace         = 100.0%
ConstrainRAMSpace       = yes

Slurmctld(primary) at vm is UP
"""
PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts={accounts} AllowQos=ALL AllocNodes=ALL Default={default} "
    "QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime={grace} Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime={time} MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-3] PriorityJobFactor=1 PriorityTier=1 "
    "RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE PreemptMode={preempt} State={state} TotalCPUs=12 "
    "TotalNodes=3 SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=12,mem=18000M,node=3,billing=12,gres/gpu=6"
)


def partition(
    name: str,
    *,
    default: bool = False,
    time: str = "1-00:00:00",
    preempt: str = "OFF",
    state: str = "UP",
    accounts: str = "ALL",
    grace: int = 0,
) -> str:
    """Return the line that `scontrol show partition --oneliner` prints, as recorded of 22.05.8."""
    filled = {"time": time, "preempt": preempt, "state": state, "accounts": accounts, "grace": grace}
    return PARTITION.format(name=name, default="YES" if default else "NO", **filled)


PLAIN = {
    "config": PLAIN_CONFIG,
    "partitions": "\n".join(
        [
            partition("main", default=True),
            partition("preempt", preempt="REQUEUE", grace=5),
            partition("short", time="00:02:00"),
        ]
    ),
    "nodes": "main*|3|4|6000|gpu:2|(null)|1-00:00:00|n[1-3]\n"
    "preempt|3|4|6000|gpu:2|(null)|1-00:00:00|n[1-3]\n"
    "short|3|4|6000|gpu:2|(null)|2:00|n[1-3]\n",
    "assoc": "plain|root|ada|||normal||||||||\nplain|lab|ada|||normal,tiny|||||50|||\n"
    "elsewhere|secret|ada|||normal|||||1|||\n",
    "user": "lab\n",
    "qos": "normal||||||||||||\ntiny|||||||4|||||\n",
}
# A university: Slurm 25.05 says (null) where 22.05 said preempt/none, lists task plugins, shows no cgroup section
MIXED = {
    "config": """\
Configuration data as of 2026-03-02T10:11:12
AccountingStorageEnforce = associations,limits,qos,safe
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = alpha-2
JobAcctGatherParams     = (null)
JobRequeue              = 0
MaxArraySize            = 11000
PreemptMode             = OFF
PreemptType             = (null)
SelectType              = select/cons_tres
SelectTypeParameters    = CR_CORE_MEMORY
SlurmctldHost[0]        = m1(10.150.0.23)
SlurmctldHost[1]        = m2(10.150.0.2)
SLURM_VERSION           = 25.05.5
TaskPlugin              = task/cgroup,task/affinity
""",
    "partitions": "\n".join(
        [
            partition("cpu", default=True, time="7-00:00:00"),
            partition("gpu", time="2-00:00:00"),
            partition("hopper", time="1-00:00:00", accounts="physics,astro"),
            partition("slices", time="08:00:00"),
            partition("scavenge", time="UNLIMITED", preempt="CANCEL"),
            partition("old", state="DOWN", time="INFINITE"),
        ]
    ),
    "nodes": """\
cpu*|120|64|257000|(null)|zen3,ib|7-00:00:00|cpu[1-120]
gpu|8|64|515000|gpu:a100:4(S:0-1),nvme:1|a100-80g,ib|2-00:00:00|gpu[1-8]
gpu|8|64|515000|gpu:a100:4(S:0,3)|a100-40g,ib|2-00:00:00|gpu[1-8]
hopper|4|96|1031000|gpu:nvidia_h100_80gb_hbm3:8(S:0-7)|ib|1-00:00:00|hopper[1-4]
slices|1|128|1031000|gpu:1g.10gb:14(S:0-1),gpu:3g.40gb:4(S:2-3)|mig|8:00:00|slices[1-1]
scavenge|8|64|515000|gpu:a100:4(S:0-1),nvme:1|a100-80g,ib|infinite|scavenge[1-8]
scavenge|2|40|380000+|gpu:tesla_v100-sxm2-32gb:4(S:0-1)|(null)|infinite|scavenge[1-2]
old|3|16|64000|gpu:p100:2,gpu:gtx1080ti:1(S:0)|(null)|infinite|old[1-3]
""",
    "assoc": "alpha-2|chem|ada|||normal,long|||||500|||\n",
    "user": "chem\n",
    "qos": "normal||||||||||||\nlong||||||||||||\n",
}
# A centre with Slurm 20.11, select/linear, no default partition, nothing told to users but the essential
BARE = {
    "config": """\
Configuration data as of 2021-03-02T10:11:12
ClusterName             = 7even sins/β
MaxArraySize            = 1001
SelectType              = select/linear
SelectTypeParameters    = CR_CPU
SLURM_VERSION           = 20.11.9
TaskPlugin              = task/affinity
""",
    "partitions": "\n".join([partition("no", time="30:00"), partition("gpu:fast", time="1-12:00:00")]),
    "nodes": "no|10|32|1|(null)|(null)|30:00|no[1-10]\ngpu:fast|2|32|1|gpu:weird-é:1|(null)|1-12:00:00|f[1-2]\n"
    "broken line\n|1|1|1|x|y|z|n1\n",
}
NO_GPUS = PLAIN | {
    "nodes": "main*|3|4|6000|(null)|(null)|1-00:00:00|n[1-3]\n",
    "config": PLAIN_CONFIG.replace("plain", "nogpus"),
}
ALL = {"plain": PLAIN, "mixed": MIXED, "bare": BARE, "no_gpus": NO_GPUS}


def site_of(printed: dict[str, str]) -> Site:
    """Return what is made of a cluster that prints so; a command it has no answer for fails."""

    def ask(words: Sequence[str], timeout_s: float) -> str:
        assert timeout_s > 0
        kinds = {CONFIG: "config", PARTITIONS: "partitions", NODES: "nodes"}
        kind = kinds.get(tuple(words)) or words[4]
        if kind not in printed:
            raise CommandFailed(f"{words[0]}: error: first\n{words[0]}: error: Access denied\n")
        return printed[kind]

    return Site(SlurmSection(), ask).refuse_silent()

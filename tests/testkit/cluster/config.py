"""The texts that make a cluster: no file is written and no process is started here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.testkit.cluster.cgroups import Cgroup

GPUS_PER_NODE = 2
CPUS_PER_NODE = 4
MEM_PER_NODE_MB = 6000
MAX_ARRAY_SIZE = 6  # so the highest index is 5
SHORT_LIMIT_MINUTES = 2
TINY_MAX_SUBMIT = 4
GRACE_TIME_S = 3
ACCOUNT = "lab"


@dataclass(frozen=True)
class Plan:
    """Everything the texts depend on."""

    folder: Path
    name: str
    nodes: tuple[str, ...]
    host: str
    first_port: int
    cgroup: Cgroup

    @property
    def conf(self) -> Path:
        """The file that SLURM_CONF names."""
        return self.folder / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "run" / "munge.socket"

    @property
    def database_socket(self) -> Path:
        return self.folder / "run" / "database.socket"

    @property
    def controller_port(self) -> int:
        return self.first_port

    @property
    def accounting_port(self) -> int:
        return self.first_port + 1

    def node_port(self, node: str) -> int:
        """Return the port on which a node listens."""
        return self.first_port + 2 + self.nodes.index(node)

    def log(self, daemon: str) -> Path:
        """Return the file a daemon writes to; `slurmd.n1` is node n1."""
        return self.folder / "log" / f"{daemon}.log"


def files(plan: Plan) -> dict[str, str]:
    """Return the configuration files by name."""
    return {
        "slurm.conf": slurm_conf(plan),
        "slurmdbd.conf": slurmdbd_conf(plan),
        "cgroup.conf": cgroup_conf(plan),
        "gres.conf": gres_conf(plan),
    }


def slurm_conf(plan: Plan) -> str:
    """Return slurm.conf."""
    blocks = [_identity(plan), _limits(), _scheduling(), _memory(plan.cgroup), _accounting(plan), _nodes(plan)]
    return "\n".join([*blocks, _partitions(plan)])


def slurmdbd_conf(plan: Plan) -> str:
    """Return slurmdbd.conf; the database is reached by MYSQL_UNIX_PORT, which no setting replaces."""
    return f"""\
AuthType=auth/munge
AuthInfo=socket={plan.munge_socket}
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={plan.accounting_port}
SlurmUser=root
LogFile={plan.log("slurmdbd")}
PidFile={plan.folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def cgroup_conf(plan: Plan) -> str:
    """Return cgroup.conf."""
    if plan.cgroup is Cgroup.NONE:
        return ""
    systemd = "IgnoreSystemd=yes\n" if plan.cgroup is Cgroup.V2 else ""
    return f"CgroupPlugin={plan.cgroup.value}\n{systemd}ConstrainRAMSpace=yes\nConstrainDevices=no\n"


def gres_conf(plan: Plan) -> str:
    """Return gres.conf."""
    return f"Name=gpu File={plan.folder}/dev/fakegpu[0-{GPUS_PER_NODE - 1}]\n"


def _identity(plan: Plan) -> str:
    # cred_expire is also how long a requeued job waits before it may start again (120 s otherwise)
    return f"""\
ClusterName={plan.name}
SlurmctldHost={plan.host}(127.0.0.1)
SlurmctldPort={plan.controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={plan.munge_socket},cred_expire=8
StateSaveLocation={plan.folder}/state
SlurmdSpoolDir={plan.folder}/spool/%n
SlurmctldPidFile={plan.folder}/run/slurmctld.pid
SlurmdPidFile={plan.folder}/run/slurmd.%n.pid
SlurmctldLogFile={plan.log("slurmctld")}
SlurmdLogFile={plan.log("slurmd.%n")}
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
"""


def _limits() -> str:
    return f"""\
MaxArraySize={MAX_ARRAY_SIZE}
MinJobAge=15
KillWait=5
InactiveLimit=0
SlurmdTimeout=5
MessageTimeout=5
UnkillableStepTimeout=20
JobRequeue=1
EnforcePartLimits=ALL
"""


def _scheduling() -> str:
    return """\
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_continue,batch_sched_delay=0,sched_interval=1,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
DefMemPerCPU=500
"""


def _memory(cgroup: Cgroup) -> str:
    if cgroup is Cgroup.NONE:
        how = "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nJobAcctGatherType=jobacct_gather/linux\n"
        how += "JobAcctGatherParams=OverMemoryKill\n"
    else:
        how = "ProctrackType=proctrack/cgroup\nTaskPlugin=task/cgroup\nJobAcctGatherType=jobacct_gather/cgroup\n"
    return how + "JobAcctGatherFrequency=1\n"


def _accounting(plan: Plan) -> str:
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={plan.accounting_port}
AccountingStoragePass={plan.munge_socket}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
"""


def _nodes(plan: Plan) -> str:
    shape = f"CPUs={CPUS_PER_NODE} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS_PER_NODE} ThreadsPerCore=1"
    shape += f" RealMemory={MEM_PER_NODE_MB} Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
    place = f"NodeHostname={plan.host} NodeAddr=127.0.0.1"
    return "".join(f"NodeName={node} {place} Port={plan.node_port(node)} {shape}\n" for node in plan.nodes)


def _partitions(plan: Plan) -> str:
    nodes = "Nodes=" + ",".join(plan.nodes)
    return f"""\
PartitionName=main {nodes} Default=YES MaxTime=1-00:00:00 DefaultTime=00:10:00 PriorityTier=1 PreemptMode=OFF
PartitionName=preempt {nodes} MaxTime=1-00:00:00 DefaultTime=00:10:00 PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={GRACE_TIME_S}
PartitionName=urgent {nodes} MaxTime=1-00:00:00 DefaultTime=00:10:00 PriorityTier=10 PreemptMode=OFF
PartitionName=short {nodes} MaxTime=00:{SHORT_LIMIT_MINUTES:02}:00 PriorityTier=1 PreemptMode=OFF
"""

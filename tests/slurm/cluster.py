"""A real Slurm on one machine for tests: two nodes of eight declared GPUs, loopback only, no accounting.

    python -m tests.slurm.cluster install | up | down

Each node is a slurmd in a UTS namespace of its own, so that `hostname` tells it and everything that runs on it can be found
and killed as a machine's power cut would. Root on Debian or Ubuntu. What it changes on the machine, `down` undoes: the link
/etc/slurm/slurm.conf (the executor removes SLURM_CONF from its jobs, so the default path must work) and a line in /etc/hosts.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/run/longspec-slurm")  # short: it holds Unix sockets
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
LINK, HOSTS, MARK = Path("/etc/slurm/slurm.conf"), Path("/etc/hosts"), "# longspec tests"
PORT = 16917
NODES, GPUS = ("n1", "n2"), 8
NODE_TIMEOUT = 15  # seconds of silence after which Slurm takes a node for dead
KILL_WAIT = 20  # seconds between SIGTERM and SIGKILL
PATH = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])

# `urgent` takes the nodes away from jobs of `gpu`: preemption by cancelling, as the clusters do it whose users may not requeue.
CONFIGURATION = """
ClusterName=longspec
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=15
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmctldPort={port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=1000
GresTypes=gpu
MinJobAge=3600
KillWait={kill_wait}
SlurmctldTimeout=30
SlurmdTimeout={node_timeout}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
"""


def lacking() -> str:
    """Why there can be no cluster here; empty when there can."""
    if os.geteuid() != 0:
        return "only root can start a Slurm"
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (make test-slurm installs them on Debian)"
    if (LINK.exists() or LINK.is_symlink()) and LINK.resolve() != (FOLDER / "slurm.conf").resolve():
        return f"{LINK} belongs to another Slurm"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        return "no namespaces here; a container needs --cap-add SYS_ADMIN"
    if not os.access(HOSTS, os.W_OK):
        return f"{HOSTS} cannot be written"
    return ""


def install() -> None:
    """Install Debian's packages where that is possible; their services stay off."""
    missing = [package for program, package in PACKAGES.items() if shutil.which(program, path=PATH) is None]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-q", "-y", "--no-install-recommends", *missing]
    try:
        if subprocess.run(command, env=environment).returncode:
            subprocess.run(["apt-get", "-q", "update"], env=environment, check=True)
            subprocess.run(command, env=environment, check=True)
    finally:
        if ours:
            policy.unlink()


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"after {seconds} s still not: {what}"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits for its parent to look does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Cluster:
    """The whole of it; a context that ends what it has started."""

    folder, configuration = FOLDER, FOLDER / "slurm.conf"

    def __enter__(self) -> "Cluster":
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Start it; what an earlier test run left is ended first."""
        self.down()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("munge", "run", "log", "state", "dev", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self._edit_hosts()
        for node in NODES:
            (self.folder / f"run/{node}.uts").touch()
            self._call("unshare", f"--uts={self.folder}/run/{node}.uts", "hostname", node)
        self._configure()
        self._start_munge()
        self.start_controller()
        for node in NODES:
            self.power_on(node)
        until(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), 60, f"idle nodes; see {self.folder}/log")

    def down(self) -> None:
        """End every process of it, jobs first, and undo what it changed on the machine."""
        if self._own("slurmctld") is not None:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(["scancel", "--user=root"], timeout=20, capture_output=True)
        for node in NODES:
            self.power_off(node)
        for name in ("slurmctld", "munged"):
            self._stop(name)
        for names in self.folder.glob("run/*.uts"):
            subprocess.run(["umount", str(names)], capture_output=True)
        if LINK.is_symlink() and LINK.readlink() == self.configuration:
            LINK.unlink()
        self._clean_hosts()

    def power_off(self, node: str) -> None:
        """SIGKILL everything on a node at once; Slurm hears of it by the node's silence."""

        def alive() -> list[int]:
            return [pid for pid in self.processes_on(node) if is_running(pid)]

        def killed() -> bool:
            for pid in alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not alive()

        until(killed, 60, f"{node} without processes")  # one that waits for the disk ends when that has answered

    def power_on(self, node: str) -> None:
        """Start a node."""
        (self.folder / f"run/slurmd-{node}.pid").unlink(missing_ok=True)
        uts = f"--uts={self.folder}/run/{node}.uts"
        self._call("nsenter", uts, "slurmd", "-N", node, "-f", str(self.configuration))

    def start_controller(self) -> None:
        """Start slurmctld, at first or after stop_controller."""
        (self.folder / "run/slurmctld.pid").unlink(missing_ok=True)
        self._call("slurmctld", "-f", str(self.configuration))
        until(lambda: self._own("slurmctld"), 20, "slurmctld's pid file")

    def stop_controller(self) -> None:
        """End slurmctld: no command gets an answer, jobs go on."""
        self._stop("slurmctld")

    def whole(self) -> None:
        """Bring back what a failed test has left switched off, and end all jobs."""
        if self._own("slurmctld") is None:
            self.start_controller()
        subprocess.run(["scancel", "--user=root"], check=True, timeout=60)
        for node in NODES:
            if not self.processes_on(node):
                self.power_on(node)
        for node, state in self.node_states().items():
            if "drain" in state or "down" in state:
                subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], capture_output=True)
        until(lambda: self.node_states() == dict.fromkeys(NODES, "idle"), 90, "idle nodes")

    def processes_on(self, node: str) -> list[int]:
        """All processes of a node's namespace."""
        names = self.folder / f"run/{node}.uts"
        if not names.exists() or names.stat().st_ino == Path("/proc/self/ns/uts").stat().st_ino:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/uts").stat().st_ino == names.stat().st_ino:
                    found.append(int(entry.name))
        return found

    def node_states(self) -> dict[str, str]:
        """Each node's state, such as idle, mixed, down; none while the controller is away."""
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%N %T"], capture_output=True, text=True)
        return dict(line.split() for line in done.stdout.splitlines())

    def _configure(self) -> None:
        for number in range(GPUS):
            (self.folder / f"dev/nvidia{number}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n")
        host = subprocess.run(["hostname", "-s"], capture_output=True, text=True, check=True).stdout.strip()
        text = CONFIGURATION.format(host=host, folder=self.folder, port=PORT, kill_wait=KILL_WAIT, node_timeout=NODE_TIMEOUT)
        for number, node in enumerate(NODES, start=1):
            text += f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={PORT + number} CPUs=64 RealMemory=1000000"
            text += f" Boards=1 SocketsPerBoard=2 CoresPerSocket=32 ThreadsPerCore=1 Gres=gpu:{GPUS} State=UNKNOWN\n"
        for name, rest in (("cpu", "Default=YES PriorityTier=1"), ("gpu", "PriorityTier=1"), ("urgent", "PriorityTier=9")):
            text += (
                f"PartitionName={name} Nodes={','.join(NODES)} OverSubscribe=NO MaxTime=7-0 DefaultTime=60 State=UP {rest}\n"
            )
        self.configuration.write_text(text)
        LINK.parent.mkdir(exist_ok=True)
        LINK.symlink_to(self.configuration)

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        key = munge / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        options = {"socket": munge / "munge.socket", "key-file": key, "seed-file": munge / "munged.seed"}
        options |= {"log-file": munge / "munged.log", "pid-file": self.folder / "run/munged.pid"}
        self._call("munged", *(f"--{name}={value}" for name, value in options.items()))

    def _edit_hosts(self) -> None:
        """Names of nodes and of this machine stand for the loopback address alone."""
        before = HOSTS.read_text().rstrip("\n")
        host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
        # In place: the file may be mounted.
        HOSTS.write_text(f"127.0.0.1 {host} {MARK}\n{before}\n127.0.0.1 {' '.join(NODES)} {MARK}\n")

    def _clean_hosts(self) -> None:
        lines = HOSTS.read_text().splitlines()
        kept = [line for line in lines if not line.endswith(MARK)]
        if kept != lines:
            HOSTS.write_text("\n".join(kept) + "\n")

    def _own(self, name: str) -> int | None:
        """The pid of a daemon of ours that lives."""
        with suppress(OSError, ValueError):
            pid = int((self.folder / f"run/{name}.pid").read_text())
            if is_running(pid) and name in Path(f"/proc/{pid}/cmdline").read_text():
                return pid
        return None

    def _stop(self, name: str) -> None:
        pid = self._own(name)
        for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
            if pid is None or not is_running(pid):
                return
            os.kill(pid, number)
            with suppress(AssertionError):
                until(lambda: not is_running(pid), seconds, f"{name} ended")

    def _call(self, *command: str) -> None:
        log = self.folder / "log/start.log"
        with log.open("a") as output:
            done = subprocess.run(
                command, env=os.environ | {"PATH": PATH}, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )
        assert done.returncode == 0, f"{' '.join(command)}: {log.read_text()[-2000:]}"


if __name__ == "__main__":
    verb = sys.argv[1] if len(sys.argv) == 2 else ""
    if verb == "install":
        install()
        if lacking():
            sys.exit(f"error: {lacking()}")
    elif verb in ("up", "down"):
        if verb == "up" and lacking():
            sys.exit(f"error: {lacking()}")
        getattr(Cluster(), verb)()
    else:
        sys.exit(__doc__)

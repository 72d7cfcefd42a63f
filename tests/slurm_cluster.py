"""A SLURM of a controller and three nodes on this machine, and jobs of a project on it.

It needs the programs of Debian's packages slurmctld, slurmd, slurm-client and munge, but none of
their services, and no file outside its own folder.
"""

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import environment_of_a_shell, run

TIMEOUT = 600  # seconds after which something is taken to hang
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
CPUS = 8  # of a node, as far as SLURM knows

# Debian keeps the daemons where the shell of a user does not look.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"])

# A node that ends first ends the others, where KillOnBadExit is 1; that is not the default.  Jobs
# of the partition low have to leave when one of the partition gpu comes.
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket,cred_expire=5
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool.%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.%n.pid
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=36000
FirstJobId={first_job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
KillOnBadExit=1
NodeName=127.0.0.1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} Gres=gpu:2
NodeName=127.0.0.2 NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs={cpus} Gres=gpu:2
NodeName=127.0.0.3 NodeHostname={host} NodeAddr=127.0.0.3 Port={ports[3]} CPUs={cpus}
PartitionName=gpu Nodes=127.0.0.[1-2] Default=YES PriorityTier=2
PartitionName=low Nodes=127.0.0.[1-2] PriorityTier=1 GraceTime=300
PartitionName=cpu Nodes=127.0.0.3
"""
GPUS = """
NodeName=127.0.0.[1-2] Name=gpu File=/dev/null
NodeName=127.0.0.[1-2] Name=gpu File=/dev/zero
"""


def missing_programs():
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def free_ports(number):
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(is_true, explain):
    deadline = time.monotonic() + TIMEOUT
    while not is_true():
        if time.monotonic() > deadline:
            pytest.fail(explain())
        time.sleep(0.5)


class Cluster:
    """A controller and three nodes, and a project of which jobs are submitted."""

    def __init__(self, home, project):
        self.home = home
        self.project = project
        self.env = {**environment_of_a_shell(), "PATH": PATH, "OMP_NUM_THREADS": "1"}
        self.env["SLURM_CONF"] = str(home / "slurm.conf")
        self.daemons = []

    def start(self):
        host = socket.gethostname().partition(".")[0]
        # The port of a rendezvous is a function of the job: other tests have other ones.
        first_job = random.randrange(1, 9000)
        conf = CONF.format(
            home=self.home, host=host, ports=free_ports(4), first_job=first_job, cpus=CPUS
        )
        (self.home / "slurm.conf").write_text(conf)
        (self.home / "gres.conf").write_text(GPUS)
        (self.home / "state").mkdir()
        self.call("mungekey", "--create", f"--keyfile={self.home}/munge.key")
        files = [
            f"--{name}-file={self.home}/munge.{name}" for name in ("key", "pid", "log", "seed")
        ]
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={self.home}/munge.socket", *files
        )
        wait_until((self.home / "munge.socket").exists, self.logs)
        self._daemon("slurmctld", "-D")
        for node in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            (self.home / f"spool.{node}").mkdir()
            self._daemon("slurmd", "-D", "-N", node)
        wait_until(self._is_idle, self.logs)

    def _daemon(self, *command):
        with (self.home / f"{command[0]}.{len(self.daemons)}.log").open("w") as log:
            daemon = subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.home)
        self.daemons.append(daemon)

    def _has_lost_a_daemon(self):
        return any(daemon.poll() is not None for daemon in self.daemons)

    def _is_idle(self):
        if self._has_lost_a_daemon():
            pytest.fail(self.logs())
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.env,
            capture_output=True,
            text=True,
        )
        return done.returncode == 0 and set(done.stdout.split()) == {"idle"}

    def end(self):
        try:
            # The processes of a job outlive the daemons, which therefore end after them.
            if not self._has_lost_a_daemon():
                self.call("scancel", "--user=root")
                wait_until(self._is_idle, self.logs)
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
                daemon.wait(timeout=TIMEOUT)

    def logs(self):
        paths = sorted(self.home.glob("*.log")) + sorted(self.project.glob("slurm-*.txt"))
        return "\n".join(f"== {path.name}\n{path.read_text()[-4000:]}" for path in paths)

    def call(self, *command, cwd=None, **env):
        """Return what a program of SLURM prints; a failure shows all."""
        return run([*map(str, command)], cwd or self.project, **{**self.env, **env})

    def submit(self, output, *words, options=(), **env):
        """Submit train.sbatch in the folder of the project: a Job."""
        words = ["OUTPUT_DIR", output, *words]
        number = self.call("sbatch", "--parsable", *options, "train.sbatch", *words, **env)
        return Job(self, number.strip(), self.project / output)


class Job:
    def __init__(self, cluster, number, output):
        self.cluster = cluster
        self.number = number
        self.output = output

    def about(self):
        """What SLURM says about this job: {"JobState": "RUNNING", ...}."""
        line = self.cluster.call("scontrol", "show", "job", "--oneliner", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def log(self):
        (path,) = self.cluster.project.glob(f"slurm-{self.number}*")
        return path.read_text()

    def wait_for_training(self):
        wait_until((self.output / "metrics.json").exists, self.cluster.logs)

    def has_ended(self):
        on_its_way = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
        return self.about()["JobState"] not in on_its_way

    def wait_for_restart(self):
        wait_until(lambda: self.about()["Restarts"] != "0" or self.has_ended(), self.cluster.logs)
        assert self.about()["Restarts"] != "0", self.log()

    def wait_for_end(self):
        """Wait until all processes of the job have ended; return its state."""
        wait_until(self.has_ended, self.cluster.logs)
        return self.about()["JobState"]

    def weights(self):
        return torch.load(self.output / "model_final.pth")["model"]

"""The section `[cluster]`: hosts of a run and how they are reached.

The resources of hosts and the placement of processes are in `[placement]`, which is the same
wherever the run is launched.
"""

from collections.abc import Iterator
from ipaddress import ip_network
from typing import Annotated, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    MOST_ENTRIES,
    MOST_HOSTS,
    FilePath,
    Seconds,
    Section,
    repeated,
)
from composer_mesh.configs.plugins import registered

ClusterKind = Annotated[str, registered("launchers")]
Strings = Annotated[tuple[str, ...], Field(strict=False, max_length=MOST_ENTRIES)]
Port = Annotated[int, Field(ge=0, le=65535)]
CHANNEL = r"(tls|tcp)://[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}$"
IDENTITY = r"([A-Za-z0-9][A-Za-z0-9_-]*<[1-9A-HJ-NP-Za-km-z]{1,11}>@)?"
Address = Annotated[str, Field(pattern=f"^{CHANNEL}", max_length=300)]
ProcessAddress = Annotated[str, Field(pattern=f"^{IDENTITY}{CHANNEL}", max_length=400)]


class SlurmConfig(Section):
    """Parameters of the Slurm batch job."""

    partition: str = ""
    """Partition to submit to; empty is the cluster's default."""

    account: str = ""
    """Account to charge; empty is the user's default."""

    qos: str = ""
    """Quality of service; empty is the default."""

    time_limit: Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")] = "24:00:00"
    """Wall time of one job, in sbatch format."""

    grace_s: Annotated[int, Field(ge=1, le=86_400)] = 120
    """Seconds before the time limit at which the run writes a checkpoint and stops."""

    resubmit: bool = True
    """Resubmit the job and resume if its time limit expires before the run ends."""

    exclusive: bool = True
    """Allocate complete nodes; otherwise only the cores, memory and GPUs of placement.hosts."""

    setup: Strings = ()
    """Shell lines to execute first on the first node, for example "module load cuda"."""

    options: Strings = ()
    """Further sbatch options, one string each, such as "--constraint=h100"."""


class KubernetesConfig(Section):
    """Parameters of the Kubernetes objects."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)] = (
        "default"
    )
    """Namespace of all objects of the run."""

    flavour: Literal["manifests", "monarchmesh"] = "manifests"
    """Standard Kubernetes objects, or Monarch's MonarchMesh where it is installed."""

    image: str = ""
    """Container image that contains composer-mesh; required to launch."""

    volume: str = ""
    """Persistent volume claim that every pod can write, for run directories and models."""

    mount: str = "/runs"
    """Mount path of the volume in each pod."""

    secrets: Strings = ()
    """Secrets whose keys become environment variables of the controller's pod: API keys."""

    service_account: str = ""
    """Service account of the pods; empty is the namespace's default."""

    rdma_resource: str = ""
    """RDMA device plugin resource that each worker requests once, such as "rdma/hca"."""

    node_selector: dict[str, str] = Field(default_factory=dict, max_length=MOST_ENTRIES)
    """Labels that a node must have to run a pod of the run."""


class SshConfig(Section):
    """SSH access to hosts; without this section workers must be started on the hosts."""

    destinations: Strings = ()
    """SSH destination of each host, in the order of cluster.workers; their addresses when empty."""

    options: Strings = ()
    """Further ssh arguments, such as "-i", "/home/me/.ssh/cluster"."""

    tunnel: bool = False
    """Bind only loopback addresses, and tunnel every connection between hosts through ssh."""


class ClusterConfig(Section):
    """Hosts of a run and how they are reached."""

    kind: ClusterKind = "local"
    """"local": this machine; "hosts": workers at given addresses; else a scheduler finds hosts."""

    workers: Annotated[tuple[ProcessAddress, ...], Field(strict=False, max_length=MOST_HOSTS)] = ()
    """Address of each worker, such as "tls://10.0.0.5:22300", in the order of placement.hosts.
    If the hosts reach it under another address, write an identity, such as
    "gpu-0<2>@tls://a:22300"."""

    address: Address | None = None
    """Controller address for workers; by default the source address that it uses towards the first
    worker."""

    subnets: Strings = ()
    """Networks in which a host may listen, such as "10.0.0.0/8"; any private one when empty."""

    authority: FilePath | None = None
    """Folder of the certificate authority that hosts trust; created by the run when not set."""

    lease_s: Seconds = 15.0
    """Seconds without contact to the controller after which a host ends its processes."""

    attach_s: Seconds = 300.0
    """Seconds to wait for all hosts when a run starts."""

    python: str = ""
    """Python interpreter with composer-mesh on the hosts; empty is the launcher's own path."""

    ssh: SshConfig | None = None
    """SSH access from the launcher to hosts, and whether connections are tunnelled."""

    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """The Slurm batch job."""

    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    """The Kubernetes pods."""

    @property
    def remote(self) -> bool:
        """Whether actors run on workers instead of the controller's own process tree."""
        return self.kind != "local"

    def _problems(self) -> Iterator[str]:
        if self.kind == "hosts" and not self.workers:
            yield (
                "kind is 'hosts' but workers is empty: set cluster.workers to the address of each "
                'host, such as ["tls://10.0.0.5:22300", "tls://10.0.0.6:22300"]'
            )
        if self.kind != "hosts" and self.workers:
            yield (
                f"workers names {len(self.workers)} addresses but kind is {self.kind!r}, which "
                "finds its hosts itself: remove cluster.workers, or set cluster.kind to 'hosts'"
            )
        channels = [one.rpartition("@")[2] for one in self.workers]
        for address in repeated(channels):
            yield (
                f"workers has {address!r} {channels.count(address)} times, and a port has "
                "one worker: name each once"
            )
        schemes = {one.partition(":")[0] for one in (*channels, self.address) if one}
        if len(schemes) > 1:
            yield (
                f"addresses are of {' and '.join(sorted(schemes))}, which cannot communicate: "
                "write all as tls://, or all as tcp://"
            )
        for subnet in self.subnets:
            try:
                ip_network(subnet)
            except ValueError as error:
                yield (
                    f"subnets has {subnet!r}, which is not a network ({error}): write one as "
                    '"10.0.0.0/8"'
                )

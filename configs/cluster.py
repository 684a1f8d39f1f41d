"""Where the hosts of a run are: the section `[cluster]`.

What a host has, and which process comes to which, is the section `[placement]`: that part of a
config stays the same wherever the run is launched. Nothing here reaches out to a host.
"""

from ipaddress import ip_network
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from composer_mesh.configs.base import FilePath, Positive, Section

ClusterKind = Literal["local", "hosts", "slurm", "kubernetes"]
Strings = Annotated[tuple[str, ...], Field(strict=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
ADDRESS = r"^(tls|tcp)://[A-Za-z0-9.:\[\]_-]+:[0-9]{1,5}$"
Address = Annotated[str, Field(pattern=ADDRESS)]


class SlurmConfig(Section):
    """What the batch job asks Slurm for."""

    partition: str = ""
    """Partition to submit to; empty is the cluster's own default."""

    account: str = ""
    """Account that is charged; empty is the user's own default."""

    qos: str = ""
    """Quality of service; empty is the default."""

    time_limit: Annotated[str, Field(pattern=r"^([0-9]+-)?[0-9]+(:[0-9]{1,2}){0,2}$")] = "24:00:00"
    """Wall time of one job, as sbatch takes it."""

    grace_s: Annotated[int, Field(ge=1)] = 120
    """Seconds before the time limit at which the run writes a checkpoint and stops."""

    resubmit: bool = True
    """Queue the job again when its time was over before the run was, and resume."""

    exclusive: bool = True
    """Take whole nodes; without it, only the cores, memory and GPUs that placement.hosts names."""

    setup: Strings = ()
    """Lines of shell before anything else on the first node, for example "module load cuda"."""

    options: Strings = ()
    """Further options of sbatch, each a whole one such as "--constraint=h100"."""


class KubernetesConfig(Section):
    """What the run asks Kubernetes for."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$")] = "default"
    """Namespace of everything that belongs to the run."""

    flavour: Literal["manifests", "monarchmesh"] = "manifests"
    """Plain objects that every cluster knows, or Monarch's MonarchMesh where it is installed."""

    image: str = ""
    """Container image with composer-mesh in it; launch refuses without one."""

    volume: str = ""
    """Persistent volume claim that every pod can write, for run directories and models."""

    mount: str = "/runs"
    """Where that volume is in each pod."""

    secrets: Strings = ()
    """Secrets whose keys become environment variables of every pod: API keys."""

    service_account: str = ""
    """Service account of the pods; empty is the namespace's own default."""

    rdma_resource: str = ""
    """Resource of an RDMA device plugin that each worker asks for one of, such as "rdma/hca"."""

    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have to get a pod of the run."""


class SshConfig(Section):
    """How hosts are reached by ssh; the section's absence means that workers are started there."""

    destinations: Strings = ()
    """What ssh calls each host, in the order of cluster.workers; their addresses when empty."""

    options: Strings = ()
    """Further arguments of ssh, such as "-i", "/home/me/.ssh/cluster"."""

    tunnel: bool = False
    """Bind nothing but loopback anywhere, and carry every connection between hosts through ssh."""


class ClusterConfig(Section):
    """Where the hosts are and how they are reached."""

    kind: ClusterKind = "local"
    """"local": this machine; "hosts": workers at given addresses; else a scheduler finds hosts."""

    workers: Annotated[tuple[Address, ...], Field(strict=False)] = ()
    """Address of each worker, such as "tls://10.0.0.5:22300", in the order of placement.hosts."""

    address: Address | None = None
    """Where workers reach the controller; the address from which it reaches the first, if unset."""

    subnets: Strings = ()
    """Networks whose addresses a host may listen on, such as "10.0.0.0/8"; any private if empty."""

    authority: FilePath | None = None
    """Folder of the certificate authority that hosts trust; the run makes its own if unset."""

    lease_s: Positive = 15.0
    """Seconds without the controller after which a host ends all that it runs for it."""

    attach_s: Positive = 300.0
    """Longest wait for all hosts to be there when a run starts."""

    python: str = ""
    """Interpreter with composer-mesh on the hosts; empty is the path of the launcher's own."""

    ssh: SshConfig | None = None
    """How the launcher reaches hosts, and whether connections go through it."""

    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    """The batch job."""

    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    """The pods."""

    @property
    def remote(self) -> bool:
        """Whether actors live on workers and not in the controller's own process tree."""
        return self.kind != "local"

    @model_validator(mode="after")
    def _workers_fit_the_kind(self) -> Self:
        if self.kind == "hosts" and not self.workers:
            raise ValueError(
                "kind is 'hosts' but workers is empty: set cluster.workers to the address of each "
                'host, such as ["tls://10.0.0.5:22300", "tls://10.0.0.6:22300"]'
            )
        if self.kind != "hosts" and self.workers:
            raise ValueError(
                f"workers names {len(self.workers)} addresses but kind is {self.kind!r}, which "
                "finds its hosts itself: remove cluster.workers, or set cluster.kind to 'hosts'"
            )
        for address in self.workers:
            if self.workers.count(address) > 1:
                raise ValueError(
                    f"workers has {address!r} {self.workers.count(address)} times, and a port has "
                    "one worker: name each once"
                )
        return self

    @model_validator(mode="after")
    def _one_scheme(self) -> Self:
        schemes = {one.partition(":")[0] for one in (*self.workers, self.address) if one}
        if len(schemes) > 1:
            raise ValueError(
                f"addresses are of {' and '.join(sorted(schemes))}, which do not understand each "
                "other: write all as tls://, or all as tcp://"
            )
        return self

    @model_validator(mode="after")
    def _subnets_are_networks(self) -> Self:
        for subnet in self.subnets:
            try:
                ip_network(subnet)
            except ValueError as error:
                raise ValueError(
                    f"subnets has {subnet!r}, which is no network ({error}): write one as "
                    '"10.0.0.0/8"'
                ) from None
        return self

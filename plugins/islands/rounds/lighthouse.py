"""What islands by torchft need before anything is started: the package, and a lighthouse."""

from collections.abc import Callable
from importlib.util import find_spec

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.store.port import StoreUnfit

LOOK_S = 10.0


class TorchftMissing(StoreUnfit):
    """islands.lighthouse is set, but torchft is not installed."""

    def __str__(self) -> str:
        return (
            "islands.lighthouse needs the package torchft, which is not installed: pip install "
            "'composer-mesh[torchft]', or give islands.store"
        )


class LighthouseUnfit(StoreUnfit):
    """A lighthouse or an address cannot be used: which, and why."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(address, why)

    def __str__(self) -> str:
        return (
            f"{self.args[0]}: {self.args[1]}: start torchft_lighthouse where all islands reach "
            "it, and give its address"
        )


def check_torchft(config: IslandsConfig, find: Callable[[str], object] = find_spec) -> None:
    """Raise `TorchftMissing` for islands that need it; imports nothing."""
    if config.lighthouse is not None and find("torchft") is None:
        raise TorchftMissing()


def check_lighthouse(address: str) -> None:
    """Raise `LighthouseUnfit` unless a lighthouse answers at an address."""
    import httpx

    try:
        page = httpx.get(address, timeout=LOOK_S, trust_env=False).text
    except httpx.HTTPError as error:
        raise LighthouseUnfit(address, f"does not answer ({error})") from error
    if "torchft" not in page:
        raise LighthouseUnfit(address, "answers, but is no lighthouse of torchft")

"""What the certificates of a run's hosts prove, and what they keep out."""

from __future__ import annotations

import os
import ssl
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from composer_mesh.mesh.hosts.certificates import (
    BadAuthority,
    make_authority,
    tls_environment,
)

HOSTS = ["10.0.0.5", "fd00::5", "worker-0.run"]


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / ".tls"
    make_authority(folder)
    return folder


def context(env: dict[str, str], server: bool) -> ssl.SSLContext:
    """One end as Monarch has it: it shows its own certificate and demands the other's."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.load_cert_chain(env["HYPERACTOR_TLS_CERT"], env["HYPERACTOR_TLS_KEY"])
    made.load_verify_locations(env["HYPERACTOR_TLS_CA"])
    made.verify_mode = ssl.CERT_REQUIRED
    made.verify_flags |= ssl.VERIFY_X509_STRICT
    return made


def shake(server: dict[str, str], client: dict[str, str], called: str) -> None:
    """A whole handshake in memory, in which the client calls the server by a name."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        context(client, False).wrap_bio(down, up, server_hostname=called),
        context(server, True).wrap_bio(up, down, server_side=True),
    ]
    for _ in range(3):
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                continue
    assert not ends


@pytest.mark.parametrize("called", HOSTS)
def test_hosts_of_one_authority_trust_each_other_by_any_of_their_names(
    authority: Path, called: str
) -> None:
    server = tls_environment(authority, authority / "server", HOSTS)
    client = tls_environment(authority, authority / "client", ["10.0.0.6"])
    shake(server, client, called)


@pytest.mark.parametrize("called", ["10.0.0.9", "worker-1.run", "localhost"])
def test_a_host_that_is_called_by_another_name_is_not_believed(
    authority: Path, called: str
) -> None:
    server = tls_environment(authority, authority / "server", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        shake(server, server, called)


@pytest.mark.parametrize("stranger", ["client", "server"])
def test_a_certificate_of_another_authority_is_refused_by_either_end(
    authority: Path, tmp_path: Path, stranger: str
) -> None:
    """The stranger even trusts the run's authority; only its own certificate is of another."""
    make_authority(tmp_path / "other")
    ends = {
        "server": tls_environment(authority, authority / "server", HOSTS),
        "client": tls_environment(authority, authority / "client", HOSTS),
    }
    foreign = tls_environment(tmp_path / "other", tmp_path / "foreign", HOSTS)
    ends[stranger] = {**foreign, "HYPERACTOR_TLS_CA": ends[stranger]["HYPERACTOR_TLS_CA"]}
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake(ends["server"], ends["client"], HOSTS[0])


def test_a_host_certificate_cannot_sign_another_host(authority: Path, tmp_path: Path) -> None:
    """Whoever gets into one host has that host's key and cannot make new members of the run."""
    good = tls_environment(authority, authority / "server", HOSTS)
    fake = tmp_path / "fake"
    fake.mkdir(mode=0o700)
    (fake / "ca.pem").write_bytes(Path(good["HYPERACTOR_TLS_CERT"]).read_bytes())
    (fake / "ca.key").write_bytes(Path(good["HYPERACTOR_TLS_KEY"]).read_bytes())
    (fake / "ca.key").chmod(0o600)
    forged = tls_environment(fake, tmp_path / "forged", HOSTS)
    chain = Path(forged["HYPERACTOR_TLS_CERT"])
    chain.write_bytes(chain.read_bytes() + (fake / "ca.pem").read_bytes())
    forged["HYPERACTOR_TLS_CA"] = good["HYPERACTOR_TLS_CA"]
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake(good, forged, HOSTS[0])


def test_keys_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    os.umask(0)
    make_authority(tmp_path / ".tls")
    env = tls_environment(tmp_path / ".tls", tmp_path / "own", HOSTS)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / ".tls", tmp_path / "own", *tmp_path.glob("*/*"))
    }
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert Path(env["HYPERACTOR_TLS_KEY"]) in modes


def test_an_authority_that_is_there_is_kept(authority: Path) -> None:
    before = {path.name: path.read_bytes() for path in authority.iterdir()}
    make_authority(authority)
    assert {path.name: path.read_bytes() for path in authority.iterdir()} == before
    assert set(before) == {"ca.pem", "ca.key"}


def test_several_that_make_it_at_once_agree_on_one(tmp_path: Path) -> None:
    folder = tmp_path / ".tls"
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(make_authority, folder) for _ in range(8)]:
            made.result()
    env = tls_environment(folder, tmp_path / "own", HOSTS)
    shake(env, env, HOSTS[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tls", "own"]


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "note").write_text("mine")
    with pytest.raises(BadAuthority, match=f"{tmp_path} cannot be made.*name a new folder"):
        make_authority(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_half_an_authority_is_named_and_not_completed(authority: Path, name: str) -> None:
    (authority / name).unlink()
    with pytest.raises(BadAuthority, match=f"not {name}: put {name} back, or remove the folder"):
        make_authority(authority)
    with pytest.raises(BadAuthority, match=f"{authority / name} cannot be read"):
        tls_environment(authority, authority / "own", HOSTS)


def test_a_key_that_others_can_read_is_refused(authority: Path) -> None:
    (authority / "ca.key").chmod(0o644)
    with pytest.raises(BadAuthority, match=r"ca\.key has mode 0644.*chmod 600"):
        tls_environment(authority, authority / "own", HOSTS)


def test_a_key_that_a_group_can_read_is_taken_as_a_secret_of_a_pod_has_it(authority: Path) -> None:
    (authority / "ca.key").chmod(0o440)
    env = tls_environment(authority, authority / "own", HOSTS)
    shake(env, env, HOSTS[0])


def test_the_key_of_another_authority_is_refused(authority: Path, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    (authority / "ca.key").write_bytes((tmp_path / "other/ca.key").read_bytes())
    with pytest.raises(BadAuthority, match=r"ca\.key is not the key of"):
        tls_environment(authority, authority / "own", HOSTS)


def test_what_is_no_key_is_refused_and_not_shown(authority: Path) -> None:
    (authority / "ca.key").write_text("hunter2")
    with pytest.raises(BadAuthority, match="no readable") as refused:
        tls_environment(authority, authority / "own", HOSTS)
    assert "hunter2" not in str(refused.value)


def test_nothing_is_made_for_nobody(authority: Path) -> None:
    with pytest.raises(ValueError, match="at least one address"):
        tls_environment(authority, authority / "own", [])


def test_a_certificate_that_is_made_again_replaces_the_pair(authority: Path) -> None:
    first = tls_environment(authority, authority / "own", HOSTS[:1])
    before = Path(first["HYPERACTOR_TLS_KEY"]).read_bytes()
    again = tls_environment(authority, authority / "own", HOSTS)
    assert again == first
    assert Path(again["HYPERACTOR_TLS_KEY"]).read_bytes() != before
    shake(again, again, "worker-0.run")


def test_making_certificates_loads_neither_torch_nor_monarch() -> None:
    code = (
        "import sys, composer_mesh.mesh.hosts.certificates, composer_mesh.mesh.hosts.address\n"
        "print([name for name in ('torch', 'monarch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

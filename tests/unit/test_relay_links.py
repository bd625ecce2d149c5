"""A kind of link that cannot work here is refused with a sentence."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from laminar.relay.links import LINKS, check_link
from laminar.relay.member import ChainRules
from laminar.relay.nixl_link import PACKAGES
from laminar.relay.process import RelayOrder
from laminar.schema.errors import UserError

HAS_NIXL = any(importlib.util.find_spec(package) for package in PACKAGES)
HAS_RDMA = Path("/sys/class/infiniband").is_dir()


def test_tcp_works_everywhere() -> None:
    check_link("tcp")
    assert set(LINKS) == {"tcp", "rdma", "nixl-tcp"}


@pytest.mark.skipif(HAS_NIXL, reason="NIXL is installed")
@pytest.mark.parametrize("kind", ["rdma", "nixl-tcp"])
def test_without_the_library_it_is_named(kind: str) -> None:
    with pytest.raises(UserError, match="nixl-cu12"):
        check_link(kind)


@pytest.mark.skipif(not HAS_NIXL or HAS_RDMA, reason="needs NIXL, and no RDMA network card")
def test_rdma_is_refused_where_there_is_none_and_never_quietly_something_else() -> None:
    check_link("nixl-tcp")
    with pytest.raises(UserError, match=r"link rdma was asked for, but UCX finds no rc transport .* use link tcp"):
        check_link("rdma")


@pytest.mark.skipif(HAS_RDMA, reason="has an RDMA network card")
def test_a_relay_process_that_cannot_link_as_asked_ends_with_one_sentence(tmp_path: Path) -> None:
    rules = ChainRules(relay_id="r", keeper_port=1, link="rdma")
    order = RelayOrder(secret=b"x", socket_path=str(tmp_path / "r"), rules=rules)
    command = [sys.executable, "-m", "laminar.relay.process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stderr is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        said = child.stderr.read().decode()
    assert child.returncode == 2
    assert said.strip().splitlines()[-1].startswith("laminar: ")
    assert "Traceback" not in said

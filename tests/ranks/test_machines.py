"""Ranks on two machines: two network namespaces, with separate host names.

Skipped where the system does not allow namespaces.
"""

import shutil
import subprocess
import sys

import pytest
from helpers import REPOSITORY, TIMEOUT, TINY
from helpers.ranks import TORCHRUN, environment, values, write_texts
from helpers.tally import CAMPAIGN

NAMESPACES = ["unshare", "--map-root-user", "--net", "--uts", "--mount", "--pid", "--fork"]
NAMESPACES += ["--kill-child", "--mount-proc", "bash", "-euc"]
# As on Debian and Ubuntu, the name of a machine is 127.0.1.1 on the machine itself.
SCRIPT = """
mount -t tmpfs tmpfs /run
ip netns add second
ip link add eth0 type veth peer name eth0 netns second
start() { # address, name, address and name of the other, RANK, command
  hostname $2
  printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n%s %s\\n' $2 $3 $4 > hosts.$2
  mount --bind hosts.$2 /etc/hosts
  ip link set lo up
  ip address add $1 dev eth0 $([[ $1 != *:* ]] || echo nodad)
  ip link set eth0 up
  cd $2
  RANK=$5 "${@:6}"
}
export -f start
nsenter --net=/run/netns/second unshare --uts --mount bash -c 'start "$@"' - \
  ${NET}2/$BITS second ${NET}1 first 1 "$@" &
start ${NET}1/$BITS first ${NET}2 second 0 "$@"
wait $!
"""


def namespaces_are_allowed() -> bool:
    probe = (
        "mount -t tmpfs tmpfs /run; ip link add eth0 type veth peer name eth1; command -v nsenter"
    )
    tools = all(map(shutil.which, ("unshare", "ip")))
    return tools and subprocess.run([*NAMESPACES, probe], capture_output=True).returncode == 0


@pytest.mark.skipif(not namespaces_are_allowed(), reason="the system does not allow namespaces")
@pytest.mark.parametrize(
    ("net", "bits", "launcher"),
    [("192.168.7.", 24, "variables")]
    + [("192.168.7.", 24, "torchrun"), ("fd12::", 64, "variables")] * CAMPAIGN,
)
def test_two_machines_train(tmp_path, net, bits, launcher):
    """Without GLOO_SOCKET_IFNAME: the ranks find the interface that connects the machines. Of two
    ranks, the one with the higher address, which is not 127.0.0.1, connects to the other."""
    for name in ("first", "second"):
        write_texts(tmp_path / name)
    variables = environment(NET=net, BITS=bits, HOME=tmp_path, PYTHONPATH=REPOSITORY)
    del variables["GLOO_SOCKET_IFNAME"]
    command = [sys.executable]
    if launcher == "torchrun":
        command += [*TORCHRUN[:2], "--nproc_per_node=1", "--nnodes=2", "--rdzv_backend=c10d"]
        command += ["--rdzv_endpoint=first:29400", "--rdzv_id=1"]
    else:
        variables |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "first", "MASTER_PORT": "29400"}
    training = [*TINY, "trainer.max_steps=2", "data.path=text.txt", "parallel.timeout=60"]
    done = subprocess.run(
        [*NAMESPACES, SCRIPT, "-", *command, REPOSITORY / "train.py", *training, "name=run"],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    assert len(values(tmp_path / "first" / "runs" / "run", "train/loss")) == 2

"""Hosts on this machine, to be switched off and cut off: network namespaces on one bridge.

They are made in a network, a mount and a process namespace of their own (`inside`), so that nothing of them is left
when whoever made them ends, and none of them reaches anything else.
"""

import shutil
import subprocess
from collections.abc import Sequence

HOSTS = 3
BRIDGE = "hosts"
_TOOLS = ("unshare", "nsenter", "ip", "mount", "sh")
_OWN = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_TRIAL = ("sh", "-c", "ip link add br0 type bridge && ip link add veth0 type veth peer name veth1")


def inside(command: Sequence[str]) -> list[str]:
    """The command, to run where hosts can be made, which end with it. Raises `OSError` where they cannot."""
    if missing := [name for name in _TOOLS if shutil.which(name) is None]:
        raise OSError(f"hosts need these programs (Debian: util-linux, iproute2): {', '.join(missing)}")
    for rights in ((), ("--user", "--map-root-user")):
        namespaces = ["unshare", *rights, *_OWN]
        if subprocess.run([*namespaces, *_TRIAL], capture_output=True).returncode == 0:
            # A shell as the first process of its namespace buries those whose parents were killed.
            return [*namespaces, "sh", "-c", '"$@"; exit $?', "sh", *command]
    raise OSError("hosts are network namespaces on a bridge: run it as root, or where users may have namespaces")


def address(host: int) -> str:
    """Of a host by its number; that of this process is the one beyond the last."""
    return f"10.77.0.{host + 1}"


def make_network() -> None:
    """The bridge, with this process on it, and no host yet."""
    _sh(f"mount -t tmpfs tmpfs /run && ip link set lo up && ip link add {BRIDGE} address {_mac(HOSTS)} type bridge")
    _sh(f"ip addr add {address(HOSTS)}/24 dev {BRIDGE} && ip link set {BRIDGE} up")


def plug_in(host: int) -> None:
    """A new host, on the bridge. All know each other's hardware addresses for good: with one that is asked for, whoever
    is cut off would be told so after a while, and a network that drops packets tells nobody."""
    name, port = _name(host), _port(host)
    _sh(f"ip netns add {name} && ip link add {port} type veth peer name eth0 address {_mac(host)} netns {name}")
    inner = f"ip -n {name}"
    _sh(f"{inner} link set lo up && {inner} addr add {address(host)}/24 dev eth0 && {inner} link set eth0 up")
    for other in set(range(HOSTS + 1)) - {host}:
        _sh(f"{inner} neigh replace {address(other)} lladdr {_mac(other)} dev eth0 nud permanent")
    _sh(f"ip neigh replace {address(host)} lladdr {_mac(host)} dev {BRIDGE} nud permanent")
    _sh(f"ip link set {port} up")
    mend(host)


def cut(host: int) -> None:
    """From now on all that it sends, and all that is sent to it, is lost without a word."""
    _sh(f"ip link set {_port(host)} nomaster")


def mend(host: int) -> None:
    """Ends a `cut`."""
    _sh(f"ip link set {_port(host)} master {BRIDGE}")


def pull_out(host: int) -> None:
    """Removes it, as when it is switched off: what its processes might still say reaches nobody."""
    _sh(f"ip link del {_port(host)} && ip netns del {_name(host)}")


def entering(host: int) -> list[str]:
    """Goes before a command that is to run on the host."""
    return ["nsenter", f"--net=/run/netns/{_name(host)}"]


def _name(host: int) -> str:
    return f"host-{host}"


def _port(host: int) -> str:
    return f"port-{host}"


def _mac(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def _sh(line: str) -> None:
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{line}: {done.stderr.strip()}")

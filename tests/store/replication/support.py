"""Dying hosts, and the invariants of copies."""

from mooncake_serving.store.directory import Directory

from ..cluster.support import Host


def die(host: Host) -> None:
    """From now on answer and publish nothing: the directory still considers it alive."""
    host.node.membership.stop()
    host.engine.close()


def forget(directory: Directory, host: Host) -> None:
    """What the directory does when a membership expires."""
    directory.leave(host.node.name)


def pools_of(directory: Directory, host: Host, key) -> set[str]:
    return set(directory.holders(host.cluster.keyspace.keys([key]))[0])


def hosts_with(hosts: list[Host], key) -> list[str]:
    """Names of the hosts whose pools have an object, whatever the directory says."""
    return [host.node.host for host in hosts if host.store is not None and host.store.exists(key)]

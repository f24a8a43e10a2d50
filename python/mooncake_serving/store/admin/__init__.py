"""Administer a store over HTTP: health, metrics, objects, members, draining.

::

    with AdminServer(store, port=9410) as admin:
        print(admin.url)

Needs the packages of the extra ``store``. docs/store_admin.md has all routes.
"""

try:
    from .app import make_app
    from .cluster import Cluster, Draining
    from .node_cluster import NodeCluster
    from .server import AdminServer
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("mooncake"):
        raise
    raise ModuleNotFoundError(
        f"{__name__}: {missing.name} is not installed: pip install 'mooncake-kernels[store]'",
        name=missing.name,
    ) from None

__all__ = ["AdminServer", "Cluster", "Draining", "NodeCluster", "make_app"]

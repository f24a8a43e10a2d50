"""Administer a store over HTTP: health, metrics, objects, members, draining.

::

    with AdminServer(store, port=9410, token=token) as admin:
        print(admin.url)

Needs the packages of the extra ``store``. docs/store/admin.md has all routes.
"""

from mooncake_kernels.extras import needed_from

with needed_from("store", __name__):
    from .cluster import Cluster, Draining, NodeCluster
    from .server import AdminServer, make_app

__all__ = ["AdminServer", "Cluster", "Draining", "NodeCluster", "make_app"]

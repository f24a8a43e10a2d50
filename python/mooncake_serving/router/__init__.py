"""The conductor as a service: a server of the OpenAI API in front of engines.

``python -m mooncake_serving.router --config router.toml`` runs it; ``make_app`` makes its ASGI app.
Needs the packages of the extra ``router``. docs/serving/router.md says how to set it up.
"""

from mooncake_kernels.extras import needed_from

with needed_from("router", __name__):
    from .app import make_app
    from .config import (
        AdmissionConfig,
        CopiesConfig,
        CostConfig,
        InstanceConfig,
        RouterConfig,
        StoreConfig,
        load_config,
        parse_config,
    )

__all__ = [
    "AdmissionConfig",
    "CopiesConfig",
    "CostConfig",
    "InstanceConfig",
    "RouterConfig",
    "StoreConfig",
    "load_config",
    "make_app",
    "parse_config",
]

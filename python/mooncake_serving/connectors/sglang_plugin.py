"""Our copies inside SGLang, as a plugin of the group ``sglang.srt.plugins``.

SGLang loads such plugins in each of its processes, so nothing is imported unless it is wanted.
"""

import logging
import os

SETTING = "MOONCAKE_KERNELS_ENGINE_COPIES"

log = logging.getLogger(__name__)


def register() -> None:
    """Call ``use_staging_copies`` if MOONCAKE_KERNELS_ENGINE_COPIES is 1. Idempotent; never raises:
    SGLang's own functions copy if ours cannot.
    """
    if SETTING not in os.environ:
        return
    try:
        from mooncake_kernels import config

        if config.current().engine_copies:
            from .sglang.copies import use_staging_copies

            use_staging_copies()
    except Exception as error:  # noqa: BLE001 - a plugin that raises may stop SGLang
        log.warning("SGLang's own functions fill its staging buffers: %s", error)

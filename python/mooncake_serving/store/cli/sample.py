"""What a pool reports, read on this host or from its admin server."""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolCounts

TIMEOUT_S = 10


@dataclass(frozen=True)
class Sample:
    """The state of a pool at one moment.

    Attributes:
        pool: path of the pool, as its host names it.
        time_s: from a clock of which only differences are meaningful.
        gauges: by metric name without its prefix.
        counts: of all processes.
        ssd: the same as ``gauges`` for the disk, if there is one, as reported by its server.
    """

    pool: str
    time_s: float
    gauges: Mapping[str, float]
    counts: PoolCounts
    ssd: Mapping[str, float] = field(default_factory=dict)

    @property
    def used_bytes(self) -> float:
        return self.gauges["capacity_bytes"] - self.gauges["free_bytes"]


class Source:
    """Source of samples: a pool of this host, or an admin server.

    Args:
        where: a path, or an address that begins with http.
        token: of the server.

    Raises:
        OSError, Unavailable, InvalidArgument: as ``ObjectPool.open``; or the server does not
            answer, or its pool.
    """

    def __init__(self, where: str, token: str | None):
        self._url = where.rstrip("/") if where.startswith(("http://", "https://")) else None
        self._token = token
        self._pool = ObjectPool.open(where) if self._url is None else None

    def sample(self) -> Sample:
        """Take a sample."""
        from ..metrics import GAUGES  # needs prometheus-client

        if self._pool is None:
            return self._ask()
        stats = self._pool.stats()
        gauges = {name: float(getattr(stats, field)) for name, (field, _) in GAUGES.items()}
        return Sample(self._pool.path, time.monotonic(), gauges, self._pool.counts())

    def _ask(self) -> Sample:
        from prometheus_client.parser import text_string_to_metric_families

        from ..metrics import COUNTERS, GAUGES, PREFIX

        text = request(f"{self._url}/metrics", self._token)
        values: dict[str, float] = {}
        pool = ""
        try:
            for family in text_string_to_metric_families(text.decode()):
                for one in family.samples:
                    values[one.name.removeprefix(PREFIX)] = one.value
                    pool = one.labels.get("pool", pool)
            if values.get("up") == 0:
                raise TimeoutError(f"{self._url} answers that a stopped process holds its pool")
            gauges = {name: values[name] for name in GAUGES}
            counts = {field: int(values[f"{name}_total"]) for name, (field, _) in COUNTERS.items()}
        except KeyError as missing:
            raise no_admin_server(self._url, f"it has no {missing}") from None
        except ValueError as error:
            raise no_admin_server(self._url, f"what it answers are no metrics ({error})") from None
        ssd = {name: value for name, value in values.items() if name.startswith("ssd_")}
        return Sample(pool, time.monotonic(), gauges, PoolCounts(**counts), ssd)


def no_admin_server(url: str | None, reason: str) -> OSError:
    """The error that something else listens at a URL."""
    return OSError(f"{url} is no admin server of a store: {reason}")


def request(
    url: str, token: str | None, body: bytes | None = None, *, method: str | None = None
) -> bytes:
    """Send a request to an admin server: ``method``, or else GET, or POST if there is a body of
    JSON.

    Raises:
        OSError: the server refuses or does not answer; the message has its reason.
        InvalidArgument: it is not an address.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        asking = urllib.request.Request(url, body, headers, method=method)
        with urllib.request.urlopen(asking, timeout=TIMEOUT_S) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        text = error.read(4096).decode(errors="replace")
        raise OSError(f"{url} answers {error.code}: {text}") from None
    except urllib.error.URLError as error:
        raise OSError(f"{url} does not answer: {error.reason}") from None
    except (ValueError, http.client.InvalidURL) as error:
        raise InvalidArgument(
            f"mooncake-store: URL must be an http address, got {url} ({error})"
        ) from None
    except (OSError, http.client.HTTPException) as error:  # while it answers
        raise OSError(f"{url} does not answer as a web server does: {error!r}") from None

"""The configuration of a router: one TOML file, each wrong entry of which is named."""

import difflib
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.metadata import MetadataUrl, parse_url
from mooncake_serving.conductor import Role

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.BOTH}
CONNECTORS = ("nixl", "mooncake", "mooncake_kernels", "sglang")
BOOTSTRAPPED = ("mooncake", "sglang")  # connectors whose prefill instances have a bootstrap server
RULES = ("accept_all", "baseline", "early", "predictive")
MOST = 2**31 - 1
MOST_INSTANCES = 1024  # a thread of each receives its events
MOST_FLOAT = sys.float_info.max
ENDPOINT = re.compile(
    r"tcp://(\[[0-9a-fA-F:.]+\]|[\w.-]+):([0-9]{1,5})|(ipc|inproc)://.{1,100}", re.ASCII
)


@dataclass(frozen=True)
class InstanceConfig:
    """An engine.

    Attributes:
        name: in decisions, headers and metrics: printable ASCII without ";"; unique.
        url: of its OpenAI server, without ``/v1``.
        role: ``Role.BOTH`` for an engine that decodes what it prefills.
        events: ZeroMQ endpoint where it publishes KV events; "": none.
        replay: endpoint where it sends missed events again; "": none.
        topic: of its events.
        bootstrap: of a prefill instance of a connector in ``BOOTSTRAPPED``, its bootstrap server.
        capacity_tokens: whose KV fits into its memory; 0: what it reports itself.
        max_batch_size: requests that it decodes at once.
    """

    name: str
    url: str
    role: Role
    events: str = ""
    replay: str = ""
    topic: str = ""
    bootstrap: str = ""
    capacity_tokens: int = 0
    max_batch_size: int = MOST


@dataclass(frozen=True)
class ClassConfig:
    """Objectives of one class of requests.

    Attributes:
        ttft_s: from arrival to the first token; infinite: none.
        tbt_s: between two tokens; infinite: none.
    """

    ttft_s: float = math.inf
    tbt_s: float = math.inf


@dataclass(frozen=True)
class AdmissionConfig(ClassConfig):
    """Objectives, and who is refused when they cannot be met.

    Its own objectives are those of requests that name no class.

    Attributes:
        rule: one of ``RULES``.
        decode_s: how long "predictive" assumes that a request decodes.
        limits: by vLLM's priority, the share of the objectives up to which a request is accepted.
        classes: by name, the objectives of requests that name it.
    """

    rule: str = "early"
    decode_s: float = 10.0
    limits: dict[int, float] = field(default_factory=dict)
    classes: dict[str, ClassConfig] = field(default_factory=dict)

    @property
    def has_objectives(self) -> bool:
        """Whether a request may be refused for its load."""
        all_of = (self, *self.classes.values())
        return any(math.isfinite(each.ttft_s) or math.isfinite(each.tbt_s) for each in all_of)


@dataclass(frozen=True)
class CostConfig:
    """What is assumed of the engines until their own times are known.

    Attributes:
        prefill: seconds per prompt, per new token, and per pair of tokens in attention.
        decode: seconds per step, per request in it, and per token that it attends to.
        output_tokens: that a request is expected to generate, at most its own limit.
    """

    prefill: tuple[float, ...] = (0.02, 1e-4, 0.0)
    decode: tuple[float, ...] = (0.02, 1e-4, 0.0)
    output_tokens: int = 256


@dataclass(frozen=True)
class CopiesConfig:
    """Hot prefixes are loaded by further engines, before requests need them there.

    Attributes:
        rate_per_holder: of :class:`~mooncake_serving.conductor.ReplicaPolicy`.
        max_holders: the same.
        max_per_s: copies that begin in a second.
    """

    rate_per_holder: float = 1.0
    max_holders: int = 4
    max_per_s: float = 1.0


@dataclass(frozen=True)
class StoreConfig:
    """A store that all engines share: what one has computed, another one loads from there.

    Attributes:
        kv_bytes_per_token: of the model.
        bytes_per_s: at which an engine loads.
        balancing_threshold: of :class:`~mooncake_serving.conductor.KVCacheCentric`.
        copies: None: engines load a prefix with the requests that need it, and not before.
    """

    kv_bytes_per_token: float
    bytes_per_s: float
    balancing_threshold: float = 2.0
    copies: CopiesConfig | None = None


@dataclass(frozen=True)
class RegistryConfig:
    """Where routers share the engines that have registered.

    Attributes:
        url: of the metadata server, with its password.
        namespace: of the engines: routers with the same one share them.
    """

    url: MetadataUrl
    namespace: str = "default"


@dataclass(frozen=True)
class RouterConfig:
    """All of the file.

    Attributes:
        instances: the engines, all of one model; others may register.
        host: to listen on.
        port: to listen on.
        connector: of the prefill and decode instances, one of ``CONNECTORS``.
        block_size: tokens of a block by which prefixes are compared; that of the engines, or a
            divisor of it.
        api_keys: one of which clients need; none: no client needs one.
        admin_keys: one of which is needed to register engines; none: nobody can.
        engine_api_key: that the engines need.
        max_body_bytes: of a request.
        max_held_bytes: of the bodies of all requests under way; others are refused.
        max_requests: under way at once; others are refused.
        max_instances: engines at once, of the file and registered.
        max_attempts: how often a request is placed before it fails.
        connect_s: after which an engine that does not accept a connection counts as down.
        silence_s: after which an engine that sends nothing fails a request.
        client_s: after which a client is given up whose headers or body have not come, or that
            reads nothing.
        health_s: between two looks at an engine.
        admission: see there.
        costs: see there.
        store: None: engines share none.
        registry: None: engines that register are this router's alone.
    """

    instances: tuple[InstanceConfig, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    connector: str = "nixl"
    block_size: int = 16
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    engine_api_key: str = ""
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 512 << 20
    max_requests: int = 4096
    max_instances: int = 64
    max_attempts: int = 3
    connect_s: float = 2.0
    silence_s: float = 300.0
    client_s: float = 60.0
    health_s: float = 2.0
    admission: AdmissionConfig = AdmissionConfig()
    costs: CostConfig = CostConfig()
    store: StoreConfig | None = None
    registry: RegistryConfig | None = None


def load_config(path: str | Path) -> RouterConfig:
    """Read the file of a router.

    Raises:
        InvalidArgument: it is no TOML, or an entry is missing, wrong or unknown: the message names
            it.
        OSError: it, or a file of keys that it names, cannot be read.
    """
    path = Path(path)
    try:
        content = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # also of numbers that Python does not read
        raise InvalidArgument(f"{path}: the file must be TOML, got an error: {error}") from None
    return parse_config(content, file=str(path))


def parse_config(content: dict[str, Any], *, file: str = "config") -> RouterConfig:
    """Check what a file contains; see :func:`load_config`."""
    top = _Table(content, file, "")
    instances = tuple(_instance(table) for table in top.tables("instance"))
    most_instances = max(RouterConfig.max_instances, len(instances))
    config = RouterConfig(
        instances=instances,
        host=top.text("host", RouterConfig.host),
        port=top.integer("port", 0, 65_535, RouterConfig.port),
        connector=top.choice("connector", CONNECTORS, RouterConfig.connector),
        block_size=top.integer("block_size", 1, 1 << 20, RouterConfig.block_size),
        api_keys=tuple(_keys(top, "api_keys_file")),
        admin_keys=tuple(_keys(top, "admin_keys_file")),
        engine_api_key=next(iter(_keys(top, "engine_api_key_file")), ""),
        max_body_bytes=top.integer("max_body_bytes", 1, MOST, RouterConfig.max_body_bytes),
        max_held_bytes=top.integer("max_held_bytes", 1, 2**62, RouterConfig.max_held_bytes),
        max_requests=top.integer("max_requests", 1, MOST, RouterConfig.max_requests),
        max_instances=top.integer("max_instances", 1, MOST_INSTANCES, most_instances),
        max_attempts=top.integer("max_attempts", 1, 100, RouterConfig.max_attempts),
        connect_s=top.seconds("connect_s", RouterConfig.connect_s),
        silence_s=top.seconds("silence_s", RouterConfig.silence_s),
        client_s=top.seconds("client_s", RouterConfig.client_s),
        health_s=top.seconds("health_s", RouterConfig.health_s),
        admission=_admission(top.table("admission")),
        costs=_costs(top.table("costs")),
        store=_store(top.table("store")) if top.has("store") else None,
        registry=_registry(top.table("registry")) if top.has("registry") else None,
    )
    top.end()
    _check_together(config, file)
    return config


def entries_of(instance: InstanceConfig) -> dict[str, Any]:
    """Return the table that describes an engine, without what is as by default."""
    told = {each.name: getattr(instance, each.name) for each in fields(instance)}
    defaults = {each.name: each.default for each in fields(instance)}
    role = next(name for name, role in ROLES.items() if role == instance.role)
    return {n: value for n, value in told.items() if value != defaults[n]} | {"role": role}


def parse_instance(content: Mapping[str, Any], connector: str) -> InstanceConfig:
    """Check one engine that registers, as one of a file is checked.

    Raises:
        InvalidArgument: an entry is missing, wrong or unknown: the message names it.
    """
    instance = _instance(_Table(dict(content), "register", ""))
    _check_bootstrap(instance, connector, "register")
    return instance


def _instance(table: "_Table") -> InstanceConfig:
    role = ROLES[table.choice("role", tuple(ROLES))]
    instance = InstanceConfig(
        name=table.name("name"),
        url=table.url("url"),
        role=role,
        events=table.endpoint("events"),
        replay=table.endpoint("replay"),
        topic=table.text("topic", "", may_be_empty=True),
        bootstrap=table.url("bootstrap", ""),
        capacity_tokens=table.integer("capacity_tokens", 1, 2**62, 0),
        max_batch_size=table.integer("max_batch_size", 1, MOST, MOST),
    )
    if instance.replay and not instance.events:
        table.refuse("replay", "given only with events", instance.replay)
    table.end()
    return instance


def _admission(table: "_Table") -> AdmissionConfig:
    limits = table.table("limits")
    classes = table.table("classes")
    ttft_s, tbt_s = table.seconds("ttft_s", math.inf), table.seconds("tbt_s", math.inf)
    admission = AdmissionConfig(
        ttft_s=ttft_s,
        tbt_s=tbt_s,
        rule=table.choice("rule", RULES, AdmissionConfig.rule),
        decode_s=table.seconds("decode_s", AdmissionConfig.decode_s),
        limits={limits.as_integer(name): limits.share(name) for name in limits.names()},
        classes={
            classes.checked_name(name): _class(classes.table(name), ttft_s, tbt_s)
            for name in classes.names()
        },
    )
    limits.end()
    table.end()
    return admission


def _class(table: "_Table", ttft_s: float, tbt_s: float) -> ClassConfig:
    objectives = ClassConfig(table.seconds("ttft_s", ttft_s), table.seconds("tbt_s", tbt_s))
    table.end()
    return objectives


def _costs(table: "_Table") -> CostConfig:
    costs = CostConfig(
        prefill=table.three("prefill", CostConfig.prefill),
        decode=table.three("decode", CostConfig.decode),
        output_tokens=table.integer("output_tokens", 1, MOST, CostConfig.output_tokens),
    )
    table.end()
    return costs


def _store(table: "_Table") -> StoreConfig:
    store = StoreConfig(
        kv_bytes_per_token=table.number("kv_bytes_per_token"),
        bytes_per_s=table.number("bytes_per_s"),
        balancing_threshold=table.number("balancing_threshold", 1.0, 2.0),
        copies=_copies(table.table("copies")) if table.has("copies") else None,
    )
    table.end()
    return store


def _copies(table: "_Table") -> CopiesConfig:
    copies = CopiesConfig(
        rate_per_holder=table.number("rate_per_holder", default=CopiesConfig.rate_per_holder),
        max_holders=table.integer("max_holders", 1, MOST_INSTANCES, CopiesConfig.max_holders),
        max_per_s=table.number("max_per_s", default=CopiesConfig.max_per_s),
    )
    table.end()
    return copies


def _registry(table: "_Table") -> RegistryConfig:
    password, variable = (
        next(iter(_keys(table, "password_file")), ""),
        table.text("password_env", ""),
    )
    if password and variable:
        table.refuse("password_env", "left out beside password_file", variable)
    if variable and not (password := os.environ.get(variable, "")):
        table.refuse("password_env", "an environment variable that is set", variable)
    namespace = table.text("namespace", RegistryConfig.namespace)
    if not re.fullmatch(r"[\w.-]{1,100}", namespace, re.ASCII):
        table.refuse("namespace", "1 to 100 of letters, digits and ._-", namespace)
    url = table.metadata_url("url")
    if password and any(url.login):
        table.refuse("url", "without a login beside a password", str(url))
    table.end()
    options = url.options | ({"password": password} if password else {})
    return RegistryConfig(replace(url, options=options), namespace)


def _keys(table: "_Table", name: str) -> Sequence[str]:
    """Read a file of secrets, one a line; none if the entry is not there."""
    path = table.text(name, "")
    if not path:
        return ()
    content = Path(path).read_bytes().decode(errors="replace")
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    if not keys or not all(key.isascii() and key.isprintable() for key in keys):
        table.refuse(name, "a file with a key of printable ASCII in each line", path)
    return keys


def _check_together(config: RouterConfig, file: str) -> None:
    """Refuse entries that are right alone, and not together."""
    for what in ("name", "url"):
        values = [getattr(instance, what) for instance in config.instances]
        if twice := [value for value in values if values.count(value) > 1]:
            raise InvalidArgument(f"{file}: instance.{what} must be unique, got {twice[0]!r} twice")
    if config.max_held_bytes < config.max_body_bytes:
        raise InvalidArgument(
            f"{file}: max_held_bytes must be at least max_body_bytes, {config.max_body_bytes}, "
            f"got {config.max_held_bytes}"
        )
    if len(config.instances) > config.max_instances:
        raise InvalidArgument(
            f"{file}: max_instances must be at least the number of instances, "
            f"{len(config.instances)}, got {config.max_instances}"
        )
    for instance in config.instances:
        _check_bootstrap(instance, config.connector, file)


def _check_bootstrap(instance: InstanceConfig, connector: str, file: str) -> None:
    needs = connector in BOOTSTRAPPED and instance.role == Role.PREFILL
    if bool(instance.bootstrap) != needs:
        raise InvalidArgument(
            f"{file}: instance.bootstrap must be given for prefill instances of the connectors "
            f"{' and '.join(BOOTSTRAPPED)}, and for no others, got {instance.bootstrap!r} for "
            f"{instance.name}"
        )


class _Table:
    """A table of TOML, whose entries are taken one after another."""

    def __init__(self, content: Any, file: str, path: str):
        self._file, self._path = file, path
        if not isinstance(content, dict):
            raise InvalidArgument(f"{file}: {path} must be a table, got {shown(content)}")
        self._content, self._known = content, set[str]()

    def refuse(self, name: str, wanted: str, value: Any) -> NoReturn:
        raise InvalidArgument(
            f"{self._file}: {self._path}{name} must be {wanted}, got {shown(value, 80)}"
        )

    def end(self) -> None:
        """Refuse what nobody has asked for."""
        for name in sorted(set(self._content) - self._known):
            alike = difflib.get_close_matches(name, self._known, 1)
            hint = f": is {alike[0]} meant?" if alike else ""
            raise InvalidArgument(
                f"{self._file}: {self._path}{name} must not be there: it is unknown{hint}"
            )

    def has(self, name: str) -> bool:
        return name in self._content

    def names(self) -> list[str]:
        return list(self._content)

    def tables(self, name: str) -> list["_Table"]:
        value = self._take(name, [])
        if not isinstance(value, list):
            self.refuse(name, f"an array of tables, [[{name}]]", value)
        return [
            _Table(item, self._file, f"{self._path}{name}[{index}].")
            for index, item in enumerate(value)
        ]

    def table(self, name: str) -> "_Table":
        return _Table(self._take(name, {}), self._file, f"{self._path}{name}.")

    def text(self, name: str, default: str | None = None, *, may_be_empty: bool = False) -> str:
        value = self._take(name, default)
        if value is default and default is not None:
            return default
        is_text = isinstance(value, str) and value.isprintable()
        if not is_text or not (value or may_be_empty):
            self.refuse(name, "a text", value)
        return value

    def name(self, name: str) -> str:
        value = self.text(name)
        if not _is_name(value):
            self.refuse(name, 'printable ASCII without ";"', value)
        return value

    def checked_name(self, name: str) -> str:
        """Return the name of an entry that the user chooses."""
        if not _is_name(name):
            self.refuse(name, 'named in printable ASCII without ";"', name)
        return name

    def choice(self, name: str, among: Sequence[str], default: str | None = None) -> str:
        value = self._take(name, default)
        if value not in among:
            self.refuse(name, f"one of {', '.join(among)}", value)
        return value

    def url(self, name: str, default: str | None = None) -> str:
        value = self.text(name, default)
        if value == default:
            return value
        try:
            parts = urlsplit(value)
            host = parts.hostname or ""
            is_good = parts.scheme in ("http", "https") and bool(re.fullmatch(r"[\w.:%-]+", host))
            is_good = is_good and not parts.query and not parts.fragment and parts.port != 0
            host.encode("idna")  # as a connection does
            httpx.URL(value)
        except (ValueError, httpx.InvalidURL):  # of a port, a label that is empty or too long, ...
            is_good = False
        if not is_good or value.rstrip("/").endswith("/v1"):
            self.refuse(name, "a URL like http://10.0.0.1:8100, without /v1", value)
        return value.rstrip("/")

    def metadata_url(self, name: str) -> MetadataUrl:
        """Return the URL of a metadata server, which no error quotes."""
        forms = '"redis://host:port/db" or "http://host:port/metadata"'
        return parse_url(self._file, f"{self._path}{name}", self._take(name), forms)

    def endpoint(self, name: str) -> str:
        value = self.text(name, "")
        match = ENDPOINT.fullmatch(value)
        if value and not (match and 0 < int(match[2] or 1) <= 65_535):
            self.refuse(name, "a ZeroMQ endpoint like tcp://10.0.0.1:5557", value)
        return value

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        value = self._take(name, default)
        if value is default:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.refuse(name, f"an integer from {low} to {high}", value)
        return value

    def as_integer(self, name: str) -> int:
        if not re.fullmatch(r"0|-?[1-9][0-9]{0,9}", name):
            self.refuse(name, "a priority, as -1", name)
        return int(name)

    def number(self, name: str, low: float | None = None, default: float | None = None) -> float:
        value = self._take(name, default)
        if not _is_number(value) or not (value > 0 if low is None else value >= low):
            self.refuse(name, "positive" if low is None else f"at least {low:g}", value)
        return float(value)

    def seconds(self, name: str, default: float) -> float:
        self._known.add(name)
        return self.number(name) if name in self._content else default

    def share(self, name: str) -> float:
        value = self.number(name)
        if value > 1:
            self.refuse(name, "above 0 and at most 1", value)
        return value

    def three(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        value = self._take(name, list(default))
        is_good = isinstance(value, list) and len(value) == 3
        is_good = is_good and all(_is_number(one) and one >= 0 for one in value)
        if not is_good or not any(value):
            self.refuse(name, "three numbers of at least 0, not all of them 0", value)
        return tuple(map(float, value))

    def _take(self, name: str, default: Any = None) -> Any:
        self._known.add(name)
        return self._content.get(name, default)


def _is_name(value: str) -> bool:
    """Whether it can stand in a header of decisions."""
    return bool(value) and value.isascii() and value.isprintable() and ";" not in value


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, which a float can hold."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -MOST_FLOAT <= value <= MOST_FLOAT

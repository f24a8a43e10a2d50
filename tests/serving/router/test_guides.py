"""The router's files in docs/serving are such as it reads, and the commands beside them agree
with them: ports, endpoints, roles, settings.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mooncake_serving.conductor import Role
from mooncake_serving.connectors.vllm import settings
from mooncake_serving.router import RouterConfig, load_config
from mooncake_serving.router.__main__ import main
from mooncake_serving.router.call import COMPLETIONS, read_call

DOCS = Path(__file__).parents[3] / "docs/serving"
FILE = re.compile(r"cat >router\.toml <<'END'\n(.*?)^END$|^```toml\n(.*?)^```$", re.S | re.M)
COMMANDS = re.compile(r"^```(?:sh)?\n(.*?)^```$", re.S | re.M)
HEREDOC = re.compile(r"<<'END'\n.*?^END$", re.S | re.M)
# What a page starts is in one part of it: its heading, and the next one.
PARTS = {
    "vllm": ("in_front.md", "\n## vLLM", "\n## SGLang"),
    "sglang": ("in_front.md", "\n## SGLang", "\n## What to look at"),
    "handoff": ("handoff.md", "# Prefill in one vLLM", "\n## The request"),
}
ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}


def text_of(part: str) -> str:
    page, begin, end = PARTS[part]
    text = (DOCS / page).read_text()
    return text[text.index(begin) : text.index(end)]


def files_of(text: str) -> list[str]:
    return [here or fenced for here, fenced in FILE.findall(text)]


@pytest.fixture
def read(tmp_path):
    """Reads a file, with files of secrets in a folder of the test."""

    def of(text: str) -> RouterConfig:
        for name in re.findall(r'^\w+_file = "([^"]+)"', text, re.M):
            (tmp_path / Path(name).name).write_text("a-key\n")
            text = text.replace(name, str(tmp_path / Path(name).name))
        path = tmp_path / "router.toml"
        path.write_text(text)
        return load_config(path)

    return of


def commands_of(text: str) -> list[list[str]]:
    """Words of the commands that run in the background or end a line, without redirections."""
    commands: list[list[str]] = []
    for block in COMMANDS.findall(text):
        for line in re.split(r" &\n|(?<!\\)\n(?=\S)", HEREDOC.sub("", block)):
            if line.count("'") % 2 == 0 and line.strip():
                commands.append(shlex.split(line.replace("\\\n", " "), comments=True))
    return commands


def engines_of(text: str) -> list[dict[str, str]]:
    """Options of the engines that the commands start; those without a value have that of True."""
    engines = []
    for words in commands_of(text):
        if "serve" not in words[:4] and "sglang.launch_server" not in words:
            continue
        options = {"program": "vllm" if "vllm" in words else "sglang"}
        for word, after in zip(words, [*words[1:], ""], strict=True):
            if word.startswith("--"):
                options[word[2:]] = "True" if after.startswith("--") else after
        engines.append(options)
    return engines


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_every_file_on_a_page_is_read(page, read):
    text = (DOCS / page).read_text()
    files = files_of(text)
    assert len(files) == text.count("```toml") + text.count(">router.toml")
    for file in files:
        read(file)


@pytest.mark.parametrize("part", PARTS)
def test_engines_of_a_guide_are_those_of_its_file(part, read):
    [file] = files_of(text_of(part))
    config, engines = read(file), engines_of(text_of(part))
    by_port = {options["port"]: options for options in engines}
    assert len(by_port) == len(engines) == len(config.instances) == 2
    for instance in config.instances:
        options = by_port[instance.url.rpartition(":")[2]]
        assert f"http://{options['host']}:{options['port']}" == instance.url
        check = {"vllm": check_vllm, "sglang": check_sglang}[options["program"]]
        check(config, instance.role, options)
        told = json.loads(options.get("kv-events-config", "{}"))
        for name, here in (("endpoint", instance.events), ("replay_endpoint", instance.replay)):
            assert told.get(name, "").replace("*", options["host"]) == here
        assert told.get("topic", "") == instance.topic
        assert told.get("publisher", "zmq") == "zmq"


def check_vllm(config: RouterConfig, role: Role, options: dict[str, Any]) -> None:
    transfer = json.loads(options["kv-transfer-config"])
    assert config.connector == "mooncake_kernels"
    assert transfer["kv_connector"] == "MooncakeKernelsConnector"
    assert ROLES[transfer["kv_role"]] == role
    assert settings.parse(transfer["kv_connector_extra_config"]).handoff is not None
    told = json.loads(options.get("kv-events-config", '{"enable_kv_cache_events": true}'))
    assert told["enable_kv_cache_events"], "vLLM publishes nothing unless this is set"


def check_sglang(config: RouterConfig, role: Role, options: dict[str, Any]) -> None:
    assert config.connector == "sglang" and options["enable-metrics"] == "True"
    assert int(options["page-size"]) % config.block_size == 0
    assert options["disaggregation-mode"] == role.name.lower()
    if role == Role.PREFILL:
        [instance] = [one for one in config.instances if one.role == role]
        port = options["disaggregation-bootstrap-port"]
        assert instance.bootstrap == f"http://{options['host']}:{port}"


@pytest.mark.parametrize("part", PARTS)
def test_the_router_takes_the_requests_of_a_guide(part, read):
    text = text_of(part)
    port = read(files_of(text)[0]).port
    urls = re.findall(r"curl [^\n]*http://127\.0\.0\.1:(\d+)", text)
    assert urls and set(urls) == {str(port)}
    bodies = re.findall(r"-d '(\{.*\})'$", text, re.M)
    assert bodies or "Ask as [above]" in text
    for body in bodies:  # with variables of the shell
        raw = re.sub(r"'?\"?\$\w+( \$1)?\"?'?", "x", body)
        assert read_call(COMPLETIONS, raw.encode()).max_tokens == 32


def test_the_command_that_only_checks(read, tmp_path, capsys):
    read(files_of(text_of("vllm"))[0])
    assert "--config router.toml --check" in (DOCS / "in_front.md").read_text()
    assert main(["--config", str(tmp_path / "router.toml"), "--check"]) == 0
    assert "2 instances" in capsys.readouterr().out

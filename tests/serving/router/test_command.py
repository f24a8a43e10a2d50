import os
import re
import resource
import signal
import subprocess
import sys

import httpx

from tests.serving.router.support import MODEL, Engine
from tests.waiting import eventually

CONFIG = """
port = 0
health_s = 0.05
[[instance]]
name = "both"
role = "both"
url = "URL"
"""


def test_the_command_serves_until_it_is_told_to_stop(start, tmp_path):
    engine = start(Engine)
    path = tmp_path / "router.toml"
    path.write_text(CONFIG.replace("URL", engine.url))
    command = [sys.executable, "-m", "mooncake_serving.router", "--config", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://[0-9.]+:[0-9]+", process.stdout.readline())
            assert url is not None

            def is_healthy() -> bool:
                try:
                    return httpx.get(f"{url[0]}/health").status_code == 200
                except httpx.TransportError:
                    return False

            eventually(is_healthy)
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard
            body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
            answer = httpx.post(f"{url[0]}/v1/completions", json=body)
            assert answer.status_code == 200 and len(engine.calls) == 1
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)

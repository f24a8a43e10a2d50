"""vLLM's own MooncakeStoreConnector, unmodified, on our store, by the drop-in and a master."""

import contextlib
import json
import random
import subprocess
import sys
import time

from tests.metadata.support import free_port, redis_program
from tests.serving.in_vllm.support import num_in_blocks

WAIT_S = 60
CONNECTOR = {
    "kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "fail",
}  # fmt: skip


def test_one_engine_finds_what_another_has_computed(vllm, tmp_path):
    redis_program()
    port, config = free_port(), tmp_path / "mooncake.json"
    config.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"127.0.0.1:{port}",
                "global_segment_size": "128MB",
                "local_buffer_size": "16MB",
                "protocol": "tcp",
            }
        )
    )
    rng = random.Random(1)
    with contextlib.ExitStack() as stack:
        words = "--host", "127.0.0.1", "--port", str(port), "--directory-port", str(free_port())
        module = "mooncake_serving.compat.mooncake.master"
        command = [sys.executable, "-m", module, *words]
        master = subprocess.Popen(command, stdout=subprocess.PIPE)
        stack.callback(master.wait, WAIT_S)
        stack.callback(master.terminate)
        assert b"the directory is" in master.stdout.readline(), "it serves"
        engines = []
        for _ in range(2):
            engines.append(
                vllm.engine(CONNECTOR, {"MOONCAKE_CONFIG_PATH": str(config)}, is_one_process=False)
            )
            stack.callback(engines[-1].kill)
        for engine in engines:
            engine.wait()
        for wait_s in (1, 3, 9):  # one saves in the background, and the other must not save itself
            lengths = [rng.randrange(99, 600) for _ in range(4)]
            prompts = [[rng.randrange(5, 505) for _ in range(length)] for length in lengths]
            computed = engines[0].serve(prompts, 8)
            assert computed["num_cached"] == [0, 0, 0, 0]
            time.sleep(wait_s)
            found = engines[1].serve(prompts, 8)
            assert found["tokens"] == computed["tokens"], engines[1].tail()
            if all(found["num_cached"]):
                break
        assert found["num_cached"] == [num_in_blocks(prompt) for prompt in prompts]

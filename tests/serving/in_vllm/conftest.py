import os

import pytest

from tests.serving.in_vllm.support import Vllm


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory):
    """Where engines run; shared by all tests, which start their own."""
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    with Vllm(python, tmp_path_factory.mktemp("vllm")) as vllm:
        yield vllm


@pytest.fixture(scope="session")
def alone(vllm):
    """An engine without a connector, which says what is right."""
    return vllm.engine().wait()

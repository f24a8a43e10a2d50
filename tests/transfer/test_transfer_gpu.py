"""The tests of gpu/ pass in a process whose libcuda is fake, and in one with a real GPU."""

from ..fake_cuda.worlds import pass_with_a_gpu, pass_with_a_made_up_driver

FOLDER = "tests/transfer/gpu"


def test_gpu_tests_pass_with_a_fake_driver():
    pass_with_a_made_up_driver(FOLDER)


def test_gpu_tests_pass_with_a_gpu():
    pass_with_a_gpu(FOLDER)

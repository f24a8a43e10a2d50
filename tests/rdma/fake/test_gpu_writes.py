"""flush_writes(): when the data that NICs have written to a GPU can be read."""

import pytest

from mooncake_kernels import CudaError, Unavailable, rdma

from .gpu import NOT_SUPPORTED

HOST, MEMOPS = 1, 2  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_
NONE, OWNER, ALL_DEVICES = 0, 100, 200  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_


def test_flush_is_called_if_hardware_does_not_order_writes(gpu):
    assert rdma.flush_writes(0) is True
    assert gpu.get("num_flushes") == 1


@pytest.mark.parametrize("ordering", [OWNER, ALL_DEVICES])
def test_flush_is_skipped_if_hardware_orders_writes(gpu, ordering):
    gpu.set(writes_ordering=ordering, flush_options=0)
    assert rdma.flush_writes(0) is False
    assert gpu.get("num_flushes") == 0


@pytest.mark.parametrize("options", [0, MEMOPS])
def test_flush_is_unavailable_without_host_support(gpu, options):
    gpu.set(flush_options=options)
    with pytest.raises(Unavailable, match="cuda:0 neither orders the writes of NICs nor can the"):
        rdma.flush_writes(0)


def test_driver_error_in_flush_is_raised(gpu):
    gpu.set(flush_fails=NOT_SUPPORTED)
    with pytest.raises(CudaError, match="cuFlushGPUDirectRDMAWrites: CUDA_ERROR_NOT_SUPPORTED"):
        rdma.flush_writes(0)


@pytest.mark.parametrize("device", [-1, 2])
def test_flush_of_nonexistent_gpu_fails(gpu, device):
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"):
        rdma.flush_writes(device)


def test_flush_does_not_initialize_cuda(gpu):
    gpu.reset()
    with pytest.raises(CudaError, match="cuDeviceGet: CUDA_ERROR_NOT_INITIALIZED"):
        rdma.flush_writes(0)
    assert not gpu.get("is_initialized")

// torch.ops.mooncake_kernels.signal_flag, wait_flag and poll_flag: the torch binding of
// csrc/kv/ready_flags.h.
//
// Flags and reports are addresses, not tensors: torch.compile may pass an operator a copy of what
// it mutates, and no one else reads the copy. In compiled code, the operators are kept in place by
// the tensors that they name: `step`, a word in device memory, and `ties`, which are not accessed.
// Both are declared mutated, so readers of a tie stay after the operator and its earlier writers
// before it. The tensors also determine the device.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/check.h"
#include "kv/ready_flags.h"
#include "ops/cuda_stream.h"

namespace {

using mk::kv::FlagStep;
using mk::kv::SignalFlagParams;
using mk::kv::WaitFlagParams;
using mk::kv::WaitReport;
using mk::kv::WaitResult;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Step = std::optional<Tensor>;

FlagStep as_step(const char* op, const Step& step, bool on_cuda, int64_t value) {
  if (!step) return {value, nullptr};
  MK_CHECK(step->scalar_type() == torch::headeronly::ScalarType::Long && step->numel() == 1 &&
               step->is_cuda() == on_cuda,
           op, ": step must be one int64 on the device of ties");
  return {value, static_cast<const int64_t*>(step->data_ptr())};
}

SignalFlagParams signal_params(const Step& step, bool on_cuda, int64_t flag, int64_t value) {
  MK_CHECK(flag != 0 && flag % 8 == 0, "signal_flag: flag must be the address of an int64");
  return {reinterpret_cast<int64_t*>(flag), as_step("signal_flag", step, on_cuda, value)};
}

WaitFlagParams wait_params(const Step& step, bool on_cuda, int64_t flag, int64_t value,
                           int64_t report, int64_t timeout_ns) {
  MK_CHECK(flag != 0 && flag % 8 == 0, "wait_flag: flag must be the address of an int64");
  return {reinterpret_cast<const int64_t*>(flag), as_step("wait_flag", step, on_cuda, value),
          reinterpret_cast<WaitReport*>(report), timeout_ns};
}

void signal_flag_cpu(Step step, Tensors /*ties*/, int64_t flag, int64_t value) {
  signal_params(step, false, flag, value).run();
}

void wait_flag_cpu(Step step, Tensors /*ties*/, int64_t flag, int64_t value, int64_t report,
                   int64_t timeout_ns) {
  const WaitFlagParams params = wait_params(step, false, flag, value, report, timeout_ns);
  const WaitResult result = params.run();
  if (result == WaitResult::kReady) return;
  if (result == WaitResult::kTimedOut) params.report_timeout();
  throw std::runtime_error(mk::concat("wait_flag: step ", params.step.get(), " is not ready, but ",
                                      mk::kv::load_acquire(params.flag), " (",
                                      result == WaitResult::kTimedOut ? "timed out" : "given up",
                                      ")"));
}

// On the calling thread, for any device: returns 0 if ready, else a WaitResult. Writes no report.
int64_t poll_flag(int64_t flag, int64_t value, int64_t report, int64_t timeout_ns) {
  return static_cast<int64_t>(
      wait_params(std::nullopt, false, flag, value, report, timeout_ns).run());
}

#ifdef MK_WITH_CUDA
// Finds the device of the tensors; calls `run` with torch's current stream on it.
template <class Run>
void run_on_cuda(const char* op, const Step& step, const Tensors& ties, const Run& run) {
  MK_CHECK(step || !ties.empty(), op, ": step or ties must be given");
  const int32_t device = (step ? *step : ties[0]).get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  run(mk::ops::current_cuda_stream(device));
}

void signal_flag_cuda(Step step, Tensors ties, int64_t flag, int64_t value) {
  const SignalFlagParams params = signal_params(step, true, flag, value);
  run_on_cuda("signal_flag", step, ties,
              [&](void* stream) { mk::kv::launch_signal_flag(params, stream); });
}

void wait_flag_cuda(Step step, Tensors ties, int64_t flag, int64_t value, int64_t report,
                    int64_t timeout_ns) {
  const WaitFlagParams params = wait_params(step, true, flag, value, report, timeout_ns);
  run_on_cuda("wait_flag", step, ties,
              [&](void* stream) { mk::kv::launch_wait_flag(params, stream); });
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def("signal_flag(Tensor(a!)? step, Tensor(b!)[] ties, int flag, int value) -> ()");
  m.def(
      "wait_flag(Tensor(a!)? step, Tensor(b!)[] ties, int flag, int value, int report, "
      "int timeout_ns) -> ()");
  m.def("poll_flag(int flag, int value, int report, int timeout_ns) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CompositeExplicitAutograd, m) {
  m.impl("poll_flag", TORCH_BOX(&poll_flag));
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("signal_flag", TORCH_BOX(&signal_flag_cpu));
  m.impl("wait_flag", TORCH_BOX(&wait_flag_cpu));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("signal_flag", TORCH_BOX(&signal_flag_cuda));
  m.impl("wait_flag", TORCH_BOX(&wait_flag_cuda));
}
#endif

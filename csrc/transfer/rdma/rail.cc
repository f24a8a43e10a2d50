#include "transfer/rdma/rail.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace mk::transfer {
namespace {

constexpr int kMaxSends = 128;  // work requests in flight
constexpr int kPollBatch = 64;
constexpr double kFirstPauseS = 1, kLongestPauseS = 30;
constexpr double kOlder = 0.8;  // weight of what was measured before a completion
constexpr double kStaleS = 1;   // idle for that long, it may be faster than measured
constexpr double kLeastGbPerS = 0.01;

}  // namespace

rdma::Endpoint Rail::open() {
  close();
  active_port(nic_);
  queue_ = rdma::CompletionQueue::make(nic_.device, kMaxSends + 1);
  rdma::QueuePairOptions options = queue_pair_options(nic_);
  options.max_sends = kMaxSends;
  pair_ = rdma::QueuePair::make(queue_, options);
  return pair_->endpoint();
}

void Rail::connect(const rdma::Endpoint& peer, size_t peer_nic, double peer_gb_per_s) {
  pair_->connect(peer, connect_options(nic_));
  peer_nic_ = peer_nic;
  link_bytes_per_s_ = std::max(std::min(nic_.gb_per_s, peer_gb_per_s), kLeastGbPerS) * 1e9;
  measured_bytes_ = measured_s_ = 0;
  is_up_ = true;
  reason_.clear();
  if (std::exchange(was_up_, true)) counters_.num_reconnects += 1;
}

Slices Rail::close() noexcept {
  is_up_ = false;
  if (queue_) queue_->close();  // and the queue pair
  pair_.reset();
  queue_.reset();
  counters_.num_retries += under_way_.size();
  Slices left = std::exchange(under_way_, {});
  num_bytes_under_way_ = 0;
  written_.reset();
  transfer_.region.reset();
  flush_token_ = 0;
  return left;
}

// A rail that was so slow that it gets nothing is never measured again; so it is judged by its link
// once it is stale, and gets the slice that tells its speed.
double Rail::seconds_for(uint64_t num_bytes) const {
  const bool is_measured = measured_s_ > 0 && !is_stale();
  const double bytes_per_s = is_measured ? measured_bytes_ / measured_s_ : link_bytes_per_s_;
  return static_cast<double>(num_bytes_under_way_ + num_bytes) / bytes_per_s;
}

bool Rail::is_stale() const {
  return under_way_.empty() && Clock::now() - busy_since_ > std::chrono::duration<double>(kStaleS);
}

void Rail::submit(Slices& slices, const std::shared_ptr<const rdma::RemoteRegion>& remote) {
  if (!is_busy()) patience_ = Deadline::after(kPatienceS);
  if (under_way_.empty()) {
    busy_since_ = Clock::now();
    was_idle_ = true;
  }
  under_way_.splice(under_way_.end(), slices, slices.begin());
  Slice& slice = under_way_.back();
  slice.token = ++last_token_;
  num_bytes_under_way_ += slice.num_bytes;
  transfer_.reads = slice.reads;
  transfer_.region = slice.local->regions[index_];
  transfer_.remote = remote;
  transfer_.segments = slice.segments;
  transfer_.token = slice.token;
  if (!slice.reads) written_ = remote;
  post(transfer_);
  transfer_.region.reset();  // it may be closed
}

void Rail::flush() {
  if (!is_busy()) patience_ = Deadline::after(kPatienceS);
  rdma::Transfer nothing;
  nothing.remote = std::exchange(written_, nullptr);
  nothing.immediate = 0;
  nothing.token = flush_token_ = ++last_token_;
  post(nothing);
}

void Rail::post(const rdma::Transfer& transfer) {
  try {
    pair_->submit(transfer);
  } catch (const std::exception& error) {
    throw RailDown(error.what(), false);
  }
}

void Rail::collect(Slices& done) {
  try {
    queue_->poll(kPollBatch, completions_);
  } catch (const std::exception& error) {
    throw RailDown(error.what(), false);
  }
  if (!completions_.empty()) {
    patience_ = Deadline::after(kPatienceS);
  } else if (patience().passed()) {
    throw RailDown(concat(nic_.device->name(), ": did nothing for ", kPatienceS, " s"), false);
  }
  uint64_t num_bytes = 0;
  for (const rdma::Completion& completion : completions_) {
    if (completion.status != IBV_WC_SUCCESS) {
      const bool is_refused =
          completion.status == IBV_WC_REM_ACCESS_ERR || completion.status == IBV_WC_REM_INV_REQ_ERR;
      throw RailDown(concat(nic_.device->name(), ": ", rdma::status_text(completion.status)),
                     is_refused);
    }
    if (completion.token == flush_token_) {
      flush_token_ = 0;
      continue;
    }
    const auto is_it = [&](const Slice& slice) { return slice.token == completion.token; };
    const auto found = std::find_if(under_way_.begin(), under_way_.end(), is_it);  // the first
    (found->reads ? counters_.num_bytes_read : counters_.num_bytes_written) += found->num_bytes;
    counters_.num_pieces += 1;
    num_bytes += found->num_bytes;
    done.splice(done.end(), under_way_, found);
  }
  if (num_bytes == 0) return;
  const Clock::time_point now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - busy_since_).count();
  busy_since_ = now;
  num_bytes_under_way_ -= num_bytes;
  measure(static_cast<double>(num_bytes), seconds);
  pause_s_ = 0;
  was_refused_ = false;
}

// What comes first after a rest took the latency as well, so it is at least that fast: a few small
// requests do not make a rail look slower than others that have not been tried.
void Rail::measure(double num_bytes, double seconds) {
  if (!std::exchange(was_idle_, false)) {
    measured_bytes_ = kOlder * measured_bytes_ + num_bytes;
    measured_s_ = kOlder * measured_s_ + seconds;
  } else if (num_bytes * measured_s_ > measured_bytes_ * seconds) {
    measured_bytes_ = num_bytes;
    measured_s_ = seconds;
  }
}

void Rail::pause(const std::string& reason, size_t peer_nic) {
  counters_.num_failures += 1;
  reason_ = reason;
  peer_nic_ = peer_nic;
  pause_s_ = std::clamp(2 * pause_s_, kFirstPauseS, kLongestPauseS);
  try_at_ = Clock::now() +
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(pause_s_));
}

}  // namespace mk::transfer

#include "transfer/gpu/staging.h"

#include <algorithm>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/request/piece.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kSkipBytes = 64 << 10;

uint64_t address_of(const iovec& part) { return reinterpret_cast<uint64_t>(part.iov_base); }

}  // namespace

void Staging::gather(std::vector<iovec>& parts, const GpuRanges& gpus, const Limit& limit,
                     const Move& move) {
  if (gpus.empty()) {
    return move(parts.data(), parts.size());
  }
  Cursor cursor{parts, gpus};
  uint64_t num_begun = 0, num_moved = 0;
  try {
    prepare(cursor);
    while (true) {
      while (!cursor.at_end() && num_begun - num_moved < kNumChunks) {
        Chunk& chunk = chunks_[num_begun++ % kNumChunks];
        fill(chunk, cursor, /*gathers=*/true);
        chunk.mark = queue_.begin(chunk.copies);
      }
      if (num_moved == num_begun) return;
      Chunk& chunk = chunks_[num_moved % kNumChunks];
      queue_.wait(chunk.mark, limit);
      ++num_moved;
      move(chunk.parts.data(), chunk.parts.size());
    }
  } catch (const GpuFailure& failure) {
    settle();
    if (num_moved == 0) throw Refused(failure.reason());
    throw;
  } catch (...) {
    settle();
    throw;
  }
}

ErrorReason Staging::scatter(std::vector<iovec>& parts, const GpuRanges& gpus, const Limit& limit,
                             const Move& move) {
  Cursor cursor{parts, gpus};
  try {
    if (gpus.empty()) {
      move(parts.data(), parts.size());
    } else {
      scatter_chunks(cursor, limit, move);
    }
    return {};
  } catch (const GpuFailure& failure) {
    settle();
    skip(cursor, move);
    return failure.reason();
  } catch (const Inaccessible& fault) {  // `move` has used up its parts
    settle();
    if (!gpus.empty()) skip(cursor, move);
    return fault.reason();
  } catch (...) {
    settle();
    throw;
  }
}

void Staging::scatter_chunks(Cursor& cursor, const Limit& limit, const Move& move) {
  prepare(cursor);
  for (uint64_t number = 0; !cursor.at_end(); ++number) {
    Chunk& chunk = chunks_[number % kNumChunks];
    queue_.wait(chunk.mark, limit);  // for its previous content
    fill(chunk, cursor, /*gathers=*/false);
    move(chunk.parts.data(), chunk.parts.size());
    chunk.mark = queue_.begin(chunk.copies);
  }
  for (const Chunk& chunk : chunks_) queue_.wait(chunk.mark, limit);
}

// Takes pinned memory if a part is in GPU memory.
void Staging::prepare(const Cursor& cursor) {
  if (pinned_) return;
  int first = -1;
  for_each_stretch(cursor.parts, cursor.gpus, [&](uint64_t, uint64_t, int device) {
    if (first < 0) first = device;
  });
  if (first < 0) return;
  try {
    pinned_ = std::make_unique<PinnedMemory>(kNumChunks * kChunkBytes, first);
  } catch (const std::exception& error) {
    throw GpuFailure(error.what());
  }
  for (size_t i = 0; i < kNumChunks; ++i) chunks_[i].memory = pinned_->data() + i * kChunkBytes;
}

// Fills the chunk with as much of the parts as fits.
void Staging::fill(Chunk& chunk, Cursor& cursor, bool gathers) const {
  chunk.parts.clear();
  chunk.copies.clear();
  uint64_t used = 0;
  while (!cursor.at_end() && used < kChunkBytes) {
    const iovec& part = cursor.parts[cursor.index];
    const uint64_t address = address_of(part) + cursor.offset;
    auto [device, num_bytes] = cursor.gpus.at(address, part.iov_len - cursor.offset);
    if (device < 0) {
      append_part(chunk.parts, address, num_bytes);
    } else {
      num_bytes = std::min(num_bytes, kChunkBytes - used);
      const auto room = reinterpret_cast<uint64_t>(chunk.memory) + used;
      chunk.copies.push_back(gathers ? GpuCopy{room, address, num_bytes, device}
                                     : GpuCopy{address, room, num_bytes, device});
      append_part(chunk.parts, room, num_bytes);
      used += num_bytes;
    }
    cursor.offset += num_bytes;
    if (cursor.offset == part.iov_len) {
      ++cursor.index;
      cursor.offset = 0;
    }
  }
}

// Moves the rest of the parts nowhere.
void Staging::skip(Cursor& cursor, const Move& move) {
  std::vector<char> nowhere(kSkipBytes);
  for (; !cursor.at_end(); ++cursor.index, cursor.offset = 0) {
    uint64_t left = cursor.parts[cursor.index].iov_len - cursor.offset;
    while (left > 0) {
      iovec part{nowhere.data(), std::min<uint64_t>(left, nowhere.size())};
      left -= part.iov_len;
      move(&part, 1);
    }
  }
}

// A GPU that hangs keeps the memory.
void Staging::settle() noexcept {
  if (queue_.drain()) return;
  if (pinned_) pinned_->leak();
  pinned_.reset();
  chunks_ = {};
}

void Staging::close() noexcept {
  settle();
  pinned_.reset();
  chunks_ = {};  // their marks are of these streams
  queue_.close();
}

}  // namespace mk::transfer

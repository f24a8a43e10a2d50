// How a piece is cut into ops, for requests of every shape.
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "expect.h"
#include "transfer/file/file_op.h"

using namespace mk::transfer;

namespace {

constexpr uint64_t kPage = 4096;
constexpr DirectRules kRules{kPage, 512};
constexpr uint64_t kMemory = 1 << 30;  // nothing is there: ops are only looked at

Request request_of(const std::vector<Range>& file, const std::vector<uint64_t>& memory) {
  Request request{};
  for (size_t i = 0; i < file.size(); ++i) {
    request.local.push_back(memory[i]);
    request.remote.push_back(file[i].address);
    request.sizes.push_back(file[i].num_bytes);
    request.num_bytes += file[i].num_bytes;
  }
  return request;
}

std::vector<FileOp> cut(const Request& request, const DirectRules& rules,
                        uint64_t max_piece_bytes = UINT64_MAX) {
  std::vector<FileOp> ops;
  Cutter pieces(request, max_piece_bytes);
  for (Piece piece; pieces.next(piece);) {
    OpCutter cutter(request, piece, rules);
    for (FileOp op; cutter.next(op);) ops.push_back(op);
    EXPECT(cutter.at_end());
  }
  return ops;
}

std::vector<FileOp> cut_one(uint64_t offset, uint64_t num_bytes, uint64_t memory) {
  return cut(request_of({{offset, num_bytes}}, {memory}), kRules);
}

void expect_op(const FileOp& op, bool direct, bool bounced, uint64_t offset, uint64_t num_bytes) {
  EXPECT(op.direct == direct);
  EXPECT(op.bounced == bounced);
  EXPECT(op.offset == offset);
  EXPECT(op.num_bytes == num_bytes);
}

void test_one_range() {
  auto ops = cut_one(0, 2 * kMaxOpBytes + kPage, kMemory);
  EXPECT(ops.size() == 3);
  for (size_t i = 0; i < 2; ++i) expect_op(ops[i], true, false, i * kMaxOpBytes, kMaxOpBytes);
  expect_op(ops[2], true, false, 2 * kMaxOpBytes, kPage);

  ops = cut_one(100, 3 * kPage, kMemory + 100);
  EXPECT(ops.size() == 3);
  expect_op(ops[0], false, false, 100, kPage - 100);
  expect_op(ops[1], true, false, kPage, 2 * kPage);
  expect_op(ops[2], false, false, 3 * kPage, 100);

  ops = cut_one(kPage, 2 * kMaxBouncedBytes, kMemory + 1);
  EXPECT(ops.size() == 2);
  expect_op(ops[0], true, true, kPage, kMaxBouncedBytes);

  ops = cut_one(kPage + 1, kPage - 2, kMemory);
  EXPECT(ops.size() == 1);
  expect_op(ops[0], false, false, kPage + 1, kPage - 2);

  ops = cut(request_of({{0, kMaxOpBytes}}, {kMemory + 1}), {});
  EXPECT(ops.size() == 1);
  expect_op(ops[0], false, false, 0, kMaxOpBytes);
}

void test_neighbours_are_one_op() {
  std::vector<Range> file;
  std::vector<uint64_t> memory;
  for (uint64_t i = 0; i < 1024; ++i) {
    file.push_back({i * kPage, kPage});
    memory.push_back(kMemory + (i * 7 % 1024) * kPage);
  }
  auto ops = cut(request_of(file, memory), kRules);
  EXPECT(ops.size() == 1024 / kMaxOpParts);
  for (const FileOp& op : ops) EXPECT(op.direct && !op.bounced && op.parts.size() == kMaxOpParts);

  file.clear(), memory.clear();
  for (uint64_t i = 0; i < 64; ++i) {  // less than a page each, and together many
    file.push_back({i * 1024, 1024});
    memory.push_back(kMemory + i * 5000);
  }
  ops = cut(request_of(file, memory), kRules);
  EXPECT(ops.size() == 1);
  expect_op(ops[0], true, true, 0, 16 * kPage);
}

// Every byte goes once, from its own place to its own; no page goes both ways.
void test_any_shape() {
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t end) { return random() % end; };
  for (int round = 0; round < 60; ++round) {
    std::vector<Range> file;
    std::vector<uint64_t> memory;
    uint64_t at = below(2 * kPage), from = kMemory;
    const bool whole_pages = round % 3 == 0;
    for (uint64_t n = 1 + below(20); n > 0; --n) {
      const uint64_t size = whole_pages ? kPage * (1 + below(3)) : 1 + below(3 * kPage);
      if (whole_pages) at = (at + kPage - 1) & ~(kPage - 1);
      file.push_back({at, size});
      memory.push_back(from);
      at += size + (below(2) ? 0 : below(2 * kPage));
      from += size + 512 * below(3) + (below(3) ? 0 : below(100));
    }
    const Request request = request_of(file, memory);
    std::map<uint64_t, uint64_t> memory_at;  // by offset in the file
    std::map<uint64_t, bool> way_of_page;
    for (const FileOp& op : cut(request, kRules, round % 2 ? UINT64_MAX : 5 * kPage)) {
      EXPECT(op.num_bytes <= kMaxOpBytes && op.parts.size() <= kMaxOpParts);
      if (op.direct) EXPECT(op.offset % kPage == 0 && op.num_bytes % kPage == 0);
      uint64_t offset = op.offset;
      for (const iovec& part : op.parts) {
        const auto address = reinterpret_cast<uint64_t>(part.iov_base);
        if (op.direct && !op.bounced) EXPECT(address % 512 == 0 && part.iov_len % kPage == 0);
        for (uint64_t i = 0; i < part.iov_len; ++i, ++offset) {
          EXPECT(memory_at.emplace(offset, address + i).second);
          EXPECT(way_of_page.emplace(offset / kPage, op.direct).first->second == op.direct);
        }
      }
      EXPECT(offset == op.offset + op.num_bytes);
    }
    EXPECT(memory_at.size() == request.num_bytes);
    for (size_t i = 0; i < file.size(); ++i) {
      for (uint64_t k = 0; k < file[i].num_bytes; ++k) {
        EXPECT(memory_at.at(file[i].address + k) == memory[i] + k);
      }
    }
  }
}

}  // namespace

int main() {
  test_one_range();
  test_neighbours_are_one_op();
  test_any_shape();
  return failures() ? 1 : 0;
}

#include "transfer/net/own_addresses.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace mk::transfer {
namespace {

// Names of hosts are the same in either case.
std::string lower(std::string text) {
  const auto to_lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c | 32) : c; };
  std::transform(text.begin(), text.end(), text.begin(), to_lower);
  return text;
}

}  // namespace

OwnAddresses::OwnAddresses(const std::vector<std::string>& written, std::string bound)
    : bound_(std::move(bound)) {
  std::transform(written.begin(), written.end(), std::back_inserter(written_), lower);
}

bool OwnAddresses::include(const std::string& dialled, const std::string& reached) const {
  if (!bound_.empty() && reached == bound_) return true;
  return std::find(written_.begin(), written_.end(), lower(dialled)) != written_.end();
}

}  // namespace mk::transfer

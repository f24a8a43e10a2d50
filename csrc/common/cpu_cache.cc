#include "common/cpu_cache.h"

#include <fstream>
#include <string>

namespace mk {
namespace {

constexpr int64_t kUnknown = int64_t{8} << 20;

int64_t read_sizes() {
  int64_t last = 0;
  for (int index = 0;; ++index) {
    const std::string folder =
        "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    std::ifstream file(folder + "size");  // such as "32768K"; the levels are in order
    int64_t size = 0;
    char unit = 0;
    if (!(file >> size >> unit)) return last ? last : kUnknown;
    last = unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
  }
}

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = read_sizes();
  return bytes;
}

}  // namespace mk

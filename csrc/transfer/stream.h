// What Socket and TlsStream have in common: how they walk over iovecs, and their words for errors.
//
// Layer: transfer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <string>

namespace mk::transfer {

// Steps over `num_bytes` that were moved; with 0, over parts that are empty.
void advance(iovec*& parts, size_t& num_parts, size_t num_bytes);

std::string connection_cause(int error_number);  // "connection refused", ...
std::string closed_by_peer();

}  // namespace mk::transfer

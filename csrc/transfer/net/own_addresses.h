// OwnAddresses: where an engine knows that peers reach it: so a peer that has dialled anything else
// was led here by somebody in between.
//
//   const OwnAddresses own({"10.0.0.2:4711", "kv-2.example:4711"}, "10.0.0.2/4711");
//   own.include("KV-2.example:4711", "203.0.113.7/4711")
//
// Layer: transfer.
#pragma once

#include <string>
#include <vector>

namespace mk::transfer {

class OwnAddresses {
 public:
  OwnAddresses() = default;
  // As peers write them, "host:port"; and what numeric_name() makes of the one that is bound.
  OwnAddresses(const std::vector<std::string>& written, std::string bound);

  // Whether the address that a peer was given to open, or the one that its connection leads to, is
  // one of these.
  bool include(const std::string& dialled, const std::string& reached) const;

 private:
  std::vector<std::string> written_;  // in lower case
  std::string bound_;
};

}  // namespace mk::transfer

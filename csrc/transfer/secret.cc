#include "transfer/secret.h"

#include <utility>

#include "common/check.h"
#include "transfer/openssl.h"

namespace mk::transfer {
namespace {

constexpr size_t kMinBytes = 16;
constexpr size_t kMaxBytes = 4096;

// Zeros behind the text: what follows in the input is at the same place for both sides.
constexpr char kInitiatorLabel[32] = "mooncake-kernels initiator";
constexpr char kTargetLabel[32] = "mooncake-kernels target";

}  // namespace

Secret::Secret(std::string bytes) : bytes_(std::move(bytes)) {
  MK_CHECK(bytes_.size() >= kMinBytes && bytes_.size() <= kMaxBytes,
           "TransferEngine: secret must be ", kMinBytes, " to ", kMaxBytes, " bytes, got ",
           bytes_.size());
  if (!Crypto::reason().empty()) {
    throw Unavailable("TransferEngine: a secret needs OpenSSL 3: " + Crypto::reason());
  }
}

Bytes32 Secret::prove(Side side, const Bytes32& binding, const std::string& initiators_hello,
                      const std::string& targets_hello) const {
  const char* const label = side == Side::kInitiator ? kInitiatorLabel : kTargetLabel;
  std::string input(label, sizeof(kInitiatorLabel));
  input.append(binding.begin(), binding.end());
  input += initiators_hello;
  input += targets_hello;
  const Crypto& crypto = Crypto::get();
  Bytes32 proof;
  if (!crypto.p_HMAC(crypto.p_EVP_sha256(), bytes_.data(), static_cast<int>(bytes_.size()),
                     reinterpret_cast<const unsigned char*>(input.data()), input.size(),
                     proof.data(), nullptr)) {
    throw std::runtime_error("HMAC failed");
  }
  return proof;
}

bool equal(const Bytes32& a, const Bytes32& b) {
  return Crypto::get().p_CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace mk::transfer

#include "transfer/net/secret.h"

#include <stdexcept>

#include "common/check.h"
#include "transfer/net/openssl.h"

namespace mk::transfer {
namespace {

constexpr size_t kMinBytes = 16;
constexpr size_t kMaxBytes = 4096;

// Zero-padded, so that the rest of the input is at the same offset for both sides.
constexpr char kInitiatorLabel[32] = "mooncake-kernels initiator";
constexpr char kTargetLabel[32] = "mooncake-kernels target";

// HMAC pads a key with zeros, so a secret with more zeros at its end would be equivalent. The
// derived key differs for any two secrets.
constexpr char kKeyLabel[] = "mooncake-kernels secret";

constexpr char kPskLabel[32] = "mooncake-kernels tls";
constexpr char kInitiatorFramesLabel[32] = "mooncake-kernels initiator keys";
constexpr char kTargetFramesLabel[32] = "mooncake-kernels target keys";

}  // namespace

Bytes32 hmac(const void* key, size_t key_bytes, const std::string& input) {
  const Crypto& crypto = Crypto::get();
  Bytes32 mac;
  if (!crypto.p_HMAC(crypto.p_EVP_sha256(), key, static_cast<int>(key_bytes),
                     reinterpret_cast<const unsigned char*>(input.data()), input.size(), mac.data(),
                     nullptr)) {
    throw std::runtime_error("HMAC failed");
  }
  return mac;
}

Secret::Secret(const std::string& secret) {
  MK_CHECK(secret.size() >= kMinBytes && secret.size() <= kMaxBytes,
           "TransferEngine: secret must be ", kMinBytes, " to ", kMaxBytes, " bytes, got ",
           secret.size());
  if (!Crypto::reason().empty()) {
    throw Unavailable("TransferEngine: a secret needs OpenSSL 3: " + Crypto::reason());
  }
  key_ = hmac(kKeyLabel, sizeof(kKeyLabel) - 1, secret);
}

Bytes32 Secret::prove(Side side, const Bytes32& binding, const std::string& initiators_hello,
                      const std::string& targets_hello) const {
  const char* const label = side == Side::kInitiator ? kInitiatorLabel : kTargetLabel;
  std::string input(label, sizeof(kInitiatorLabel));
  input.append(binding.begin(), binding.end());
  input += initiators_hello;
  input += targets_hello;
  return hmac(key_.data(), key_.size(), input);
}

Bytes32 Secret::psk() const {
  return hmac(key_.data(), key_.size(), std::string(kPskLabel, sizeof(kPskLabel)));
}

Bytes32 Secret::frame_key(Side side, const std::string& initiators_hello,
                          const std::string& targets_hello) const {
  const char* const label = side == Side::kInitiator ? kInitiatorFramesLabel : kTargetFramesLabel;
  std::string input(label, sizeof(kInitiatorFramesLabel));
  input += initiators_hello;
  input += targets_hello;
  return hmac(key_.data(), key_.size(), input);
}

bool Secret::is_same(const Secret& other) const { return equal(key_, other.key_); }

bool equal(const Bytes32& a, const Bytes32& b) {
  return Crypto::get().p_CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace mk::transfer

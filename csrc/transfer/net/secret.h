// Secret: shared by engines that may use each other's memory, and the proof of knowing it.
//
//   const Secret secret("...");
//   Bytes32 proof = secret.prove(Side::kInitiator, binding, initiators_hello, targets_hello);
//   if (!equal(proof, received)) ...
//
// Layer: transfer. The proof is an HMAC-SHA-256; docs/internals/wire.md says of what.
#pragma once

#include <cstddef>
#include <string>

#include "transfer/wire/wire.h"

namespace mk::transfer {

enum class Side { kInitiator, kTarget };

class Secret {
 public:
  // Throws InvalidArgument (its length) and Unavailable (there is no OpenSSL).
  explicit Secret(const std::string& secret);

  // `binding` is that of the TLS session, zeros without one. The sides have different labels, so a
  // proof cannot be reflected, and each Hello has a fresh nonce, so none can be replayed.
  Bytes32 prove(Side side, const Bytes32& binding, const std::string& initiators_hello,
                const std::string& targets_hello) const;

  // The key of TLS without certificates.
  Bytes32 psk() const;

  // Of a connection without TLS: the key by which its sides authenticate their frames, after that
  // side's label. Both Hellos, with their nonces, are in it.
  Bytes32 frame_key(Side side, const std::string& initiators_hello,
                    const std::string& targets_hello) const;

  bool is_same(const Secret& other) const;  // in constant time

 private:
  Bytes32 key_;
};

// HMAC-SHA-256.
Bytes32 hmac(const void* key, size_t key_bytes, const std::string& input);

bool equal(const Bytes32& a, const Bytes32& b);  // in constant time

}  // namespace mk::transfer

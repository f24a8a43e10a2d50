// TLS 1.3: a context belongs to an engine, a stream to one connection.
//
//   const TlsContext context({"node.pem", "node.key", "ca.pem"});
//   const TlsContext without_certificates(secret.psk());
//   TlsStream stream(context, fd, "10.0.0.2", limit);   // the initiator's; host "": the target's
//   stream.send(parts, num_parts, limit);
//
// Layer: transfer. A stream is used by one thread at a time, the engine's or a caller's; neither
// gets a SIGPIPE. Certificates are verified on both sides if there is a CA, else on neither. With a
// pre-shared key there are no certificates: both sides prove to know the key, and the keys of the
// session come from it and a fresh Diffie-Hellman exchange.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "transfer/base/error.h"
#include "transfer/base/limit.h"
#include "transfer/wire/wire.h"

struct ssl_st;
struct ssl_ctx_st;

namespace mk::transfer {

struct TlsOptions {
  std::string certificate;  // PEM files: ours, and those between it and the CA's
  std::string key;
  std::string ca;    // may have signed a peer's; empty: any certificate
  bool verify_host;  // whether a target's certificate must be for the host that was opened
};

// The target of an initiator that began TLS answers in plain: it says why it will not go on.
struct PlainAnswer : Failure {
  PlainAnswer() : Failure("the peer speaks no TLS", FailureKind::kDenied) {}
};

class TlsContext {
 public:
  // Throws InvalidArgument (a file) and Unavailable (there is no OpenSSL).
  explicit TlsContext(const TlsOptions& options);
  explicit TlsContext(const Bytes32& psk);

  bool verifies_peers() const { return verifies_peers_; }  // an initiator has to prove something

 private:
  friend class TlsStream;

  struct Free {
    void operator()(ssl_ctx_st* context) const;
  };

  void make();

  std::unique_ptr<ssl_ctx_st, Free> context_;
  bool verifies_host_ = false;
  bool verifies_peers_ = false;
  std::optional<Bytes32> psk_;
};

class TlsStream {
 public:
  // Performs the handshake over a connected non-blocking socket, which must outlive the stream. An
  // initiator names the host it has connected to; for a target it is empty. Throws PlainAnswer,
  // with the answer still to be read, and other Failures.
  TlsStream(const TlsContext& context, int fd, const std::string& host, const Limit& limit);

  void send(iovec* parts, size_t num_parts, const Limit& limit);
  void receive(iovec* parts, size_t num_parts, const Limit& limit);

  bool has_pending() const;  // there is received input that was not read yet

  // A value that only the two ends of this session know, not a man in the middle.
  const Bytes32& binding() const { return binding_; }

 private:
  struct Free {
    void operator()(ssl_st* ssl) const;
  };

  void shake_hands(bool initiates, const Limit& limit);
  template <class Call>
  void finish(const Limit& limit, Call call);
  [[noreturn]] void fail(int error, int error_number) const;
  void renew_key(size_t num_bytes);
  char* record();  // where bytes are between a caller's memory and OpenSSL

  const int fd_;
  const bool has_psk_;
  const std::unique_ptr<ssl_st, Free> ssl_;
  bool has_shaken_hands_ = false;
  Bytes32 binding_;
  std::unique_ptr<char[]> record_;  // see record()
  uint64_t num_bytes_of_key_ = 0;   // sent with the key in use
};

}  // namespace mk::transfer

#include "transfer/net/tls.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/fault_guard.h"
#include "common/thread.h"
#include "transfer/base/error.h"
#include "transfer/net/openssl.h"
#include "transfer/net/stream.h"
#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr size_t kRecordBytes = 16 << 10;     // the maximum size of a record
constexpr uint64_t kKeyBytes = 256ull << 20;  // AES-GCM needs a new key after 2^38 bytes at most
constexpr char kBindingLabel[] = "EXPORTER-mooncake-kernels";

std::string describe(unsigned long error) {
  // From a system call: the error contains the errno, as in OpenSSL's ERR_SYSTEM_ERROR.
  if (error & ossl::kSystemErrorFlag) return std::strerror(error & ossl::kSystemReasonMask);
  const char* const reason = Crypto::get().p_ERR_reason_error_string(error);
  return reason ? reason : concat("error ", error);
}

std::string first_reason() { return describe(Crypto::get().p_ERR_get_error()); }

void check_file(int result, const char* argument, const std::string& file, const char* what) {
  MK_CHECK(result == 1, "TransferEngine: tls.", argument, " must be a PEM file of ", what, ", got ",
           file, " (", first_reason(), ")");
}

// Otherwise OpenSSL would ask for an encrypted key's password on the terminal.
int no_password(char*, int, int, void*) { return 0; }

const Ssl& open_ssl() {
  for (const std::string& reason : {Crypto::reason(), Ssl::reason()}) {
    if (!reason.empty()) throw Unavailable("TransferEngine: TLS needs OpenSSL 3: " + reason);
  }
  return Ssl::get();
}

template <class T>
T* not_null(T* object) {
  if (!object) throw std::runtime_error("OpenSSL: " + first_reason());
  return object;
}

// A pre-shared key as OpenSSL takes it: as if it were of an earlier session. The key is for
// SHA-256, and so are all suites that are offered with it: a suite with another hash would not be
// accepted.
constexpr char kPskSuites[] = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
constexpr unsigned char kPskIdentity[] = "mooncake-kernels";
constexpr size_t kPskIdentityBytes = sizeof(kPskIdentity) - 1;
constexpr int kPskIndex = 0;  // of a connection's data: what SSL_set_app_data uses

ssl_session_st* session_of_psk(ssl_st* connection) {
  const Ssl& ssl = Ssl::get();
  const auto* const psk = static_cast<const Bytes32*>(ssl.p_SSL_get_ex_data(connection, kPskIndex));
  const ssl_cipher_st* const cipher = ssl.p_SSL_CIPHER_find(connection, kAes128GcmSha256);
  ssl_session_st* const session = psk && cipher ? ssl.p_SSL_SESSION_new() : nullptr;
  if (!session) return nullptr;
  if (ssl.p_SSL_SESSION_set1_master_key(session, psk->data(), psk->size()) &&
      ssl.p_SSL_SESSION_set_cipher(session, cipher) &&
      ssl.p_SSL_SESSION_set_protocol_version(session, ossl::kTls13Version)) {
    return session;
  }
  ssl.p_SSL_SESSION_free(session);
  return nullptr;
}

// The initiator's: what it offers. OpenSSL takes the session over.
int offer_psk(ssl_st* connection, const evp_md_st*, const unsigned char** identity,
              size_t* identity_bytes, ssl_session_st** session) {
  *identity = kPskIdentity;
  *identity_bytes = kPskIdentityBytes;
  *session = session_of_psk(connection);
  return *session != nullptr;
}

// The target's: what it accepts.
int find_psk(ssl_st* connection, const unsigned char* identity, size_t identity_bytes,
             ssl_session_st** session) {
  const bool is_ours = identity_bytes == kPskIdentityBytes &&
                       std::memcmp(identity, kPskIdentity, identity_bytes) == 0;
  *session = is_ours ? session_of_psk(connection) : nullptr;
  return !is_ours || *session;
}

bool begins_with_magic(int fd) {
  char byte;
  return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 1 && byte == kMagic[0];
}

// The next bytes to send, in memory of ours: if a caller's cannot be accessed, OpenSSL must not be
// the one that finds out, in the middle of a record.
size_t gather(const iovec* parts, size_t num_parts, char* record, uint64_t num_moved) {
  size_t num_bytes = 0;
  const auto fault = guarded([&]() noexcept {
    for (; num_parts > 0 && num_bytes < kRecordBytes; ++parts, --num_parts) {
      const size_t step = std::min(parts->iov_len, kRecordBytes - num_bytes);
      std::memcpy(record + num_bytes, parts->iov_base, step);
      num_bytes += step;
    }
  });
  if (fault) throw Inaccessible(fault->describe(), num_moved);
  return num_bytes;
}

}  // namespace

void TlsContext::Free::operator()(ssl_ctx_st* context) const { Ssl::get().p_SSL_CTX_free(context); }

void TlsStream::Free::operator()(ssl_st* ssl) const { Ssl::get().p_SSL_free(ssl); }

void TlsContext::make() {
  const Ssl& ssl = open_ssl();
  Crypto::get().p_ERR_clear_error();
  context_.reset(not_null(ssl.p_SSL_CTX_new(ssl.p_TLS_method())));
  ssl_ctx_st* const context = context_.get();
  ssl.p_SSL_CTX_ctrl(context, ossl::kCtrlSetMinProtoVersion, ossl::kTls13Version, nullptr);
  ssl.p_SSL_CTX_ctrl(context, ossl::kCtrlMode, ossl::kModeEnablePartialWrite, nullptr);
  ssl.p_SSL_CTX_ctrl(context, ossl::kCtrlSetReadAhead, 1, nullptr);
  // All that we send is preceded by its length, so a truncated connection is noticed.
  ssl.p_SSL_CTX_set_options(context, ossl::kOpIgnoreUnexpectedEof);
  ssl.p_SSL_CTX_set_num_tickets(context, 0);  // nothing arrives unsolicited: see Socket::at_rest
}

TlsContext::TlsContext(const TlsOptions& options) : verifies_host_(options.verify_host) {
  make();
  const Ssl& ssl = Ssl::get();
  ssl_ctx_st* const context = context_.get();
  ssl.p_SSL_CTX_set_default_passwd_cb(context, no_password);
  const char* const certificate = options.certificate.c_str();
  check_file(ssl.p_SSL_CTX_use_certificate_chain_file(context, certificate), "certificate",
             options.certificate, "certificates");
  check_file(ssl.p_SSL_CTX_use_PrivateKey_file(context, options.key.c_str(), ossl::kFiletypePem),
             "key", options.key, "the certificate's private key");
  if (options.ca.empty()) return;
  check_file(ssl.p_SSL_CTX_load_verify_file(context, options.ca.c_str()), "ca", options.ca,
             "certificates");
  verifies_peers_ = true;
  ssl.p_SSL_CTX_set_verify(context, ossl::kVerifyPeer | ossl::kVerifyFailIfNoPeerCert, nullptr);
}

// By default OpenSSL uses a key only together with a Diffie-Hellman exchange (psk_dhe_ke).
TlsContext::TlsContext(const Bytes32& psk) : psk_(psk) {
  make();
  verifies_peers_ = true;
  const Ssl& ssl = Ssl::get();
  if (!ssl.p_SSL_CTX_set_ciphersuites(context_.get(), kPskSuites)) not_null<void>(nullptr);
  ssl.p_SSL_CTX_set_psk_use_session_callback(context_.get(), offer_psk);
  ssl.p_SSL_CTX_set_psk_find_session_callback(context_.get(), find_psk);
}

TlsStream::TlsStream(const TlsContext& context, int fd, const std::string& host, const Limit& limit)
    : fd_(fd),
      has_psk_(context.psk_.has_value()),
      ssl_(not_null(Ssl::get().p_SSL_new(context.context_.get()))) {
  const Ssl& ssl = Ssl::get();
  if (!host.empty() && context.verifies_host_ && !ssl.p_SSL_set1_host(ssl_.get(), host.c_str())) {
    not_null<void>(nullptr);
  }
  if (has_psk_ &&
      !ssl.p_SSL_set_ex_data(ssl_.get(), kPskIndex, const_cast<Bytes32*>(&*context.psk_))) {
    not_null<void>(nullptr);
  }
  shake_hands(!host.empty(), limit);
  if (!ssl.p_SSL_export_keying_material(ssl_.get(), binding_.data(), binding_.size(), kBindingLabel,
                                        sizeof(kBindingLabel) - 1, nullptr, 0, 0)) {
    not_null<void>(nullptr);
  }
}

void TlsStream::shake_hands(bool initiates, const Limit& limit) {
  const Ssl& ssl = Ssl::get();
  const NoSigpipe quiet;
  ssl_st* const connection = ssl_.get();
  if (initiates) {
    // Until it has sent its first message, it reads from where nothing comes: then the answer is
    // looked at first.
    ssl.p_SSL_set0_rbio(connection, not_null(Crypto::get().p_BIO_new(Crypto::get().p_BIO_s_mem())));
    if (!ssl.p_SSL_set_wfd(connection, fd_)) not_null<void>(nullptr);
    bool is_first = true;
    finish(limit, [&] {
      if (!std::exchange(is_first, false)) {
        if (begins_with_magic(fd_)) throw PlainAnswer();
        if (!ssl.p_SSL_set_rfd(connection, fd_)) not_null<void>(nullptr);
      }
      return ssl.p_SSL_connect(connection);
    });
  } else {
    if (!ssl.p_SSL_set_fd(connection, fd_)) not_null<void>(nullptr);
    finish(limit, [&] { return ssl.p_SSL_accept(connection); });
  }
  has_shaken_hands_ = true;
  // A peer with certificates would do without the key.
  if (has_psk_ && !ssl.p_SSL_session_reused(ssl_.get())) {
    throw Failure("the peer has certificates instead of the secret alone", FailureKind::kDenied);
  }
}

// Repeats an OpenSSL call until it is done, waiting for what it needs. The arguments must stay the
// same.
template <class Call>
void TlsStream::finish(const Limit& limit, Call call) {
  while (true) {
    limit.check();
    Crypto::get().p_ERR_clear_error();
    errno = 0;
    const int result = call();
    const int error_number = errno;
    if (result == 1) return;
    const int error = Ssl::get().p_SSL_get_error(ssl_.get(), result);
    if (error == ossl::kErrorWantRead) {
      wait_readable(fd_, limit);
    } else if (error == ossl::kErrorWantWrite) {
      wait_writable(fd_, limit);
    } else {
      fail(error, error_number);
    }
  }
}

void TlsStream::fail(int error, int error_number) const {
  if (error != ossl::kErrorSsl) {
    const bool is_named = error == ossl::kErrorSyscall && error_number != 0;
    const ErrorReason reason = is_named ? connection_reason(error_number) : closed_by_peer();
    if (has_shaken_hands_) throw LinkDown(reason);
    throw LinkDown({reason.text + " during the TLS handshake", reason.kind});
  }
  const Crypto& crypto = Crypto::get();
  const unsigned long code = crypto.p_ERR_get_error();
  const unsigned long number = code & ossl::kReasonMask;
  // What differs is the key: the target notices it, and the initiator hears of it by an alert.
  if (has_psk_ && !has_shaken_hands_ &&
      (number == ossl::kReasonBinderDoesNotVerify || number == ossl::kReasonAlertIllegalParameter ||
       number == ossl::kReasonAlertDecryptError)) {
    throw Failure(reason_at_initiator(RejectReason::kOtherSecret));
  }
  std::string reason = "TLS: " + describe(code);
  if (number == ossl::kReasonCertificateVerifyFailed) {
    const long result = Ssl::get().p_SSL_get_verify_result(ssl_.get());
    reason += concat(": ", crypto.p_X509_verify_cert_error_string(result));
  }
  throw Failure(reason, has_shaken_hands_ ? FailureKind::kDisconnected : FailureKind::kDenied);
}

void TlsStream::send(iovec* parts, size_t num_parts, const Limit& limit) {
  advance(parts, num_parts, 0);
  const NoSigpipe quiet;  // OpenSSL writes to the socket without MSG_NOSIGNAL
  uint64_t num_moved = 0;
  while (num_parts > 0) {
    size_t sent = 0;
    const size_t num_bytes = gather(parts, num_parts, record(), num_moved);
    finish(limit,
           [&] { return Ssl::get().p_SSL_write_ex(ssl_.get(), record(), num_bytes, &sent); });
    advance(parts, num_parts, sent);
    num_moved += sent;
    renew_key(sent);
  }
}

void TlsStream::renew_key(size_t num_bytes) {
  num_bytes_of_key_ += num_bytes;
  if (num_bytes_of_key_ < kKeyBytes) return;
  num_bytes_of_key_ = 0;
  // Sent with the next record.
  if (!Ssl::get().p_SSL_key_update(ssl_.get(), ossl::kKeyUpdateNotRequested)) {
    throw Failure("TLS: " + first_reason(), FailureKind::kDisconnected);
  }
}

void TlsStream::receive(iovec* parts, size_t num_parts, const Limit& limit) {
  advance(parts, num_parts, 0);
  const NoSigpipe quiet;  // it may have to answer something, such as an alert
  std::optional<Fault> fault;
  while (num_parts > 0) {
    size_t received = 0;
    const size_t most = std::min(parts->iov_len, kRecordBytes);
    finish(limit, [&] { return Ssl::get().p_SSL_read_ex(ssl_.get(), record(), most, &received); });
    if (!fault) {  // else the rest is lost, too
      fault = guarded([&]() noexcept { std::memcpy(parts->iov_base, record(), received); });
    }
    advance(parts, num_parts, received);
  }
  if (fault) throw Inaccessible(fault->describe());
}

char* TlsStream::record() {
  if (!record_) record_ = std::make_unique<char[]>(kRecordBytes);
  return record_.get();
}

bool TlsStream::has_pending() const { return Ssl::get().p_SSL_has_pending(ssl_.get()); }

}  // namespace mk::transfer

// Compiles only if what transfer/net/openssl.h declares is what OpenSSL's own headers say.
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "transfer/net/openssl.h"

namespace ossl = mk::transfer::ossl;

static_assert(ossl::kFiletypePem == SSL_FILETYPE_PEM);
static_assert(ossl::kCtrlMode == SSL_CTRL_MODE);
static_assert(ossl::kCtrlSetReadAhead == SSL_CTRL_SET_READ_AHEAD);
static_assert(ossl::kCtrlSetMinProtoVersion == SSL_CTRL_SET_MIN_PROTO_VERSION);
static_assert(ossl::kTls13Version == TLS1_3_VERSION);
static_assert(ossl::kModeEnablePartialWrite == SSL_MODE_ENABLE_PARTIAL_WRITE);
static_assert(ossl::kOpIgnoreUnexpectedEof == SSL_OP_IGNORE_UNEXPECTED_EOF);
static_assert(ossl::kVerifyPeer == SSL_VERIFY_PEER);
static_assert(ossl::kVerifyFailIfNoPeerCert == SSL_VERIFY_FAIL_IF_NO_PEER_CERT);
static_assert(ossl::kKeyUpdateNotRequested == SSL_KEY_UPDATE_NOT_REQUESTED);
static_assert(ossl::kErrorSsl == SSL_ERROR_SSL);
static_assert(ossl::kErrorWantRead == SSL_ERROR_WANT_READ);
static_assert(ossl::kErrorWantWrite == SSL_ERROR_WANT_WRITE);
static_assert(ossl::kErrorSyscall == SSL_ERROR_SYSCALL);
static_assert(ossl::kReasonMask == ERR_REASON_MASK);
static_assert(ossl::kSystemErrorFlag == ERR_SYSTEM_FLAG);
static_assert(ossl::kSystemReasonMask == ERR_SYSTEM_MASK);
static_assert(ossl::kReasonCertificateVerifyFailed == SSL_R_CERTIFICATE_VERIFY_FAILED);
static_assert(ossl::kReasonBinderDoesNotVerify == SSL_R_BINDER_DOES_NOT_VERIFY);
static_assert(ossl::kReasonAlertIllegalParameter == SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER);
static_assert(ossl::kReasonAlertDecryptError == SSL_R_TLSV1_ALERT_DECRYPT_ERROR);

int main() {
  // And every function is in the libraries.
  mk::transfer::Crypto::get();
  mk::transfer::Ssl::get();
}

// OpenSSL 3, loaded on first use: an engine with neither a secret nor TLS does not need it. Nor is
// it needed to build: the few functions we call are declared here, with opaque types.
// tests/transfer/test_openssl.cc lets the compiler compare them with OpenSSL's own headers.
//
//   Crypto::get().p_CRYPTO_memcmp(...);   // throws Unavailable with the loader's message
//
// Layer: transfer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dynlib.h"

extern "C" {

struct bio_st;
struct bio_method_st;
struct evp_md_st;
struct ssl_st;
struct ssl_ctx_st;
struct ssl_method_st;
struct ssl_cipher_st;
struct ssl_session_st;
struct x509_store_ctx_st;

const evp_md_st* EVP_sha256(void);
unsigned char* HMAC(const evp_md_st* digest, const void* key, int key_bytes,
                    const unsigned char* data, size_t num_bytes, unsigned char* mac,
                    unsigned int* mac_bytes);
int CRYPTO_memcmp(const void* a, const void* b, size_t num_bytes);
void ERR_clear_error(void);
unsigned long ERR_get_error(void);
const char* ERR_reason_error_string(unsigned long error);
const char* X509_verify_cert_error_string(long error);
const bio_method_st* BIO_s_mem(void);
bio_st* BIO_new(const bio_method_st* method);

const ssl_method_st* TLS_method(void);
ssl_ctx_st* SSL_CTX_new(const ssl_method_st* method);
void SSL_CTX_free(ssl_ctx_st* context);
long SSL_CTX_ctrl(ssl_ctx_st* context, int command, long number, void* pointer);
uint64_t SSL_CTX_set_options(ssl_ctx_st* context, uint64_t options);
int SSL_CTX_set_num_tickets(ssl_ctx_st* context, size_t num_tickets);
void SSL_CTX_set_default_passwd_cb(ssl_ctx_st* context,
                                   int (*ask)(char* password, int size, int writing, void* data));
int SSL_CTX_use_certificate_chain_file(ssl_ctx_st* context, const char* file);
int SSL_CTX_use_PrivateKey_file(ssl_ctx_st* context, const char* file, int type);
int SSL_CTX_load_verify_file(ssl_ctx_st* context, const char* file);
void SSL_CTX_set_verify(ssl_ctx_st* context, int mode, int (*decide)(int, x509_store_ctx_st*));

int SSL_CTX_set_ciphersuites(ssl_ctx_st* context, const char* suites);
void SSL_CTX_set_psk_use_session_callback(ssl_ctx_st* context,
                                          int (*use)(ssl_st* ssl, const evp_md_st* digest,
                                                     const unsigned char** identity,
                                                     size_t* identity_bytes,
                                                     ssl_session_st** session));
void SSL_CTX_set_psk_find_session_callback(ssl_ctx_st* context,
                                           int (*find)(ssl_st* ssl, const unsigned char* identity,
                                                       size_t identity_bytes,
                                                       ssl_session_st** session));

ssl_session_st* SSL_SESSION_new(void);
void SSL_SESSION_free(ssl_session_st* session);
int SSL_SESSION_set1_master_key(ssl_session_st* session, const unsigned char* key,
                                size_t num_bytes);
int SSL_SESSION_set_cipher(ssl_session_st* session, const ssl_cipher_st* cipher);
int SSL_SESSION_set_protocol_version(ssl_session_st* session, int version);

ssl_st* SSL_new(ssl_ctx_st* context);
void SSL_free(ssl_st* ssl);
int SSL_set_ex_data(ssl_st* ssl, int index, void* data);
void* SSL_get_ex_data(const ssl_st* ssl, int index);
const ssl_cipher_st* SSL_CIPHER_find(ssl_st* ssl, const unsigned char* number);
int SSL_session_reused(const ssl_st* ssl);
int SSL_set_fd(ssl_st* ssl, int fd);
int SSL_set_rfd(ssl_st* ssl, int fd);
int SSL_set_wfd(ssl_st* ssl, int fd);
void SSL_set0_rbio(ssl_st* ssl, bio_st* input);
int SSL_set1_host(ssl_st* ssl, const char* host);
int SSL_connect(ssl_st* ssl);
int SSL_accept(ssl_st* ssl);
int SSL_read_ex(ssl_st* ssl, void* data, size_t num_bytes, size_t* num_read);
int SSL_write_ex(ssl_st* ssl, const void* data, size_t num_bytes, size_t* num_written);
int SSL_has_pending(const ssl_st* ssl);
int SSL_key_update(ssl_st* ssl, int kind);
int SSL_get_error(const ssl_st* ssl, int result);
long SSL_get_verify_result(const ssl_st* ssl);
int SSL_export_keying_material(ssl_st* ssl, unsigned char* out, size_t num_bytes, const char* label,
                               size_t label_bytes, const unsigned char* context,
                               size_t context_bytes, int use_context);

}  // extern "C"

namespace mk::transfer {

constexpr const char* kCryptoName = "libcrypto.so.3";
constexpr const char* kSslName = "libssl.so.3";

// Constants of ssl.h, under its names.
namespace ossl {
constexpr int kFiletypePem = 1;
constexpr int kCtrlMode = 33;
constexpr int kCtrlSetReadAhead = 41;
constexpr int kCtrlSetMinProtoVersion = 123;
constexpr long kTls13Version = 0x0304;
constexpr long kModeEnablePartialWrite = 1;
constexpr uint64_t kOpIgnoreUnexpectedEof = 1 << 7;
constexpr int kVerifyPeer = 1;
constexpr int kVerifyFailIfNoPeerCert = 2;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kErrorSsl = 1;
constexpr int kErrorWantRead = 2;
constexpr int kErrorWantWrite = 3;
constexpr int kErrorSyscall = 5;
constexpr unsigned long kReasonMask = 0x7fffff;
constexpr unsigned long kSystemErrorFlag = 0x80000000;
constexpr unsigned long kSystemReasonMask = 0x7fffffff;
constexpr unsigned long kReasonCertificateVerifyFailed = 134;
constexpr unsigned long kReasonBinderDoesNotVerify = 253;
constexpr unsigned long kReasonAlertIllegalParameter = 1047;
constexpr unsigned long kReasonAlertDecryptError = 1051;
}  // namespace ossl

// clang-format off
#define MK_CRYPTO_FUNCTIONS(X)                                                          \
  X(EVP_sha256) X(HMAC) X(CRYPTO_memcmp) X(ERR_clear_error) X(ERR_get_error)            \
  X(ERR_reason_error_string) X(X509_verify_cert_error_string) X(BIO_s_mem) X(BIO_new)
#define MK_SSL_FUNCTIONS(X)                                                             \
  X(TLS_method) X(SSL_CTX_new) X(SSL_CTX_free) X(SSL_CTX_ctrl) X(SSL_CTX_set_options)   \
  X(SSL_CTX_set_num_tickets) X(SSL_CTX_set_default_passwd_cb)                           \
  X(SSL_CTX_use_certificate_chain_file) X(SSL_CTX_use_PrivateKey_file)                  \
  X(SSL_CTX_load_verify_file) X(SSL_CTX_set_verify) X(SSL_CTX_set_ciphersuites)         \
  X(SSL_CTX_set_psk_use_session_callback) X(SSL_CTX_set_psk_find_session_callback)      \
  X(SSL_SESSION_new) X(SSL_SESSION_free) X(SSL_SESSION_set1_master_key)                 \
  X(SSL_SESSION_set_cipher) X(SSL_SESSION_set_protocol_version) X(SSL_new) X(SSL_free)  \
  X(SSL_set_ex_data) X(SSL_get_ex_data) X(SSL_CIPHER_find) X(SSL_session_reused)        \
  X(SSL_set_fd) X(SSL_set_rfd) X(SSL_set_wfd) X(SSL_set0_rbio) X(SSL_set1_host) X(SSL_connect) X(SSL_accept) X(SSL_read_ex)            \
  X(SSL_write_ex) X(SSL_has_pending) X(SSL_key_update) X(SSL_get_error)                 \
  X(SSL_get_verify_result) X(SSL_export_keying_material)
// clang-format on
MK_DYNLIB(Crypto, kCryptoName, MK_CRYPTO_FUNCTIONS)
MK_DYNLIB(Ssl, kSslName, MK_SSL_FUNCTIONS)

}  // namespace mk::transfer

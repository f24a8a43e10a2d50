#include "transfer/base/error.h"

#include <cerrno>
#include <new>
#include <system_error>

namespace mk::transfer {

FailureKind kind_of_errno(int error_number) {
  switch (error_number) {
    case ECONNREFUSED:
    case ENOENT:
    case ENOTDIR:
      return FailureKind::kGone;
    case ECONNRESET:
    case ECONNABORTED:
    case EPIPE:
    case ENOTCONN:
      return FailureKind::kDisconnected;
    case ENETUNREACH:
    case EHOSTUNREACH:
    case ENETDOWN:
    case EHOSTDOWN:
    case ENONET:
    case ETIMEDOUT:  // of the kernel's, not of a deadline
    case EADDRNOTAVAIL:
    case EAFNOSUPPORT:
      return FailureKind::kUnreachable;
    case EMFILE:
    case ENFILE:
    case ENOMEM:
    case ENOBUFS:
    case EAGAIN:
    case ENOSPC:
    case EDQUOT:
      return FailureKind::kExhausted;
    case EACCES:
    case EPERM:
      return FailureKind::kDenied;
    case EROFS:
    case EFBIG:
    case EINVAL:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
    case ETXTBSY:
      return FailureKind::kRefused;
    case EFAULT:
      return FailureKind::kInaccessible;
    case EIO:
    case ENXIO:
    case ENODEV:
    case EREMOTEIO:
    case ESTALE:
    case EUCLEAN:
    case EBADMSG:
    case ENOMEDIUM:
    case EHWPOISON:
      return FailureKind::kDevice;
    default:
      return FailureKind::kOther;
  }
}

ErrorReason reason_of_errno(int error_number, const std::string& what) {
  const std::string why = std::generic_category().message(error_number);
  return {what.empty() ? why : concat(what, ": ", why), kind_of_errno(error_number)};
}

ErrorReason reason_of(const std::exception& error) {
  if (const auto* const failure = dynamic_cast<const Failure*>(&error)) return failure->reason();
  if (const auto* const failed = dynamic_cast<const std::system_error*>(&error)) {
    return {failed->what(), kind_of_errno(failed->code().value())};
  }
  if (dynamic_cast<const std::bad_alloc*>(&error)) return reason_of_errno(ENOMEM);
  if (dynamic_cast<const CudaError*>(&error)) return {error.what(), FailureKind::kDevice};
  if (dynamic_cast<const Unavailable*>(&error)) return {error.what(), FailureKind::kDevice};
  return {error.what(), FailureKind::kOther};
}

FailureKind kind_of_peer(FailureKind its) {
  switch (its) {
    case FailureKind::kBusy:
    case FailureKind::kExhausted:
    case FailureKind::kDenied:
    case FailureKind::kIncompatible:
    case FailureKind::kInaccessible:
    case FailureKind::kDevice:
      return its;
    default:  // also of a version that has kinds which this one does not know
      return FailureKind::kRefused;
  }
}

}  // namespace mk::transfer

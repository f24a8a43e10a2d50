#include "transfer/net/address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

#include "common/check.h"
#include "common/fd.h"

namespace mk::transfer {
namespace {

constexpr size_t kMaxHostBytes = 240;  // DNS allows 253; a name must fit into a Hello
const std::string kWithinMachine = "mooncake_kernels/";

bool is_host(const std::string& host, bool bracketed) {
  const auto is_legal = [bracketed](unsigned char c) {
    if (c >= '0' && c <= '9') return true;
    if ((c | 32) >= 'a' && (c | 32) <= 'z') return true;
    return c == '.' || c == '-' || c == '_' || (bracketed && (c == ':' || c == '%'));
  };
  return !host.empty() && host.size() <= kMaxHostBytes &&
         std::all_of(host.begin(), host.end(), is_legal);
}

// The port, or -1.
int parse_port(const std::string& text) {
  const bool digits =
      !text.empty() && text.size() <= 5 &&
      std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  const int port = digits ? std::stoi(text) : -1;
  return port <= 65535 ? port : -1;
}

// Converts an IPv4-mapped IPv6 address, ::ffff:a.b.c.d, to IPv4; leaves others as they are.
SocketAddress unmapped(const SocketAddress& address) {
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(address.storage);
  if (ipv6.sin6_family != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&ipv6.sin6_addr)) return address;
  SocketAddress plain{{}, sizeof(sockaddr_in)};
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(plain.storage);
  ipv4.sin_family = AF_INET;
  ipv4.sin_port = ipv6.sin6_port;
  std::memcpy(&ipv4.sin_addr, &ipv6.sin6_addr.s6_addr[12], sizeof(ipv4.sin_addr));
  return plain;
}

std::string slashed(const SocketAddress& where) {
  const SocketAddress plain = unmapped(where);
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  getnameinfo(plain.get(), plain.num_bytes, host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  return concat(host, "/", port);
}

// Only the kernel knows the broadcast addresses of this machine's networks: unless asked to, it
// does not connect a datagram socket to one.
bool is_broadcast(const sockaddr_in& address) {
  if (address.sin_addr.s_addr == htonl(INADDR_BROADCAST)) return true;
  const Fd fd(MK_SYSCALL(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket"));
  const auto* const target = reinterpret_cast<const sockaddr*>(&address);
  return ::connect(fd.get(), target, sizeof(address)) < 0 && errno == EACCES;
}

}  // namespace

std::string HostPort::name() const {
  const bool bracketed = host.find(':') != std::string::npos;
  return bracketed ? concat("[", host, "]:", port) : concat(host, ":", port);
}

HostPort parse_address(const std::string& op, const std::string& argument,
                       const std::string& text) {
  const size_t colon = text.rfind(':');
  const bool found = colon != std::string::npos;
  std::string host = found ? text.substr(0, colon) : "";
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) host = host.substr(1, host.size() - 2);
  const int port = found ? parse_port(text.substr(colon + 1)) : -1;
  MK_CHECK(port >= 0 && is_host(host, bracketed), op, ": ", argument,
           " must be \"host:port\", got \"", text, "\"");
  return {host, static_cast<uint16_t>(port)};
}

std::vector<SocketAddress> resolve(const HostPort& where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const std::string port = std::to_string(where.port);
  const int error = getaddrinfo(where.host.c_str(), port.c_str(), &hints, &list);
  if (error) throw Unavailable(concat("cannot resolve ", where.host, ": ", gai_strerror(error)));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* item = list; item; item = item->ai_next) {
    SocketAddress& address = addresses.emplace_back();
    std::memcpy(&address.storage, item->ai_addr, item->ai_addrlen);
    address.num_bytes = item->ai_addrlen;
  }
  return addresses;
}

SocketAddress within_machine(const SocketAddress& where) {
  const std::string name = kWithinMachine + slashed(where);
  SocketAddress address{};
  auto& local = reinterpret_cast<sockaddr_un&>(address.storage);
  local.sun_family = AF_UNIX;
  // The first byte stays 0: the name is abstract.
  const size_t num_bytes = std::min(name.size(), sizeof(local.sun_path) - 1);
  std::memcpy(local.sun_path + 1, name.data(), num_bytes);
  address.num_bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + num_bytes);
  return address;
}

std::string numeric_name(const SocketAddress& address) {
  std::string name;
  if (address.storage.ss_family == AF_UNIX) {
    const size_t header_bytes = offsetof(sockaddr_un, sun_path) + 1;
    const auto& local = reinterpret_cast<const sockaddr_un&>(address.storage);
    if (address.num_bytes > header_bytes) {
      name.assign(local.sun_path + 1, address.num_bytes - header_bytes);
    }
    if (name.rfind(kWithinMachine, 0) != 0) return "";
    name.erase(0, kWithinMachine.size());
  } else {
    name = slashed(address);
  }
  const size_t interface = name.find('%');
  if (interface != std::string::npos) name.erase(interface, name.rfind('/') - interface);
  return name;
}

bool is_unicast(const SocketAddress& address) {
  const SocketAddress plain = unmapped(address);
  if (plain.storage.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(plain.storage);
    const uint32_t host = ntohl(ipv4.sin_addr.s_addr);
    return host != INADDR_ANY && !IN_MULTICAST(host) && !is_broadcast(ipv4);
  }
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(plain.storage);
  return !IN6_IS_ADDR_UNSPECIFIED(&ipv6.sin6_addr) && !IN6_IS_ADDR_MULTICAST(&ipv6.sin6_addr);
}

std::string host_of(const SocketAddress& address) {
  const SocketAddress plain = unmapped(address);
  if (plain.storage.ss_family == AF_INET) {
    const auto& ipv4 = reinterpret_cast<const sockaddr_in&>(plain.storage);
    return std::string(reinterpret_cast<const char*>(&ipv4.sin_addr), 4);
  }
  const auto& ipv6 = reinterpret_cast<const sockaddr_in6&>(plain.storage);
  return std::string(reinterpret_cast<const char*>(&ipv6.sin6_addr), 8);
}

}  // namespace mk::transfer

// Where engines listen: "host:port", "[::1]:port". Under p2p that is also their name.
//
// Layer: transfer.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mk::transfer {

struct HostPort {
  std::string host;  // without brackets
  uint16_t port;

  std::string name() const;
};

struct SocketAddress {
  sockaddr_storage storage;
  socklen_t num_bytes;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Throws InvalidArgument unless `text` is "host:port"; `op` is who asks, and by what argument.
HostPort parse_address(const std::string& op, const std::string& argument, const std::string& text);

// Where the host is, in the resolver's order. A host name may be asked of DNS, for as long as
// resolv.conf(5) allows; an address never is. Throws Unavailable in the resolver's words.
std::vector<SocketAddress> resolve(const HostPort& where);

// Where an engine that listens at `where` listens for peers on its machine (more exactly, in its
// network namespace): a name that is in no file system.
SocketAddress within_machine(const SocketAddress& where);

// Whether peers can connect to the address: it is neither "every address of this machine" nor a
// multicast or broadcast address.
bool is_unicast(const SocketAddress& address);

// What is counted as one host: an IPv4 address, or an IPv6 network of 64 bits, within which a host
// may have as many addresses as it likes. A key, not for people.
std::string host_of(const SocketAddress& address);

}  // namespace mk::transfer

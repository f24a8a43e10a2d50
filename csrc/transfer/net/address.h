// Addresses where engines listen: "host:port", "[::1]:port". Under p2p they are also their names.
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

// Throws InvalidArgument unless `text` is "host:port"; `op` and `argument` name the caller's.
HostPort parse_address(const std::string& op, const std::string& argument, const std::string& text);

// The host's addresses, in the resolver's order. A host name may query DNS, for as long as
// resolv.conf(5) allows; an address never does. Throws Unavailable with the resolver's message.
std::vector<SocketAddress> resolve(const HostPort& where);

// Where an engine that listens at `where` listens for peers on its machine (more exactly, in its
// network namespace): a name outside any file system.
SocketAddress within_machine(const SocketAddress& where);

// Such an address as text that is the same on either end of a connection: "127.0.0.1/4711",
// "fe80::1/4711" (without the interface, which each end names for itself). Also that of a socket at
// within_machine(); "" for one without a name.
std::string numeric_name(const SocketAddress& address);

// Whether peers can connect to the address: it is neither "every address of this machine" nor a
// multicast or broadcast address.
bool is_unicast(const SocketAddress& address);

// The host that an address of IP counts as: an IPv4 address, or a 64-bit IPv6 network, within which
// a host may have any number of addresses. A key, not for display.
std::string host_of(const SocketAddress& address);

}  // namespace mk::transfer

// PeerIdentity: which connections are lost, until the peer has ended them.
#include <vector>

#include "expect.h"
#include "transfer/peer_identity.h"

using namespace mk::transfer;

namespace {

void one_is_lost_until_its_end_was_confirmed() {
  PeerIdentity identity(0);
  EXPECT(!identity.has_lost() && identity.lost().empty());
  identity.lose({5, 1});
  const std::vector<Link> told = identity.lost();
  EXPECT(told.size() == 1 && told[0].id == 5 && told[0].epoch == 1);
  EXPECT(identity.has_lost() && identity.lost().size() == 1);  // to all who look meanwhile
  identity.forget(told);
  EXPECT(!identity.has_lost() && identity.lost().empty());
  identity.forget(told);  // as by another lane
  EXPECT(!identity.has_lost());
}

void what_is_lost_meanwhile_stays_lost() {
  PeerIdentity identity(0);
  identity.lose({5, 1});
  const std::vector<Link> told = identity.lost();
  identity.lose({6, 1});
  identity.lose({5, 2});
  identity.forget(told);
  const std::vector<Link> left = identity.lost();
  EXPECT(identity.has_lost() && left.size() == 2);
  EXPECT(left[0].id == 6 && left[1].id == 5 && left[1].epoch == 2);
}

void a_later_connection_of_its_link_ends_it() {
  PeerIdentity identity(0);
  identity.lose({5, 1});
  identity.lose({6, 1});
  identity.recover({5, 2});
  EXPECT(identity.has_lost() && identity.lost().size() == 1);
  identity.recover({6, 2});
  EXPECT(!identity.has_lost());
}

}  // namespace

int main() {
  one_is_lost_until_its_end_was_confirmed();
  what_is_lost_meanwhile_stays_lost();
  a_later_connection_of_its_link_ends_it();
  return failures() != 0;
}

// PeerIdentity: which engine it is, and which connections to that are lost, until it has ended
// them.
#include <cstdint>
#include <memory>
#include <vector>

#include "expect.h"
#include "transfer/base/error.h"
#include "transfer/net/peer_identity.h"

using namespace mk::transfer;

namespace {

void one_is_lost_until_its_end_was_confirmed() {
  LostLinks lost;
  EXPECT(!lost.any() && lost.all().empty());
  lost.add({5, 1});
  const std::vector<Link> told = lost.all();
  EXPECT(told.size() == 1 && told[0].id == 5 && told[0].epoch == 1);
  EXPECT(lost.any() && lost.all().size() == 1);  // to all who look meanwhile
  lost.forget(told);
  EXPECT(!lost.any() && lost.all().empty());
  lost.forget(told);  // as by another lane
  EXPECT(!lost.any());
}

void what_is_lost_meanwhile_stays_lost() {
  LostLinks lost;
  lost.add({5, 1});
  const std::vector<Link> told = lost.all();
  lost.add({6, 1});
  lost.add({5, 2});
  lost.forget(told);
  const std::vector<Link> left = lost.all();
  EXPECT(lost.any() && left.size() == 2);
  EXPECT(left[0].id == 6 && left[1].id == 5 && left[1].epoch == 2);
}

void a_later_connection_of_its_link_ends_it() {
  LostLinks lost;
  lost.add({5, 1});
  lost.add({6, 1});
  lost.recover({5, 2});
  EXPECT(lost.any() && lost.all().size() == 1);
  lost.recover({6, 2});
  EXPECT(!lost.any());
}

bool is_taken_for(PeerIdentity& identity, uint64_t instance, const char* name = "seven") {
  try {
    identity.check(instance, name);
    return true;
  } catch (const Failure&) {
    return false;
  }
}

void it_is_the_engine_that_has_answered_first() {
  const auto table = std::make_shared<LostLinksTable>();
  PeerIdentity anyone(0, "", table), expected(7, "seven", table);
  EXPECT(!anyone.has_lost() && !anyone.lost());
  EXPECT(is_taken_for(anyone, 8) && is_taken_for(anyone, 8) && !is_taken_for(anyone, 7));
  EXPECT(!is_taken_for(expected, 8) && !is_taken_for(expected, 7, "eight"));
  EXPECT(is_taken_for(expected, 7));
}

void what_one_has_lost_all_know_who_open_that_engine() {
  const auto table = std::make_shared<LostLinksTable>();
  PeerIdentity before(0, "", table), beside(0, "", table), other(0, "", table), after(0, "", table);
  before.check(7, "x");
  beside.check(7, "x");
  other.check(8, "x");
  before.lost()->add({5, 1});
  after.check(7, "x");
  EXPECT(beside.has_lost() && after.has_lost() && !other.has_lost());
  after.lost()->forget(after.lost()->all());
  EXPECT(!before.has_lost() && !beside.has_lost());
}

void of_engines_that_nobody_has_open_the_last_ones_are_kept_in_mind() {
  LostLinksTable table;
  constexpr uint64_t kMaxLeft = LostLinksTable::kMaxLeft;
  const LostLinksRef open = table.of(1);
  open->add({1, 1});
  for (uint64_t i = 2; i < 3 * kMaxLeft; ++i) {
    table.of(i)->add({i, 1});
    table.of(4 * kMaxLeft + i);  // of which nothing was lost
  }
  EXPECT(table.of(1) == open);
  EXPECT(!table.of(2)->any());
  EXPECT(!table.of(kMaxLeft)->any());
  EXPECT(table.of(3 * kMaxLeft - 1)->any());
  EXPECT(table.of(2 * kMaxLeft + 1000)->any());
}

}  // namespace

int main() {
  one_is_lost_until_its_end_was_confirmed();
  what_is_lost_meanwhile_stays_lost();
  a_later_connection_of_its_link_ends_it();
  it_is_the_engine_that_has_answered_first();
  what_one_has_lost_all_know_who_open_that_engine();
  of_engines_that_nobody_has_open_the_last_ones_are_kept_in_mind();
  return failures() != 0;
}

// Sieve against SIEVE as its paper tells it, by a list that is walked anew each time.
#include "common/sieve.h"

#include <algorithm>
#include <random>
#include <vector>

#include "expect.h"

using namespace mk;

namespace {

struct Item : SieveEntry {
  bool is_busy = false;
};

Item* evict(Sieve<Item>& sieve) {
  return sieve.evict([](Item& item) { return !item.is_busy; });
}

// Algorithm 1 of the paper: from the hand to the head, else from the tail.
struct Model {
  std::vector<Item*> items;  // the oldest first
  size_t hand = 0;

  Item* evict() {
    for (size_t steps = 2 * items.size(); steps > 0; --steps) {
      Item* const item = items[hand];
      const bool stays = visited[item] || item->is_busy;
      visited[item] = false;
      if (!stays) {
        items.erase(items.begin() + hand);
        wrap();
        return item;
      }
      ++hand;
      wrap();
    }
    return nullptr;
  }
  void remove(Item* item) {
    const size_t at = std::find(items.begin(), items.end(), item) - items.begin();
    items.erase(items.begin() + at);
    if (at < hand) --hand;
    wrap();
  }
  void wrap() {
    if (hand == items.size()) hand = 0;
  }

  struct Marks {
    std::vector<std::pair<Item*, bool>> all;
    bool& operator[](Item* item) {
      for (auto& [known, mark] : all) {
        if (known == item) return mark;
      }
      return all.emplace_back(item, false).second;
    }
  } visited;
};

void the_oldest_that_was_not_used_goes_first() {
  Sieve<Item> sieve;
  Item items[4];
  EXPECT(evict(sieve) == nullptr);
  for (Item& item : items) sieve.insert(item);
  items[0].visited = true;
  EXPECT(evict(sieve) == &items[1]);
  EXPECT(!items[0].visited);
  items[2].visited = true;
  EXPECT(evict(sieve) == &items[3]);  // the hand goes on from where it is
  EXPECT(evict(sieve) == &items[0]);
  EXPECT(sieve.size() == 1);
}

void what_is_in_use_stays() {
  Sieve<Item> sieve;
  Item items[3];
  for (Item& item : items) {
    item.is_busy = true;
    sieve.insert(item);
  }
  EXPECT(evict(sieve) == nullptr && sieve.size() == 3);
  items[1].is_busy = false;
  items[1].visited = true;
  EXPECT(evict(sieve) == &items[1]);
}

void it_does_what_the_model_does() {
  std::mt19937 random(7);
  Sieve<Item> sieve;
  Model model;
  std::vector<Item> items(24);
  for (int step = 0; step < 20000; ++step) {
    Item& item = items[random() % items.size()];
    const auto found = std::find(model.items.begin(), model.items.end(), &item);
    const bool is_in = found != model.items.end();
    switch (random() % 5) {
      case 0:
        if (is_in) break;
        sieve.insert(item);
        model.items.push_back(&item);
        model.visited[&item] = false;
        break;
      case 1:
        if (!is_in) break;
        item.visited = true;
        model.visited[&item] = true;
        break;
      case 2:
        item.is_busy = !item.is_busy;
        break;
      case 3:
        if (!is_in) break;
        sieve.remove(item);
        model.remove(&item);
        break;
      case 4: {
        const size_t before = sieve.size();
        Item* const gone = evict(sieve);
        EXPECT(gone == model.evict());
        EXPECT(sieve.size() == before - (gone ? 1 : 0));
      }
    }
    EXPECT(sieve.size() == model.items.size());
  }
}

}  // namespace

int main() {
  the_oldest_that_was_not_used_goes_first();
  what_is_in_use_stays();
  it_does_what_the_model_does();
  return failures() != 0;
}
